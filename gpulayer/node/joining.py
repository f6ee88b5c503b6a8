"""How a host becomes a node of a cluster that is there already: whom it asks, how often, what it keeps of the answer.

The other side is admission.py. The request is shown only to a cluster whose authority the token names by its pin. While
nobody answers it is tried again, for ever, since hosts start in any order; a refusal ends it at once, with its words.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address
from random import Random
from typing import Literal, TypeAlias

import structlog
import trio

from gpulayer import __version__
from gpulayer.model.address import Address
from gpulayer.model.errors import GpulayerError, InvalidRequest, PermissionDenied, Refused
from gpulayer.model.ids import NodeId
from gpulayer.model.node import Capabilities
from gpulayer.model.places import PEER_PORT
from gpulayer.node.config import Config, Seed
from gpulayer.runtime import trust
from gpulayer.runtime.failpoints import failpoint
from gpulayer.runtime.identity import DataDir, Membership, membership, note_membership
from gpulayer.runtime.peer_cache import CachedPeer, PeerCache
from gpulayer.runtime.peer_greeting import ask_to_join
from gpulayer.runtime.routes import source_towards
from gpulayer.runtime.trust import KeyPair
from gpulayer.runtime.trust_files import TrustFiles
from gpulayer.wire.join_token import JoinTokenText
from gpulayer.wire.peer import PROTOCOL, JoinAccepted, JoinRejected, JoinRequest

log = structlog.get_logger()

# Of one name. More than two of each family would be a name for something else.
ADDRESSES_MAX = 8
RESOLVE_SECONDS = 5.0
# To connect takes a second where somebody is; admission tries our port (2 s) and waits for a disk.
ASK_SECONDS = 20.0
DELAY_MIN, DELAY_MAX = 1.0, 30.0
# A name that is not there yet costs nobody anything to look up: a host that boots before its DNS joins soon after it.
DELAY_MAX_UNRESOLVED = 4.0
SAID_SECONDS = 60.0

WayIn: TypeAlias = Literal["found", "join", "return"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Applicant:
    """What a host says of itself when it asks to be let in."""

    node: NodeId
    name: str
    name_is_derived: bool
    advertise: str
    """Empty: the address that the way to whoever is asked shows."""
    peer_port: int
    """Listens already: it is tried from the other side."""
    api_names: tuple[str, ...] = ()
    """Further IP addresses and DNS names for its certificate."""
    capabilities: Capabilities
    keys: KeyPair = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    accepted: JoinAccepted
    advertise: str
    """Under which address it was let in."""


Ask: TypeAlias = Callable[[Address, str, JoinRequest], Awaitable[JoinAccepted | JoinRejected]]
"""Asks whoever is at the address, if the pinned authority has certified it. Raises GpulayerError."""


def way_in(config: Config, data: DataDir) -> WayIn:
    """Whether this start makes a cluster, joins one, or comes back to the one that the data directory is of.

    Refused: it is of a cluster and is told to join another (code `other_cluster`), or others would not reach it there
    (`unreachable`). InvalidRequest: a token without an address, or an address without a token."""
    member = membership(data.path)
    if member is None:
        if not config.seeds:
            if config.join_token is not None:
                raise InvalidRequest(
                    "a join token is given, and no node of the cluster that it is for",
                    hint="add --join HOST:PORT; without the token this host makes a cluster of its own",
                )
            return "found"
        if config.join_token is None:
            raise InvalidRequest(
                f"--join {config.seeds[0]} needs a join token"
                + (f", and there is no file {config.join_token_file}" if config.join_token_file else ""),
                hint="gpulayer token create --join, on a node of that cluster, prints one; give it in a file with "
                "--token-file, or in $GPULAYER_JOIN_TOKEN",
            )
        return "join"
    _refuse_loopback_among_others(config, data)
    if not config.seeds or config.join_token is None:
        return "return"
    own_pin = _own_pin(data)
    if own_pin != config.join_token.pin:
        raise Refused(
            f"data directory {data.path} is that of a node of cluster {member.cluster_id}, and the join token is for "
            "another cluster; what one has ordered would run beside the work of the other",
            hint="leave out --join to go on there; or choose another --data-dir, or give up what it has with "
            "--abandon-state",
            code="other_cluster",
        )
    if not member.is_voter and not _is_certified(data):
        return "join"
    log.info("join.ignored", cluster=member.cluster_id, reason="this node is a member of that cluster already")
    return "return"


def _refuse_loopback_among_others(config: Config, data: DataDir) -> None:
    """Its own links would work from there; but its endpoints, and its requests for the log, would lead nowhere."""
    if not config.advertise or Address(config.advertise, 1).is_usable_elsewhere:
        return
    peers = PeerCache(data.path / "peers.json").peers
    away = next((peer for peer in peers for address in peer.addresses if address.is_usable_elsewhere), None)
    if away is not None:
        raise Refused(
            f"no other host can reach {config.advertise}, which this node advertises, and its cluster has nodes on "
            f"other hosts ({away.name or away.id})",
            hint="start it with --bind, as when it joined; or put bind into /etc/gpulayer/gpulayer.toml",
            code="unreachable",
        )


async def join(
    applicant: Applicant, seeds: Iterable[Seed], token: JoinTokenText, *, rng: Random, ask: Ask = ask_to_join
) -> Joined:
    """Ask until somebody answers. Raises PermissionDenied or Refused with the words of a rejection, and
    PermissionDenied (code `wrong_authority`) where only another cluster answers."""
    seeds = tuple(seeds)
    tries, said_at = 0, -math.inf
    while True:
        tried = _Round(applicant, token, ask)
        joined = await tried.run(seeds)
        if joined is not None:
            return joined
        if trio.current_time() - said_at >= SAID_SECONDS:
            said_at = trio.current_time()
            tried_ = "; ".join(f"{where}: {why}" for where, why in tried.failures.items())
            log.warning("join.no_answer", tried=tried_, hint="it is tried again until somebody answers")
        most = DELAY_MAX_UNRESOLVED if tried.is_unresolved else DELAY_MAX
        delay = min(most, DELAY_MIN * 2 ** min(tries, 10)) * rng.uniform(0.5, 1.0)
        await trio.sleep(max(DELAY_MIN, delay))
        tries += 1


def _told(error: GpulayerError) -> str:
    if error.code == "bad_frame":  # of the cluster, as its certificate says, and no peer port
        return f"what listens there is not for nodes; is it the port of the API? They join at {PEER_PORT} (--peer-port)"
    return error.message


class _Round:
    """Every seed and every address of its name once, all at the same time. The first answer that decides ends it."""

    def __init__(self, applicant: Applicant, token: JoinTokenText, ask: Ask) -> None:
        self.failures: dict[str, str] = {}
        """What was tried -> why nothing came of it."""
        self.is_unresolved = False
        self._applicant = applicant
        self._token = token
        self._ask = ask
        self._wrong: list[GpulayerError] = []
        self._decided: Joined | GpulayerError | None = None

    async def run(self, seeds: tuple[Seed, ...]) -> Joined | None:
        async with trio.open_nursery() as nursery:
            for seed in seeds:
                nursery.start_soon(self._try_seed, seed, nursery)
        if isinstance(self._decided, GpulayerError):
            raise self._decided
        if self._decided is None and self._wrong and len(self._wrong) == len(self.failures):
            raise self._wrong[0]  # everybody has answered, and nobody was of that cluster
        return self._decided

    async def _try_seed(self, seed: Seed, nursery: trio.Nursery) -> None:
        try:
            addresses = await resolved(seed)
        except OSError as error:
            self.is_unresolved = True
            self.failures[str(seed)] = error.strerror or str(error)
            return
        for address in addresses:
            nursery.start_soon(self._try_address, address, nursery.cancel_scope)

    async def _try_address(self, address: Address, round_scope: trio.CancelScope) -> None:
        advertise = self._applicant.advertise or shown_to(address)
        if not advertise:
            self.failures[str(address)] = "the way there shows no address of this host that others reach; --advertise"
            return
        try:
            with trio.fail_after(ASK_SECONDS):
                answer = await self._ask(address, self._token.pin, self._request(advertise))
        except trio.TooSlowError:
            self.failures[str(address)] = f"no answer within {ASK_SECONDS:g} s"
            return
        except GpulayerError as error:
            self.failures[str(address)] = _told(error)
            if error.code == "wrong_authority":
                self._wrong.append(error)
            if error.code != "protocol":
                return
            answer = JoinRejected(code=error.code, message=error.message, hint=error.hint)
        match answer:
            case JoinRejected(code="no_leader"):
                self.failures[str(address)] = answer.message
                return
            case JoinRejected():
                self._decided = _error_of(answer)
            case JoinAccepted():
                self._decided = Joined(accepted=answer, advertise=advertise)
        round_scope.cancel()

    def _request(self, advertise: str) -> JoinRequest:
        applicant = self._applicant
        return JoinRequest(
            protocol=PROTOCOL,
            gpulayer_version=__version__,
            node=applicant.node,
            name=applicant.name,
            name_is_derived=applicant.name_is_derived,
            advertise=advertise,
            peer_address=Address(advertise, applicant.peer_port),
            api_names=tuple(dict.fromkeys((advertise, *applicant.api_names))),
            capabilities=applicant.capabilities,
            public_key_pem=applicant.keys.public_pem,
            token=self._token.text,
        )


def keep(data: DataDir, joined: Joined, keys: KeyPair) -> None:
    """What makes this node a member, durable: certificate and keys, whom to look for, and last the cluster itself.

    Refused: it was of another cluster before. StorageFailed, PermissionDenied: see TrustFiles.write. OSError."""
    accepted = joined.accepted
    before = membership(data.path)
    if before is not None and before.cluster_id != accepted.cluster_id:
        raise Refused(
            f"data directory {data.path} is that of a node of cluster {before.cluster_id}, "
            f"not of {accepted.cluster_id}",
            hint="choose another --data-dir, or give up what it has with --abandon-state",
            code="other_cluster",
        )
    failpoint("join.before_keep")
    files = TrustFiles(data.path)
    files.write(
        certificate_pem=accepted.certificate_pem,
        private_key_pem=keys.private_pem,
        ca_certificate_pem=accepted.ca_certificate_pem,
        key_ring=accepted.key_ring,
    )
    cache = PeerCache(data.path / "peers.json")
    cache.update(CachedPeer(id=node, name="", addresses=(address,)) for node, address in accepted.peers)
    cache.write()
    failpoint("join.before_membership")
    member = Membership(cluster_id=accepted.cluster_id, is_voter=False, name=accepted.name, voter=accepted.voter)
    note_membership(data, member)
    files.has_joined()
    for warning in accepted.warnings:
        log.warning("join.warned", text=warning)
    log.info("join.joined", cluster=accepted.cluster_id, name=accepted.name, advertise=joined.advertise)


def _own_pin(data: DataDir) -> str:
    """Of the cluster that it is of; empty where that is not known here."""
    try:
        return trust.pin(TrustFiles(data.path).ca_path.read_text("ascii"))
    except (OSError, ValueError, GpulayerError):
        return ""


def _is_certified(data: DataDir) -> bool:
    try:
        TrustFiles(data.path).read(data.node_id)
    except GpulayerError as error:
        log.warning("join.again", reason=error.message)
        return False
    return True


async def resolved(seed: Seed) -> list[Address]:
    """The addresses of its name now. OSError: there are none, or nobody can be asked."""
    try:
        return [Address(str(ip_address(seed.host)), seed.port)]
    except ValueError:
        pass
    with trio.move_on_after(RESOLVE_SECONDS):
        # In a thread of trio's, which is left behind if it hangs.
        found = await trio.socket.getaddrinfo(seed.host, seed.port, type=socket.SOCK_STREAM)
        hosts = dict.fromkeys(str(entry[4][0]) for entry in found)
        addresses = [Address(str(ip_address(host)), seed.port) for host in hosts if "%" not in host]
        if not addresses:
            raise OSError(None, "the name has no address that could be used")
        return addresses[:ADDRESSES_MAX]
    raise OSError(None, f"the name could not be looked up within {RESOLVE_SECONDS:g} s")


def shown_to(address: Address) -> str:
    """What is advertised to the cluster of whoever is there; empty where nothing usable is."""
    source = source_towards(address)
    return source if source is not None and Address(source, 1).is_usable_elsewhere else ""


def _error_of(rejected: JoinRejected) -> GpulayerError:
    is_token = rejected.code in ("bad_token", "token_expired", "token_used_up")
    kind = PermissionDenied if is_token else Refused
    return kind(rejected.message, hint=rejected.hint, code=rejected.code)
