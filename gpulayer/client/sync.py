"""The synchronous client: what a program does with a cluster, one call each. The command line uses nothing else.

    client = connect()
    job = client.submit(service(["python", "serve.py"], replicas=2))
    job.endpoints(wait=120)

Answers are the API's own documents (docs/http-api.md), as dicts. Every call raises a GpulayerError: Unreachable where
no daemon answers, NotFound, Refused, PermissionDenied, InvalidRequest, StorageFailed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import quote, urlencode

from gpulayer.client.address import find_address
from gpulayer.client.stream import Absence, documents, posted_documents, resumed_documents
from gpulayer.client.transport import NoAnswer, Transport
from gpulayer.model.errors import GpulayerError, JobEnded, NotFound, Unreachable, WaitTimeout
from gpulayer.model.units import format_duration

if TYPE_CHECKING:
    # Reading needs none of it, and it brings the whole model along: a tenth of the time that a command takes.
    from gpulayer.client.logs import LogLine
    from gpulayer.client.requests import JobRequest

Document: TypeAlias = dict[str, Any]

ENDED_STATES = frozenset(("succeeded", "failed", "cancelled", "lost"))
# 0.1 s doubling to 3.2 s is 6.3 s in all: longer than a daemon takes to be restarted, shorter than a person waits.
_SUBMIT_RETRY_DELAYS_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_PAGE_JOBS = 1000
# A word of the command line that is no UTF-8 is sent as it was typed: the daemon says that there is no such thing.
_BYTES_AS_THEY_ARE = "surrogateescape"


def connect(url: str | None = None, token: str | None = None, data_dir: str | None = None) -> Client:
    """A client of the daemon at `url`, else at $GPULAYER_URL, else of this user's own on this host (its unix socket).

    `url` is `http://127.0.0.1:7450` or `unix:///path`; `token` ($GPULAYER_TOKEN if left out) is needed for http only;
    `data_dir` ($GPULAYER_DATA_DIR) says which daemon of this host. Nothing is sent yet. Raises InvalidRequest for a
    URL that is none, or not loopback: this version has no TLS.
    """
    address = find_address(url, data_dir, os.environ)
    return Client(Transport(address, token or os.environ.get("GPULAYER_TOKEN")))


class Client:
    """What can be asked of a cluster. Made by `connect()`. Keeps no connection open; threads may share it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.absence: Absence | None = None
        """Hears when no daemon answers while something is followed, and when one does again; for whoever watches."""

    @property
    def url(self) -> str:
        """The daemon that is asked, as `connect(url=…)` takes it."""
        return str(self._transport.address)

    @property
    def is_local(self) -> bool:
        """Whether paths mean the same here and there: true for the unix socket."""
        return self._transport.address.is_local

    def submit(self, request: JobRequest, idempotency_key: str | None = None) -> Job:
        """Hand in a job; returns once it is accepted durably.

        A submit that gets no answer is repeated with the same key for six seconds, so it happens once or not at all:
        two submits with one `idempotency_key` (kept for 24 h) are one job. Left out, each call makes a key of its own.
        Raises Refused where the name is in use, or the key was used for something else.
        """
        answer = self.submit_document(request, idempotency_key)
        return Job(self, answer["id"], answer["name"])

    def submit_document(self, request: JobRequest, idempotency_key: str | None = None) -> Document:
        """The same, with the API's answer: `id`, `name`, `revision`, `replayed`."""
        headers = {"Idempotency-Key": idempotency_key or os.urandom(16).hex()}
        body = request.body()
        asked = False
        for delay_seconds in (*_SUBMIT_RETRY_DELAYS_SECONDS, None):
            try:
                return _as_document(self._transport.call("POST", "/v1/jobs", body=body, headers=headers))
            except Unreachable as error:
                asked = asked or isinstance(error, NoAnswer)
                # Nothing was sent where nobody ever listened, so there is nothing to repeat.
                if delay_seconds is None or not asked:
                    raise
            time.sleep(delay_seconds)
        raise AssertionError("the last delay is None")

    def dry_run(self, request: JobRequest) -> Document:
        """Where it would go now, replica by replica, and why not elsewhere: `fits`, `replicas`, `summary`. Changes
        nothing.
        """
        return _as_document(self._transport.call("POST", "/v1/jobs?dry_run=1", body=request.body()))

    def jobs(self, state: Literal["live", "ended", "all"] = "live") -> list[Document]:
        """A summary of each job, newest first."""
        found: list[Document] = []
        cursor: str | None = None
        while True:
            page = self._transport.call("GET", _path("/v1/jobs", state=state, limit=_PAGE_JOBS, cursor=cursor))
            found += page["jobs"]
            cursor = page["next"]
            if not cursor:
                return found

    def job(self, name: str) -> Job:
        """The job of that name, id, or unambiguous beginning of one. Raises NotFound, or InvalidRequest for a prefix
        of several.
        """
        found = self._transport.call("GET", f"/v1/jobs/{_segment(name, 'job')}")
        return Job(self, found["id"], found["name"])

    def status(self) -> Document:
        """The cluster at a glance: `leader`, `nodes`, `gpus` by model, `jobs` by state, `queued`, `unhealthy`,
        `warnings`.
        """
        return _as_document(self._transport.call("GET", "/v1/status"))

    def nodes(self) -> list[Document]:
        """Each node with its devices and what is free on it."""
        return list(self._transport.call("GET", "/v1/nodes"))

    def audit(self) -> Document:
        """What runs on the host against what should: `differences` is empty where all is well."""
        return _as_document(self._transport.call("GET", "/v1/audit"))

    def events(self, after: str | None = None, follow: bool = False) -> Iterator[Document]:
        """The cluster's event feed from behind the offset `after` on (from the oldest kept, if left out), each change
        once.

        With `follow` it goes on with what happens, also through a restart of the daemon.
        """
        return self._events("/v1/events", after, follow)

    def tokens(self) -> list[Document]:
        """Id, role, label and time of each API token; never the secret."""
        return list(self._transport.call("GET", "/v1/tokens")["tokens"])

    def create_token(self, role: Literal["admin", "submit", "read"], label: str = "") -> Document:
        """A new token: `id`, `role`, `label`, and `token`, the secret, which is never shown again."""
        return _as_document(self._transport.call("POST", "/v1/tokens", body={"role": role, "label": label}))

    def revoke_token(self, token_id: str) -> None:
        """From now on that token is refused. Raises NotFound."""
        self._transport.call("DELETE", f"/v1/tokens/{_segment(token_id, 'token')}")

    def leave(self, stop_all: bool = False) -> Iterator[Document]:
        """Let the daemon leave and end; yields `{"state": "stopping", "left": N}` and at last `{"state": "left"}`.

        Raises Refused while replicas run, unless `stop_all` stops them first.
        """
        return posted_documents(self._transport, "/v1/leave", {"stop_all": stop_all})

    def ready(self) -> bool:
        """Whether a daemon is there and serves. Never raises Unreachable."""
        try:
            self._transport.open("GET", "/readyz", timeout_seconds=5.0).close()
        except Unreachable:
            return False
        return True

    def daemon_pid(self) -> int | None:
        """The daemon's process on this host; None where it is asked over http."""
        return self._transport.peer_pid()

    def _events(self, path: str, after: str | None, follow: bool) -> Iterator[Document]:
        def path_after(last: Document | None) -> str:
            return _path(path, after=after if last is None else last["offset"], follow=int(follow) or None)

        if follow:
            return resumed_documents(self._transport, path_after, absence=self.absence)
        return documents(self._transport, path_after(None))


