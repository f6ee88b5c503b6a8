"""How a daemon may be reached: each way with the headers that go over it, and whom to believe at its end.

Pure: transport.py and aio_transport.py try them in order, the one that led somewhere first.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from gpulayer.client.address import Address, Secure, Trust, not_logged_in
from gpulayer.client.exchange import request_headers
from gpulayer.model.errors import GpulayerError, InvalidRequest, PermissionDenied


@dataclass(frozen=True)
class Way:
    """`trust` None: nothing to prove, because it leads to this host."""

    address: Address
    """Of one node: what is said to people of it."""
    headers: dict[str, str] = field(repr=False)
    trust: Trust | None = None

    @property
    def endpoint(self) -> tuple[str, int]:
        """Of a Secure address."""
        assert isinstance(self.address, Secure)
        return self.address.endpoints[0]

    @cached_property
    def context(self) -> ssl.SSLContext:
        """Believes that one authority, whatever host its certificate names."""
        assert self.trust is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        try:
            context.load_verify_locations(cadata=self.trust.ca_pem)
        except (ssl.SSLError, ValueError) as error:
            raise InvalidRequest(
                f"the CA that {self.address} is to be known by is no certificate in PEM",
                hint="look at $GPULAYER_CA_FILE, or log in again: gpulayer login URL",
            ) from error
        return context


class Ways:
    """Of one address. Threads may share it: what is kept is only which way to try first."""

    def __init__(self, address: Address, token: str | None) -> None:
        self.address = address
        self._ways = list(_ways_to(address, token))
        self._first = self._ways[0] if self._ways else None

    def __iter__(self) -> Iterator[Way]:
        first = self._first
        if first is None:
            raise not_logged_in(self.address)
        yield first
        yield from (way for way in self._ways if way is not first)

    def led_there(self, way: Way) -> None:
        self._first = way

    def nowhere(self, errors: list[GpulayerError]) -> GpulayerError:
        """What to say when none did: of a node that was reached rather than of one that was not."""
        refused = [error for error in errors if isinstance(error, PermissionDenied)]
        found = (refused or errors)[0]
        others = len({way.address for way in self._ways}) - 1
        if others and not refused:
            found.message += f", nor at {others} other {'node' if others == 1 else 'nodes'} of that cluster"
        return found


def _ways_to(address: Address, token: str | None) -> Iterator[Way]:
    if not isinstance(address, Secure):
        yield Way(address, request_headers(address, token))
        return
    for endpoint in address.endpoints:
        for trust in address.trusts:
            one = Secure((endpoint,), (trust,))
            yield Way(one, request_headers(one, token or trust.token or None), trust)


def wrong_authority(way: Way) -> PermissionDenied:
    """Its certificate was issued by somebody else: nothing was sent, above all no token."""
    cluster = way.trust.cluster if way.trust is not None else ""
    what = (
        f"cluster {cluster}, which you are logged in to" if cluster else "the cluster whose CA is in $GPULAYER_CA_FILE"
    )
    return PermissionDenied(
        f"what answers at {way.address} is no node of {what}",
        hint=f"if it is a node of another cluster: gpulayer login {way.address}; else somebody may be in between",
        code="wrong_authority",
    )
