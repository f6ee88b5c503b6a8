"""One TLS connection between two daemons, as frames: how it is opened, greeted, read, written and ended.

Who is let in, by what hello, is peer_greeting.py's; who may have how many of these peer_links.py's.
"""

from __future__ import annotations

import errno
import select
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import trio

from gpulayer.model.address import Address
from gpulayer.model.errors import PermissionDenied, Unreachable
from gpulayer.runtime.trust import Identity, identity_of
from gpulayer.wire.codec import DecodeError
from gpulayer.wire.frames import FrameReader, encode_frame
from gpulayer.wire.peer import Goodbye, Hello, PeerFrame

Why: TypeAlias = Literal["refused", "timeout", "closed", "failed", "goodbye"]

RECEIVE_BYTES = 64 * 1024
# A dead host's connection ends by itself within 14 s, and one with something to send within WRITE_SECONDS.
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES = 5, 3, 3
# The next address is tried beside one that has not answered by then (RFC 8305 §5).
STAGGER_SECONDS = 0.25
GOODBYE_SECONDS = 1.0
ALERT_SECONDS = 0.5

_SAYS_TIMEOUT = (errno.ETIMEDOUT, errno.EHOSTUNREACH)
_SAYS_CLOSED = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)


class LinkEnded(Unreachable):
    """A connection was not made, or has ended. `why` as in LinkDown; `code` says what was wrong with the other end, and
    `is_ours` that it was found here and not by it."""

    def __init__(
        self, why: Why, message: str, *, hint: str = "", code: str | None = None, is_ours: bool = False
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.why = why
        self.is_ours = is_ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds, unless a name says otherwise. Tests shorten some."""

    connect_seconds: float = 3.0
    connect_urgent_seconds: float = 1.0
    hello_seconds: float = 3.0
    """TLS and the hellos of both ends."""
    header_seconds: float = 1.0
    """From the end of the TLS handshake to the header of the first frame."""
    write_seconds: float = 10.0
    """A peer that takes nothing for so long is given up."""
    idle_seconds: float = 60.0
    opened_max: int = 64
    handshakes_max: int = 8
    handshakes_per_source_max: int = 4
    arrivals_max: int = 256
    """Accepted and not greeted yet, those that wait for a handshake included."""
    bulk_per_peer_max: int = 64
    bulk_max: int = 512
    joins_max: int = 8
    join_request_seconds: float = 5.0
    join_answer_seconds: float = 30.0
    outbox_frames: int = 256
    outbox_bytes: int = 2 * 1024 * 1024
    outbox_kept_frames: int = 1024
    outbox_kept_bytes: int = 16 * 1024 * 1024


class FrameStream:
    """A connection whose TLS stands. One task may send while another receives; each of the two is one at a time.

    `identity`: of the other end's certificate; None where it has shown none (a joiner).
    """

    def __init__(self, tls: trio.SSLStream[trio.SocketStream], remote: Address, *, write_seconds: float) -> None:
        self.remote = remote
        self.identity: Identity | None = None
        self.hello: Hello | None = None
        """The other end's."""
        self.reader = FrameReader()
        self.bytes_in = self.bytes_out = self.frames_in = 0
        self._tls = tls
        self._write_seconds = write_seconds
        self._sending = trio.Lock()
        self._is_broken = False
        """Nothing more can be sent."""
        self._heard_goodbye = False
        """Nothing more will come; the other end reads on until we close."""

    async def receive_frame(self) -> PeerFrame:
        """The next one. LinkEnded: there is none; `goodbye` if the other end said so, `closed` if it broke off,
        `failed` if what came was no frame."""
        while True:
            try:
                frame = self.reader.next_frame()
            except DecodeError as error:
                raise LinkEnded(
                    "failed", f"{self.remote} sent no frame: {error}", code="bad_frame", is_ours=True
                ) from error
            if frame is not None:
                self.frames_in += 1
                if isinstance(frame, Goodbye):
                    self._heard_goodbye = True
                    raise LinkEnded("goodbye", frame.message or frame.code, hint=frame.hint, code=frame.code)
                return frame
            await self._receive_more()

    async def receive_header(self) -> None:
        """Until the length of the next frame is there. LinkEnded."""
        while not self.reader.has_header:
            await self._receive_more()

    async def send_frame(self, frame: PeerFrame) -> None:
        """LinkEnded: it could not be sent, or not within the limit. EncodeError: it is no frame."""
        await self.send_encoded(encode_frame(frame))

    async def send_encoded(self, data: bytes) -> None:
        """Whole frames of encode_frame()."""
        async with self._sending:
            if self._is_broken:
                raise LinkEnded("closed", f"the link to {self.remote} has ended")
            is_sent = False
            try:
                with trio.move_on_after(self._write_seconds):
                    await self._tls.send_all(data)
                    is_sent = True
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise _ended(error, self.remote) from error
            finally:
                # A frame that was cut short leaves the stream out of step, whatever cut it.
                self._is_broken = self._is_broken or not is_sent
            if not is_sent:
                raise LinkEnded("timeout", f"{self.remote} has read nothing for {self._write_seconds:g} s")
            self.bytes_out += len(data)

    def be_patient(self, write_seconds: float) -> None:
        """For a stream whose reader may rest, with nothing wrong at either end."""
        self._write_seconds = write_seconds
        self._tls.transport_stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(write_seconds * 1000))

    @property
    def is_fresh(self) -> bool:
        """Of a stream that is kept for later: nothing has come on it, neither an end nor a word out of turn."""
        if self._is_broken or self._heard_goodbye or self.reader.buffered_bytes:
            return False
        poll = select.poll()
        poll.register(self._tls.transport_stream.socket.fileno(), select.POLLIN)
        return not poll.poll(0)

    async def aclose(self, goodbye: Goodbye | None = None) -> None:
        """Says goodbye, if the other end still listens, and closes. A second call does nothing."""
        try:
            if not (self._is_broken or self._heard_goodbye):
                with trio.move_on_after(GOODBYE_SECONDS, shield=True):
                    await self.send_frame(goodbye or Goodbye())
                    await self._tls.transport_stream.send_eof()
                    # To close before the other end does would cost it these words if something of its is unread.
                    while await self._tls.receive_some(RECEIVE_BYTES):
                        pass
        except (LinkEnded, trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            pass
        finally:
            self.close()

    def close(self) -> None:
        """At once and without a goodbye, as the end of the process would."""
        self._is_broken = True
        self._tls.transport_stream.socket.close()

    async def _receive_more(self) -> None:
        try:
            data = await self._tls.receive_some(RECEIVE_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._is_broken = True
            raise _ended(error, self.remote) from error
        if not data:
            self._is_broken = True
            raise LinkEnded("closed", f"{self.remote} closed the link without a goodbye")
        self.bytes_in += len(data)
        self.reader.feed(data)


# --- opening ----------------------------------------------------------------------------------------------------


async def secure(
    plain: trio.SocketStream,
    context: ssl.SSLContext,
    remote: Address,
    *,
    server_side: bool,
    write_seconds: float,
    server_hostname: str | None = None,
) -> FrameStream:
    """The TLS handshake, and whose certificate it is. LinkEnded. The caller bounds the time."""
    _prepare(plain, write_seconds)
    tls = trio.SSLStream(
        plain, context, server_side=server_side, server_hostname=server_hostname, https_compatible=True
    )
    try:
        await tls.do_handshake()
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        with trio.move_on_after(ALERT_SECONDS, shield=True):
            await _send_alert(tls, plain)
        plain.socket.close()
        raise _ended(error, remote, is_handshake=True) from error
    except BaseException:
        plain.socket.close()
        raise
    stream = FrameStream(tls, remote, write_seconds=write_seconds)
    shown: dict[str, Any] = tls.getpeercert() or {}
    if shown:
        try:
            stream.identity = identity_of(shown)
        except PermissionDenied as error:
            stream.close()
            raise LinkEnded(
                "failed", f"{remote}: {error.message}", hint=error.hint, code=error.code, is_ours=True
            ) from error
    return stream


async def _send_alert(tls: trio.SSLStream[trio.SocketStream], plain: trio.SocketStream) -> None:
    """What OpenSSL has to say about a handshake that failed, so that the other end knows why. trio does not send it."""
    outgoing: ssl.MemoryBIO | None = getattr(tls, "_outgoing", None)
    try:
        if outgoing is not None and outgoing.pending:
            await plain.send_all(outgoing.read())
            await plain.send_eof()
            # Closing with something unread would reset the connection, and the alert might be lost.
            while await plain.receive_some(RECEIVE_BYTES):
                pass
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


async def connect(addresses: Sequence[Address], *, seconds: float) -> tuple[trio.SocketStream, Address]:
    """TCP to the first address that answers; each is begun a moment after the one before it, or when that has failed.

    LinkEnded: `refused` only where a host said so and none was silent. An address may be one that every host has (of a
    bridge, say), and then it is this host that refuses, whatever became of the other.
    """
    found: list[tuple[trio.SocketStream, Address]] = []
    failed: dict[Address, tuple[Why, str]] = {}

    async with trio.open_nursery() as nursery:
        for place, address in enumerate(addresses):
            done = trio.Event()
            nursery.start_soon(_try, address, seconds, found, failed, done, nursery.cancel_scope)
            if place + 1 < len(addresses):
                with trio.move_on_after(STAGGER_SECONDS):
                    await done.wait()
            if found:
                break
    if found:
        for extra, _ in found[1:]:
            extra.socket.close()
        return found[0]
    raise _none_of(addresses, failed)


def address_of(name: Any) -> Address:
    """Of getpeername() and the like; without a scope."""
    return Address(str(name[0]).partition("%")[0], int(name[1]))


# --- within -----------------------------------------------------------------------------------------------------


async def _try(
    address: Address,
    seconds: float,
    found: list[tuple[trio.SocketStream, Address]],
    failed: dict[Address, tuple[Why, str]],
    done: trio.Event,
    all_of_them: trio.CancelScope,
) -> None:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        plain = trio.socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        failed[address] = ("failed", error.strerror or str(error))
        done.set()
        return
    try:
        with trio.move_on_after(seconds) as scope:
            await plain.connect((address.host, address.port))
            found.append((trio.SocketStream(plain), address))
            all_of_them.cancel()
            return
        if scope.cancelled_caught:
            failed[address] = ("timeout", f"no answer within {seconds:g} s")
    except OSError as error:
        failed[address] = (_why_of(error), error.strerror or str(error))
    finally:
        if all(stream.socket is not plain for stream, _ in found):
            plain.close()
        done.set()


def _none_of(addresses: Sequence[Address], failed: dict[Address, tuple[Why, str]]) -> LinkEnded:
    whys = {why for why, _ in failed.values()}
    why: Why = "timeout" if "timeout" in whys else "refused" if "refused" in whys else "failed"
    said = "; ".join(f"{address}: {failed[address][1]}" for address in addresses if address in failed)
    return LinkEnded(why, said or "it has no address", hint="is a node running there, and is no firewall in the way?")


def _why_of(error: OSError) -> Why:
    if error.errno == errno.ECONNREFUSED:
        return "refused"
    if error.errno in _SAYS_TIMEOUT:
        return "timeout"
    return "closed" if error.errno in _SAYS_CLOSED else "failed"


# What OpenSSL says of a handshake that the other end's certificate, or the other end, broke off; and what that means.
_ALERTS = {
    "TLSV1_ALERT_UNKNOWN_CA": ("foreign_cluster", "it does not accept our certificate: another cluster's authority"),
    "SSLV3_ALERT_BAD_CERTIFICATE": ("bad_certificate", "it does not accept our certificate"),
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": ("certificate_expired", "it says that our certificate has expired"),
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": ("bad_certificate", "it does not accept our certificate"),
    "TLSV1_ALERT_PROTOCOL_VERSION": ("tls_version", "it does not speak TLS 1.3"),
    "WRONG_VERSION_NUMBER": ("no_tls", "what it speaks is not TLS"),
    "UNSUPPORTED_PROTOCOL": ("tls_version", "it does not speak TLS 1.3"),
}
# X509_V_ERR_* of openssl/x509_vfy.h.
_NOT_YET_VALID, _HAS_EXPIRED = 9, 10


def _ended(error: BaseException, remote: Address, *, is_handshake: bool = False) -> LinkEnded:
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        if cause.verify_code in (_NOT_YET_VALID, _HAS_EXPIRED):
            return LinkEnded(
                "failed",
                f"the certificate of {remote}: {cause.verify_message}",
                hint="compare the clocks of the two hosts; if they are right, join that node again",
                code="certificate_expired",
                is_ours=True,
            )
        return LinkEnded(
            "failed",
            f"the certificate of {remote} is not of this cluster: {cause.verify_message}",
            hint="is that the address of another cluster, or of one that was here before?",
            code="foreign_cluster",
            is_ours=True,
        )
    if isinstance(cause, ssl.SSLEOFError) or cause is None:
        why: Why = "failed" if is_handshake else "closed"
        return LinkEnded(why, f"{remote} closed the connection")
    if isinstance(cause, ssl.SSLError):
        code, text = _ALERTS.get(cause.reason or "", ("tls", f"TLS failed: {cause.reason or cause}"))
        return LinkEnded("failed", f"{remote}: {text}", code=code)
    if isinstance(cause, OSError):
        why = _why_of(cause)
        return LinkEnded("failed" if is_handshake and why == "closed" else why, f"{remote}: {cause.strerror or cause}")
    return LinkEnded("failed", f"{remote}: {cause}")


def _prepare(plain: trio.SocketStream, write_seconds: float) -> None:
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(write_seconds * 1000)),
    ):
        plain.setsockopt(level, option, value)
