"""The async client, for trio and, through anyio, asyncio: the calls of sync.py, to be awaited.

    async with aio.connect() as client:
        job = await client.submit(service(["python", "serve.py"], replicas=2))
        print(await job.endpoints(wait=120))
        async for line in job.logs(follow=True):
            print(line)

What is a stream there is an async generator here. One that is left before its end keeps its connection until it is
closed: with it (`contextlib.aclosing`), with its client (`async with`), or when it is collected.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import AsyncGeneratorType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from weakref import WeakSet

import anyio

from gpulayer.client import calls
from gpulayer.client.address import find_address
from gpulayer.client.aio_transport import AsyncTransport
from gpulayer.client.calls import Call, Document, Feed
from gpulayer.client.exchange import READY_SECONDS_MAX
from gpulayer.client.stream import Absence
from gpulayer.client.waits import UntilEnded, UntilReady, forgotten, seconds_at_most, seconds_to_wait
from gpulayer.model.errors import Unreachable, WaitTimeout

if TYPE_CHECKING:
    from gpulayer.client.logs import LogLine
    from gpulayer.client.requests import JobRequest

__all__ = ["Client", "Job", "connect"]

T = TypeVar("T")


def connect(url: str | None = None, token: str | None = None, data_dir: str | os.PathLike[str] | None = None) -> Client:
    """A client of the daemon at `url`, else at $GPULAYER_URL, else of this user's own on this host (its unix socket),
    else, where there is none, of the one cluster that this user is logged in to.

    `url` is `unix:///path`, `http://127.0.0.1:7450`, or `https://HOST:7450` of a cluster that `gpulayer login` knows,
    or whose CA $GPULAYER_CA_FILE has; `token` ($GPULAYER_TOKEN, or what the login kept, if left out) is needed for http
    and https; `data_dir` ($GPULAYER_DATA_DIR) says which daemon of this host. Nothing is sent yet. Raises
    InvalidRequest for a URL that is none, or of another host without TLS; PermissionDenied for a cluster that nobody
    has logged in to.
    """
    address = find_address(url, data_dir, os.environ)
    return Client(AsyncTransport(address, token or os.environ.get("GPULAYER_TOKEN")))


class Client:
    """What can be asked of a cluster. Made by `connect()`. Keeps no connection open but those of streams that were
    begun; tasks may share it.
    """

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport
        self._streams: WeakSet[AsyncGeneratorType[Any, None]] = WeakSet()
        self.absence: Absence | None = None
        """Hears when no daemon answers while something is followed, and when one does again; for whoever watches."""

    def __repr__(self) -> str:
        return f"<aio.Client {self.url}>"

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the streams that were begun and left before their end; one that another task reads is that task's.
        `async with` does it; the client can be used on.
        """
        for stream in list(self._streams):
            if not stream.ag_running:
                await stream.aclose()

    @property
    def url(self) -> str:
        """The daemon that is asked, as `connect(url=…)` takes it."""
        return str(self._transport.address)

    @property
    def is_local(self) -> bool:
        """Whether paths mean the same here and there: true for the unix socket."""
        return self._transport.address.is_local

    async def submit(self, request: JobRequest, idempotency_key: str | None = None) -> Job:
        """Hand in a job; returns once it is accepted durably.

        A submit that gets no answer is repeated with the same key for six seconds, so it happens once or not at all:
        two submits with one `idempotency_key` (kept for 24 h) are one job. Left out, each call makes a key of its own.
        Raises Refused where the name is in use, or the key was used for something else. Warns (gl.JobWaits)
        of what will keep it waiting until a person does something: no node has such a GPU, say.
        """
        answer = await self.submit_document(request, idempotency_key)
        calls.tell(answer)
        return Job(self, answer["id"], answer["name"])

    async def submit_document(self, request: JobRequest, idempotency_key: str | None = None) -> Document:
        """As `submit`, with the API's answer: `id`, `name`, `revision`, `replayed`, `warning`."""
        call, repetition = calls.submit(request, idempotency_key), calls.Repetition()
        while True:
            try:
                return await self._call(call)
            except Unreachable as error:
                pause_seconds = repetition.pause_after(error)
            await anyio.sleep(pause_seconds)

    async def dry_run(self, request: JobRequest) -> Document:
        """Where it would go now, replica by replica, and why not elsewhere: `fits`, `replicas`, `summary`. Changes
        nothing.
        """
        return await self._call(calls.dry_run(request))

    async def jobs(self, state: Literal["live", "ended", "all"] = "live") -> list[Document]:
        """A summary of each job, newest first."""
        found, cursor = await self._call(calls.jobs(state, None))
        while cursor:
            page, cursor = await self._call(calls.jobs(state, cursor))
            found += page
        return found

    async def job(self, name: str) -> Job:
        """The job of that name, id, or unambiguous beginning of one. Raises NotFound, or InvalidRequest for a prefix
        of several.
        """
        found = await self._call(calls.job_status(name))
        return Job(self, found["id"], found["name"])

    async def status(self) -> Document:
        """The cluster at a glance: `leader`, `nodes`, `gpus` by model, `jobs` by state, `queued`, `unhealthy`,
        `warnings`.
        """
        return await self._call(calls.status())

    async def nodes(self) -> list[Document]:
        """Each node with its devices and what is free on it."""
        return await self._call(calls.nodes())

    async def node(self, name: str) -> Document:
        """One node by name, id, or unambiguous beginning of one: as in `nodes()`, with its `replicas` and `warnings`.
        Raises NotFound, or InvalidRequest for a beginning of several.
        """
        return await self._call(calls.node(name))

    async def resources(self) -> Document:
        """The stock over the cluster: `models` of GPUs (`idle`, `all`, `held`, `foreign`, `unhealthy`,
        `largest_idle_on_one_node` and its `node`), and `nodes` (CPUs, memory, disk, drivers).
        """
        return await self._call(calls.resources())

    async def audit(self) -> Document:
        """What runs on the host against what should: `differences` is empty where all is well."""
        return await self._call(calls.audit())

    def events(self, after: str | None = None, follow: bool = False) -> AsyncGenerator[Document, None]:
        """The cluster's event feed from behind the offset `after` on (from the oldest kept, if left out), each change
        once.

        With `follow` it goes on with what happens, also through a restart of the daemon.
        """
        return self._follow(calls.events(after, follow))

    async def tokens(self) -> list[Document]:
        """Id, role (`join`: lets hosts join), label and time of each token, uses left and expiry of those that let
        hosts join; never the secret."""
        return await self._call(calls.tokens())

    async def create_token(self, role: Literal["admin", "submit", "read"], label: str = "") -> Document:
        """A new token: `id`, `role`, `label`, and `token`, the secret, which is never shown again."""
        return await self._call(calls.create_token(role, label))

    async def create_join_token(self, *, uses: int = 1, lasts_seconds: float = 3600.0, advertise: str = "") -> Document:
        """A token that lets `uses` hosts join: `id`, `token`, which is never shown again, `expires_at_utc`; `seed`, the
        HOST:PORT to join by, and `bind`, what the host has to listen on (None: loopback). `advertise`: the host of the
        seed, where it is not the one that the node advertises. Raises Refused where no other host reaches the node."""
        return await self._call(calls.create_join_token(uses, lasts_seconds, advertise))

    async def revoke_token(self, token_id: str) -> None:
        """From now on that token is refused. Raises NotFound."""
        await self._call(calls.revoke_token(token_id))

    async def cluster(self) -> Document:
        """Who leads and who votes, `term` and `index` of the log, and the gossip keys: `keys`, by id and state."""
        return await self._call(calls.cluster())

    async def rotate_keys(self) -> Document:
        """Begin to replace the gossip key; the keys as `cluster` has them. Raises Refused while another rotation goes
        on."""
        return await self._call(calls.rotate_keys())

    def leave(self, stop_all: bool = False) -> AsyncGenerator[Document, None]:
        """Let the daemon leave and end; yields `{"state": "stopping", "left": N}` and at last `{"state": "left"}`.

        Raises Refused while replicas run, unless `stop_all` stops them first.
        """
        return self._follow(calls.leave(stop_all))

    async def ready(self) -> bool:
        """Whether a daemon is there and serves. Never raises Unreachable."""
        call = calls.ready()
        try:
            async with self._transport.open(call, call.path, READY_SECONDS_MAX):
                return True
        except Unreachable:
            return False

    async def daemon_pid(self) -> int | None:
        """The daemon's process on this host; None where it is asked over http."""
        return await self._transport.peer_pid()

    async def _call(self, call: Call[T]) -> T:
        return await self._transport.call(call)

    def _follow(self, feed: Feed[T], seconds: float = math.inf) -> AsyncGenerator[T, None]:
        stream = self._transport.follow(feed, seconds, self.absence)
        self._streams.add(cast("AsyncGeneratorType[Any, None]", stream))
        return stream