class Job:
    """A handle on one job. Keeps its id, nothing else: every call asks."""

    def __init__(self, client: Client, job_id: str, name: str) -> None:
        self.id = job_id
        self.name = name
        self._client = client
        self._transport = client._transport
        self._path = f"/v1/jobs/{_segment(job_id, 'job')}"

    def __repr__(self) -> str:
        return f"<Job {self.name} {self.id}>"

    def status(self) -> Document:
        """How it is: `state`, `reason`, `replicas` with `state`, `reason`, `node`, `endpoint`, `last_exit`, …"""
        return _as_document(self._transport.call("GET", self._path))

    def spec(self) -> Document:
        """The specification in force, every key of it, and its `revision`."""
        return _as_document(self._transport.call("GET", f"{self._path}/spec"))

    def watch(self, timeout: float | None = None) -> Iterator[Document]:
        """The status now and after every change, up to the one that says that it ended. WaitTimeout after `timeout`
        seconds.
        """
        return resumed_documents(
            self._transport,
            lambda last: f"{self._path}/watch",
            deadline=_deadline(timeout),
            is_last=lambda status: status["state"] in ENDED_STATES,
            absence=self._client.absence,
        )

    def endpoints(self, wait: float | None = None) -> list[str]:
        """`host:port` of each replica that is ready now, by index.

        With `wait`, returns once every replica is ready; raises WaitTimeout after that many seconds, JobEnded with the
        reason if the job ends meanwhile.
        """
        if wait is None:
            found = self._transport.call("GET", f"{self._path}/endpoints")
            return [item["endpoint"] for item in sorted(found, key=lambda item: int(item["replica"]))]
        status: Document | None = None
        try:
            for status in self.watch(wait):
                if status["state"] in ENDED_STATES:
                    raise ended(status)
                if is_all_ready(status):
                    return [item["endpoint"] for item in status["replicas"] if item["endpoint"]]
        except WaitTimeout:
            raise WaitTimeout(
                f"job {self.name} is not ready after {format_duration(wait)}: {waiting_for(status)}",
                hint=f"it goes on; see gpulayer job explain {self.name}",
            ) from None
        raise self._forgotten()

    def _forgotten(self) -> NotFound:
        """Where a watch ended without saying how the job did: it had ended long ago when it was to be told."""
        return NotFound(f"job {self.name} ended, and is not kept any more", hint="see gpulayer events")

    def endpoint_documents(self) -> list[Document]:
        """The ready ones with `endpoint`, `replica`, `node`, `verified`, `age_seconds`."""
        return list(self._transport.call("GET", f"{self._path}/endpoints"))

    def watch_endpoints(self) -> Iterator[list[Document]]:
        """All of the ready ones, now and after every change, until the job ends."""
        return resumed_documents(
            self._transport, lambda last: f"{self._path}/endpoints?watch=1", absence=self._client.absence
        )

    def logs(
        self,
        follow: bool = False,
        replica: int | None = None,
        previous: bool = False,
        since: float | None = None,
        tail: int | None = None,
        after: str | None = None,
        run: int | None = None,
    ) -> Iterator[LogLine]:
        """What was written, oldest first: everything kept, or what is chosen.

        `previous`: of every run that has ended; `run`: of that one; `since`: UTC seconds; `tail`: the last so many
        lines; `after`: behind the offset of a line. With `follow` it goes on until nothing more will be written, also
        through a restart of the daemon.
        """
        from gpulayer.client.logs import log_line

        def path_after(last: Document | None) -> str:
            return _path(
                f"{self._path}/logs",
                replica=replica,
                previous=int(previous) or None,
                run=run,
                since=since,
                tail=tail if last is None else None,
                follow=int(follow) or None,
                after=after if last is None else last["offset"],
            )

        if follow:
            found = resumed_documents(self._transport, path_after, absence=self._client.absence)
        else:
            found = documents(self._transport, path_after(None))
        return (log_line(line) for line in found)

    def wait(self, timeout: float | None = None) -> Document:
        """Its last status, once it has ended, however it did. WaitTimeout after `timeout` seconds, with what it waits
        for.
        """
        status: Document | None = None
        try:
            for status in self.watch(timeout):
                if status["state"] in ENDED_STATES:
                    return status
        except WaitTimeout:
            state = "unknown" if status is None else status["state"]
            raise WaitTimeout(
                f"job {self.name} is still {state} after {format_duration(timeout or 0)}",
                hint=f"it goes on; see gpulayer job status {self.name}",
            ) from None
        raise self._forgotten()

    def cancel(self, wait: bool | float = False) -> Document:
        """Stop every replica. With `wait` (True, or seconds at most) returns once no process of it is left.

        Raises Refused where it ended already.
        """
        answer = _as_document(self._transport.call("POST", f"{self._path}/cancel", body={}))
        if wait is False:
            return answer
        return self.wait(None if wait is True else wait)

    def restart(self, replicas: Sequence[int] | None = None) -> Document:
        """Replace the running process of each of `replicas` (all, if left out) by a new run on the same node."""
        body = {} if replicas is None else {"replicas": list(replicas)}
        return _as_document(self._transport.call("POST", f"{self._path}/restart", body=body))

    def events(self, after: str | None = None, follow: bool = False) -> Iterator[Document]:
        """What happened to it; as `Client.events`."""
        return self._client._events(f"{self._path}/events", after, follow)

    def explain(self) -> Document:
        """Why each replica is where and how it is: where it could and could not run, node by node, and its history."""
        return _as_document(self._transport.call("GET", f"{self._path}/explain"))


