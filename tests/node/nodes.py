"""Nodes that pass requests on, without the rest of a daemon: real logs, links, certificates and HTTP servers, two or
three of them in one trio run. What is assigned where a test says."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import trio

from gpulayer.api.app import make_app, make_peer_app
from gpulayer.api.facade import AuditReport, PeerAnswer
from gpulayer.api.server import BoundSockets, bind_sockets, serve
from gpulayer.core.cluster.commands import (
    AdmitNode,
    Command,
    CommitPlan,
    CreateCluster,
    CreateToken,
    Placement,
    SubmitJob,
)
from gpulayer.model import ids
from gpulayer.model.cluster import ClusterState, Role
from gpulayer.model.ids import AttemptId, JobId, NodeId, ReplicaId, TokenId
from gpulayer.model.job import JobSpec
from gpulayer.model.member import Run
from gpulayer.model.node import Capabilities
from gpulayer.model.replica import ReplicaStatus
from gpulayer.model.seen import NodeSeen, NodeState, Table
from gpulayer.node.forward import BulkRequests, PeerApi
from gpulayer.node.voter import SoleVoter, open_voter
from gpulayer.runtime.frame_stream import FrameStream, Limits
from gpulayer.runtime.sandboxes import Sandboxes
from gpulayer.runtime.trust_files import TrustFiles
from gpulayer.runtime.watch import Watch
from gpulayer.shim.log_writer import LogWriter
from gpulayer.wire.peer import RequestHead
from tests.runtime.test_peer_links import AUTHORITY, CLUSTER, End, contexts_of, end

ANSWER_SECONDS_MAX = 20.0


@dataclass
class Node:
    """Fulfils api.facade.NodeFacade."""

    name: str
    directory: Path
    voter: SoleVoter | None = None
    peers: dict[NodeId, Node] = field(default_factory=dict)
    states: dict[NodeId, NodeState] = field(default_factory=dict)
    """How it sees the others; alive where nothing stands here."""
    view: Watch[int] = field(default_factory=lambda: Watch(0))
    observed: dict[AttemptId, ReplicaStatus] = field(default_factory=dict)
    histories: dict[AttemptId, tuple[tuple[float, str], ...]] = field(default_factory=dict)
    end: End | None = None
    bulk: BulkRequests | None = None
    sockets: BoundSockets | None = None
    writers: dict[AttemptId, LogWriter] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Paths that it answered for other nodes."""
    audit_report: AuditReport = field(
        default_factory=lambda: AuditReport(
            checked_at_utc=time.time(), differences=(), replicas_checked=1, processes_seen=2
        )
    )
    started_at_utc: float = field(default_factory=time.time)
    warnings: tuple[str, ...] = ()
    not_ready: str = ""
    events: Any = None

    @property
    def node_id(self) -> NodeId:
        return NodeId(f"n-{self.name}")

    @property
    def node_name(self) -> str:
        return self.name

    @property
    def is_voter(self) -> bool:
        return self.voter is not None

    @property
    def leader_name(self) -> str:
        leader = self.table().leader
        return self.table().nodes[leader].name if leader is not None else ""

    @property
    def ca_pem(self) -> str:
        return AUTHORITY.certificate_pem

    @property
    def state(self) -> ClusterState:
        return self.voter.state.value if self.voter is not None else ClusterState()

    @property
    def observed_state(self) -> ClusterState:
        return self.state

    @property
    def version_of_view(self) -> int:
        return self.view.value

    async def wait_for_change(self, seen: int) -> int:
        return await self.view.wait_for(lambda version: version > seen)

    def table(self) -> Table:
        nodes = {each.node_id: self._seen(each) for each in (self, *self.peers.values())}
        leader = next((each.id for each in nodes.values() if each.is_voter and each.state == "alive"), None)
        return Table(seen_by=self.node_id, nodes=nodes, leader=leader)

    def _seen(self, each: Node) -> NodeSeen:
        state = self.states.get(each.node_id, "alive")
        return NodeSeen(
            id=each.node_id,
            name=each.name,
            state=state,
            reason="" if state == "alive" else "nothing of it answers",
            age_seconds=0.0 if state == "alive" else 42.0,
            facts=None,
            is_self=each is self,
            is_voter=each.is_voter,
            epoch=1,
        )

    def ask(self, node: NodeId, head: RequestHead) -> AbstractAsyncContextManager[PeerAnswer]:
        assert self.bulk is not None
        return self.bulk.ask(node, head)

    async def open_stream(self, node: NodeId) -> FrameStream:
        assert self.end is not None
        other = self.peers[node].end
        assert other is not None
        return await self.end.links.open_stream(node, (other.address,))

    def now_utc(self) -> float:
        return time.time()

    def new_job_id(self) -> JobId:
        return ids.job_id(secrets.token_bytes(8))

    def new_token(self) -> tuple[str, str, str]:
        secret = "gpl_" + secrets.token_urlsafe(32)
        return "t-" + secrets.token_hex(4), secret, sha256(secret.encode()).hexdigest()

    def new_secret(self) -> bytes:
        return secrets.token_bytes(32)

    def keep_empty(self, node: NodeId, seconds: float) -> None:
        pass

    def statuses(self) -> Mapping[AttemptId, ReplicaStatus]:
        return self.observed

    def history(self, attempt: AttemptId) -> tuple[tuple[float, str], ...]:
        return self.histories.get(attempt, ())

    def placeable(self) -> Mapping[NodeId, str]:
        return {node: "" for node in self.state.nodes}

    def verified_seconds_ago(self) -> float:
        return 0.0

    async def propose(self, command: Command) -> Any:
        assert self.voter is not None, "the log is elsewhere"
        accepted = await self.voter.propose(command)
        self.view.set(self.view.value + 1)
        return accepted

    def store_stats(self) -> Any:
        assert self.voter is not None
        return self.voter.store.stats()

    def sandbox(self, attempt: AttemptId) -> Path:
        return Sandboxes(self.directory).path(attempt)

    def log_dir(self, attempt: AttemptId) -> Path:
        return Sandboxes(self.directory).logs(attempt)

    async def audit(self) -> AuditReport:
        await trio.lowlevel.checkpoint()
        return self.audit_report

    async def leave(self) -> None:
        await trio.lowlevel.checkpoint()

    # --- what tests do ----------------------------------------------------------------------------------------------

    async def token(self, role: Role) -> str:
        """Made in the log; the secret."""
        token_id, secret, digest = self.new_token()
        await self.propose(CreateToken(token=TokenId(token_id), role=role, digest=digest))
        return secret

    async def place(self, name: str, *nodes: Node, kind: Any = "service") -> JobId:
        """A job with one replica on each of the nodes."""
        job = self.new_job_id()
        spec = JobSpec(kind=kind, name=name, argv=("true",), replicas=len(nodes), spread="any")
        await self.propose(SubmitJob(job=job, spec=spec))
        placements = tuple(
            Placement(job=job, revision=1, replica=index, node=node.node_id, attempt=1)
            for index, node in enumerate(nodes)
        )
        await self.propose(CommitPlan(based_on=self.state.index, placements=placements))
        return job

    def write(self, job: JobId, replica: int, text: str, *, attempt: int = 1) -> None:
        """As the shim of that replica on this node would."""
        each = AttemptId(ReplicaId(job, replica), attempt)
        if each not in self.writers:
            self.log_dir(each).mkdir(parents=True)
            self.writers[each] = LogWriter(os.open(self.log_dir(each), os.O_RDONLY), max_bytes=1_000_000, keep=3)
        self.writers[each].output(1, 1, memoryview(text.encode()))

    @property
    def port(self) -> int:
        assert self.sockets is not None
        assert self.sockets.port is not None
        return self.sockets.port

    def http(self, role_token: str | None = None) -> httpx.AsyncClient:
        """At its unix socket; with a token at its TCP port."""
        if role_token is None:
            uds = str(self.directory / "gpulayer.sock")
            return httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=uds), base_url="http://localhost", timeout=ANSWER_SECONDS_MAX
            )
        headers = {"Authorization": f"Bearer {role_token}"}
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=ANSWER_SECONDS_MAX)

    async def get(self, path: str, role_token: str | None = None) -> httpx.Response:
        async with self.http(role_token) as client:
            return await client.get(path)