class Job:
    """A handle on one job. Keeps its id, nothing else: every call asks."""

    def __init__(self, client: Client, job_id: str, name: str) -> None:
        self.id = job_id
        self.name = name
        self._client = client

    def __repr__(self) -> str:
        return f"<aio.Job {self.name} {self.id}>"

    async def status(self) -> Document:
        """How it is: `state`, `reason`, `replicas` with `state`, `reason`, `node`, `endpoint`, `last_exit`, …"""
        return await self._client._call(calls.job_status(self.id))

    async def spec(self) -> Document:
        """The specification in force, every key of it, and its `revision`."""
        return await self._client._call(calls.spec(self.id))

    def watch(self, timeout: float | None = None) -> AsyncGenerator[Document, None]:
        """The status now and after every change, up to the one that says that it ended. WaitTimeout after `timeout`
        seconds.
        """
        return self._client._follow(calls.watch(self.id), seconds_at_most(timeout))

    async def endpoints(self, wait: float | bool | None = None) -> list[str]:
        """`host:port` of each replica that is ready now, by index.

        With `wait` (seconds at most; True: however long it takes), returns once every replica is ready; raises
        WaitTimeout after that time, JobEnded with the reason if the job ends meanwhile.
        """
        seconds = seconds_to_wait(wait)
        if seconds is None:
            return await self._client._call(calls.endpoints(self.id))
        until = UntilReady(self.name, seconds)
        try:
            async with aclosing(self.watch(seconds)) as statuses:
                async for status in statuses:
                    found = until.endpoints(status)
                    if found is not None:
                        return found
        except WaitTimeout:
            raise until.timeout() from None
        raise forgotten(self.name)

    async def endpoint_documents(self) -> list[Document]:
        """The ready ones with `endpoint`, `replica`, `node`, `verified`, `age_seconds`."""
        return await self._client._call(calls.endpoint_documents(self.id))

    def watch_endpoints(self) -> AsyncGenerator[list[Document], None]:
        """All of the ready ones, now and after every change, until the job ends."""
        return self._client._follow(calls.watch_endpoints(self.id))

    def logs(
        self,
        follow: bool = False,
        replica: int | None = None,
        previous: bool = False,
        since: float | None = None,
        tail: int | None = None,
        after: str | None = None,
        run: int | None = None,
    ) -> AsyncGenerator[LogLine, None]:
        """What was written, oldest first: everything kept, or what is chosen.

        `previous`: of every run that has ended; `run`: of that one; `since`: UTC seconds; `tail`: the last so many
        lines; `after`: behind the offset of a line. With `follow` it goes on until nothing more will be written, also
        through a restart of the daemon.
        """
        feed = calls.logs(
            self.id, follow=follow, replica=replica, previous=previous, since=since, tail=tail, after=after, run=run
        )
        return self._client._follow(feed)

    # A cancel scope would do as well, but has no words for what was waited for.
    async def wait(self, timeout: float | None = None) -> Document:  # noqa: ASYNC109
        """Its last status, once it has ended, however it did. WaitTimeout after `timeout` seconds, with what it waits
        for.
        """
        until = UntilEnded(self.name, seconds_at_most(timeout))
        try:
            async with aclosing(self.watch(timeout)) as statuses:
                async for status in statuses:
                    if until.is_over(status):
                        return status
        except WaitTimeout:
            raise until.timeout() from None
        raise forgotten(self.name)

    async def cancel(self, wait: float | bool = False) -> Document:
        """Stop every replica. With `wait` (seconds at most; True: however long it takes) returns its last status once
        no process of it is left.

        Raises Refused where it ended already.
        """
        seconds = seconds_to_wait(wait)
        answer = await self._client._call(calls.cancel(self.id))
        return answer if seconds is None else await self.wait(seconds)

    async def restart(self, replicas: Sequence[int] | None = None) -> Document:
        """Replace the running process of each of `replicas` (all, if left out) by a new run on the same node."""
        return await self._client._call(calls.restart(self.id, replicas))

    def events(self, after: str | None = None, follow: bool = False) -> AsyncGenerator[Document, None]:
        """What happened to it; as `Client.events`."""
        return self._client._follow(calls.events(after, follow, self.id))

    async def explain(self) -> Document:
        """Why each replica is where and how it is: where it could and could not run, node by node, and its history."""
        return await self._client._call(calls.explain(self.id))