def is_all_ready(status: Mapping[str, Any]) -> bool:
    """Whether every replica of a live job serves."""
    return all(replica["state"] == "ready" for replica in status["replicas"])


def ended(status: Mapping[str, Any]) -> JobEnded:
    """The error for a job that ended while something else was waited for."""
    reason = status["reason"] or {}
    text = f": {reason['text'] or reason['code']}" if reason else ""
    return JobEnded(
        f"job {status['name']} {_ENDED_AS.get(status['state'], status['state'])}{text}", hint=reason.get("hint") or ""
    )


_ENDED_AS = {"succeeded": "has ended", "failed": "failed", "cancelled": "was cancelled", "lost": "was lost"}


def waiting_for(status: Mapping[str, Any] | None) -> str:
    """What keeps a job from being ready, in one sentence of a few replicas."""
    if status is None:
        return "the daemon did not say how it is"
    held = [replica for replica in status["replicas"] if replica["state"] != "ready"]
    said = [f"replica {replica['index']} is {replica_words(replica)}" for replica in held[:3]]
    return "; ".join(said) + (f"; and {len(held) - 3} more" if len(held) > 3 else "")


def replica_words(replica: Mapping[str, Any]) -> str:
    """State and reason of one replica, as people read it behind `replica 0 is`."""
    reason = replica["reason"]
    state = replica["state"].replace("_", " ")
    return f"{state}: {reason['text'] or reason['code']}" if reason else state


def _deadline(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


def _path(path: str, **query: object) -> str:
    given = {key: value for key, value in query.items() if value is not None}
    return f"{path}?{urlencode(given, errors=_BYTES_AS_THEY_ARE)}" if given else path


def _segment(text: str, what: str) -> str:
    if not text:
        # An empty word would turn the path of one thing into that of the list.
        raise NotFound(
            f"no {what} is named by an empty word", hint=f"give its name or id; gpulayer {what} list shows them"
        )
    return quote(text, safe="", errors=_BYTES_AS_THEY_ARE)


def _as_document(answer: Any) -> Document:
    if not isinstance(answer, dict):
        raise GpulayerError(f"the daemon answered {type(answer).__name__}, not an object", hint="check --url")
    return answer