@asynccontextmanager
async def running(
    directory: Path, names: str, *, bind: str = "127.0.0.1", limits: Limits | None = None
) -> AsyncIterator[list[Node]]:
    """`names`: of one letter each; the first one is the voter."""
    async with AsyncExitStack() as stack:
        nodes = [Node(name, directory / name) for name in names]
        voter = await stack.enter_async_context(_voter(directory / "log.db", nodes[0].node_id))
        nodes[0].voter = voter
        for node in nodes:
            node.peers = {other.node_id: other for other in nodes if other is not node}
            node.directory.mkdir()
        await nodes[0].propose(CreateCluster(cluster_id=CLUSTER))
        for node in nodes:
            capabilities = Capabilities(cpus_milli=64_000, memory_mib=100_000)
            await nodes[0].propose(
                AdmitNode(node=node.node_id, name=node.name, advertise="127.0.0.1", capabilities=capabilities)
            )
        for node in nodes:
            await stack.enter_async_context(_served(node, bind, limits))
        yield nodes
        for node in nodes:
            for writer in node.writers.values():
                writer.close()


@asynccontextmanager
async def _voter(path: Path, node: NodeId) -> AsyncIterator[SoleVoter]:
    async def nothing() -> None:
        await trio.lowlevel.checkpoint()

    voter = await open_voter(
        path,
        node_id=node,
        now_utc=time.time,
        snapshot_every=10_000,
        disk_free_min_mib=0,
        before_snapshot=nothing,
        on_events=lambda events: None,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(voter.run)
        yield voter
        nursery.cancel_scope.cancel()
    await voter.store.close()


@asynccontextmanager
async def _served(node: Node, bind: str, limits: Limits | None) -> AsyncIterator[None]:
    shutdown = trio.Event()
    peer_api = PeerApi(make_peer_app(node), shutdown)
    node.bulk = BulkRequests(node.open_stream)

    async def on_bulk(run: Run, stream: FrameStream) -> None:
        await peer_api.serve(run, stream)

    contexts = contexts_of(node.directory, str(node.node_id))
    files = TrustFiles(node.directory)
    with bind_sockets(unix_path=node.directory / "gpulayer.sock", host=bind, port=0) as sockets:
        node.sockets = sockets
        async with (
            end(node.directory, str(node.node_id), contexts=contexts, on_bulk=on_bulk, limits=limits) as node.end,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(node.bulk.run)
            await nursery.start(
                lambda task_status: serve(
                    make_app(node, trusted=True),
                    make_app(node, trusted=False, names=("n1.example",)),
                    sockets,
                    shutdown=shutdown,
                    tls=lambda: files.server_context(ask_for_client_certificate=False),
                    task_status=task_status,
                )
            )
            yield
            shutdown.set()
            nursery.cancel_scope.cancel()


async def lines_of(response: httpx.Response, count: int) -> list[Any]:
    """The next so many documents of a stream."""
    found: list[Any] = []
    with trio.fail_after(ANSWER_SECONDS_MAX):
        async for line in response.aiter_lines():
            if line.strip():
                found.append(json.loads(line))
            if len(found) >= count:
                break
    return found
