"""Every call of the API as a value: what is asked, and how its answer is read. sync.py and aio.py send them.

Pure. The contract is docs/http-api.md.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar
from urllib.parse import quote, urlencode

from gpulayer.client.exchange import NoAnswer
from gpulayer.client.waits import ENDED_STATES, JobWaits
from gpulayer.model.errors import InvalidRequest, NotFound, Unreachable

if TYPE_CHECKING:
    # Reading needs none of it, and it brings the whole model along: a tenth of the time that a command takes.
    from gpulayer.client.logs import LogLine
    from gpulayer.client.requests import JobRequest

T = TypeVar("T")
Document: TypeAlias = dict[str, Any]

# 0.1 s doubling to 3.2 s is 6.3 s in all: longer than a daemon takes to be restarted, shorter than a person waits.
_SUBMIT_RETRY_DELAYS_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_PAGE_JOBS = 1000
# A word of the command line that is no UTF-8 is sent as it was typed: the daemon says that there is no such thing.
_BYTES_AS_THEY_ARE = "surrogateescape"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request with one answer."""

    method: str = "GET"
    path: str
    read: Callable[[Any], T]
    body: object = None
    """None: there is none."""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed(Generic[T]):
    """One request whose answer is a stream of documents."""

    method: str = "GET"
    path_after: Callable[[Any], str]
    """Where to ask; given the last document that came, None at first, where to go on."""
    read: Callable[[Any], T]
    body: object = None
    is_last: Callable[[Any], bool] = lambda document: False
    is_resumed: bool
    """Whether it is asked for again where the connection is lost."""


# --- the cluster ------------------------------------------------------------------------------------------------------


def ready() -> Call[None]:
    return Call(path="/readyz", read=lambda answer: None)


def submit(request: JobRequest, idempotency_key: str | None) -> Call[Document]:
    headers = {"Idempotency-Key": _key(idempotency_key)}
    return Call(method="POST", path="/v1/jobs", body=_body_of(request), headers=headers, read=_of_a_job)


def tell(answer: Document) -> None:
    """As a warning of Python's, to the line that called `submit`: the job is accepted, and will wait for a person."""
    if answer.get("warning"):
        reason = answer["warning"]
        # Where warnings are errors, too, the job is there, and its handle not to be lost.
        with suppress(JobWaits):
            warnings.warn(f"job {answer['name']} waits: {reason['text']} ({reason['hint']})", JobWaits, stacklevel=3)


def dry_run(request: JobRequest) -> Call[Document]:
    return Call(method="POST", path="/v1/jobs?dry_run=1", body=_body_of(request), read=_document)


def jobs(state: str, cursor: str | None) -> Call[tuple[list[Document], str | None]]:
    """One page, and where the next begins."""
    path = _path("/v1/jobs", state=state, limit=_PAGE_JOBS, cursor=cursor)
    return Call(path=path, read=lambda page: (_array(page["jobs"]), page["next"]))


def status() -> Call[Document]:
    return Call(path="/v1/status", read=_document)


def nodes() -> Call[list[Document]]:
    return Call(path="/v1/nodes", read=_array)


def node(name: str) -> Call[Document]:
    return Call(path=f"/v1/nodes/{_segment(name, 'node')}", read=_document)


def resources() -> Call[Document]:
    return Call(path="/v1/resources", read=_document)


def audit() -> Call[Document]:
    return Call(path="/v1/audit?all=1", read=_document)


def tokens() -> Call[list[Document]]:
    return Call(path="/v1/tokens", read=lambda answer: _array(answer["tokens"]))


def create_token(role: str, label: str) -> Call[Document]:
    return Call(method="POST", path="/v1/tokens", body={"role": role, "label": label}, read=_document)


def create_join_token(uses: int, lasts_seconds: float, advertise: str) -> Call[Document]:
    body = {"uses": uses, "lasts_seconds": lasts_seconds, **({"advertise": advertise} if advertise else {})}
    return Call(method="POST", path="/v1/join-tokens", body=body, read=_document)


def revoke_token(token_id: str) -> Call[None]:
    return Call(method="DELETE", path=f"/v1/tokens/{_segment(token_id, 'token')}", read=lambda answer: None)


def cluster() -> Call[Document]:
    return Call(path="/v1/cluster", read=_document)


def rotate_keys() -> Call[Document]:
    return Call(method="POST", path="/v1/cluster/rotate-keys", body={}, read=_document)


def leave(stop_all: bool) -> Feed[Document]:
    return Feed(
        method="POST",
        path_after=lambda last: "/v1/leave",
        body={"stop_all": stop_all},
        read=_document,
        is_resumed=False,
    )


def events(after: str | None, follow: bool, job_id: str | None = None) -> Feed[Document]:
    path = "/v1/events" if job_id is None else f"{job_path(job_id)}/events"

    def path_after(last: Document | None) -> str:
        return _path(path, after=after if last is None else last["offset"], follow=_flag(follow))

    return Feed(path_after=path_after, read=_document, is_resumed=follow)


# --- one job ----------------------------------------------------------------------------------------------------------


def job_path(name: str) -> str:
    return f"/v1/jobs/{_segment(name, 'job')}"


def job_status(name: str) -> Call[Document]:
    return Call(path=job_path(name), read=_of_a_job)


def spec(job_id: str) -> Call[Document]:
    return Call(path=f"{job_path(job_id)}/spec", read=_document)


def explain(job_id: str) -> Call[Document]:
    return Call(path=f"{job_path(job_id)}/explain", read=_document)


def cancel(job_id: str) -> Call[Document]:
    return Call(method="POST", path=f"{job_path(job_id)}/cancel", body={}, read=_document)


def restart(job_id: str, replicas: Sequence[int] | None) -> Call[Document]:
    if replicas is not None and (isinstance(replicas, str | bytes) or not isinstance(replicas, Sequence)):
        raise InvalidRequest(f"replicas: {replicas!r} is not a list of indexes", hint="write [0], or leave it out")
    if replicas is not None and not replicas:
        raise InvalidRequest("replicas: it is empty", hint="write [0], or leave it out for all of them")
    body = {} if replicas is None else {"replicas": list(replicas)}
    return Call(method="POST", path=f"{job_path(job_id)}/restart", body=body, read=_document)


def endpoint_documents(job_id: str) -> Call[list[Document]]:
    return Call(path=f"{job_path(job_id)}/endpoints", read=_array)


def endpoints(job_id: str) -> Call[list[str]]:
    return Call(path=f"{job_path(job_id)}/endpoints", read=_addresses)


def watch(job_id: str) -> Feed[Document]:
    return Feed(
        path_after=lambda last: f"{job_path(job_id)}/watch",
        read=_document,
        is_last=lambda status: status["state"] in ENDED_STATES,
        is_resumed=True,
    )


def watch_endpoints(job_id: str) -> Feed[list[Document]]:
    return Feed(path_after=lambda last: f"{job_path(job_id)}/endpoints?watch=1", read=_array, is_resumed=True)


def logs(
    job_id: str,
    *,
    follow: bool,
    replica: int | None,
    previous: bool,
    since: float | None,
    tail: int | None,
    after: str | None,
    run: int | None,
) -> Feed[LogLine]:
    from gpulayer.client.logs import log_line

    def path_after(last: Document | None) -> str:
        return _path(
            f"{job_path(job_id)}/logs",
            replica=replica,
            previous=_flag(previous),
            run=run,
            since=since,
            tail=tail if last is None else None,
            follow=_flag(follow),
            after=after if last is None else last["offset"],
        )

    return Feed(path_after=path_after, read=log_line, is_resumed=follow)


# --- the rules --------------------------------------------------------------------------------------------------------


class Repetition:
    """When a submit without an answer is sent again: with the same key, so that it happens once or not at all."""

    def __init__(self) -> None:
        self._delays_seconds = iter(_SUBMIT_RETRY_DELAYS_SECONDS)
        self._was_sent = False

    def pause_after(self, error: Unreachable) -> float:
        """Seconds until the next try. Raises the error where there is to be none."""
        # The code is a node's word for it, of the one that it passed the request on to.
        self._was_sent = self._was_sent or isinstance(error, NoAnswer) or error.code == "no_answer"
        delay_seconds = next(self._delays_seconds, None)
        # Nothing was sent where nobody ever listened, so there is nothing to repeat.
        if delay_seconds is None or not self._was_sent:
            raise error
        return delay_seconds


def _key(given: str | None) -> str:
    if given is None:
        return os.urandom(16).hex()
    # Only here, so that what needs no check does not pay for the model.
    from gpulayer.wire.http import checked_idempotency_key

    return checked_idempotency_key(_text(given, "idempotency_key"))


def _body_of(request: JobRequest) -> Document:
    from gpulayer.client.requests import JobRequest

    if not isinstance(request, JobRequest):
        raise InvalidRequest(
            f"request: {request!r:.80} is no job that can be submitted",
            hint='make one with gl.service(["python", "serve.py"]) or gl.batch(["python", "train.py"])',
        )
    return request.body()


# What is not as the API has it raises what Python raises then; the transports turn it into words.


def _document(answer: Any) -> Document:
    if not isinstance(answer, dict):
        raise TypeError(f"{type(answer).__name__} is not an object")
    return answer


def _of_a_job(answer: Any) -> Document:
    """With what a handle is made of."""
    return _document(answer) | {"id": answer["id"], "name": answer["name"]}


def _array(answer: Any) -> list[Document]:
    if not isinstance(answer, list):
        raise TypeError(f"{type(answer).__name__} is not an array")
    return answer


def _addresses(found: Any) -> list[str]:
    return [item["endpoint"] for item in sorted(_array(found), key=lambda item: int(item["replica"]))]


def _flag(value: bool) -> int | None:
    return 1 if value else None


def _path(path: str, **query: object) -> str:
    given = {key: value for key, value in query.items() if value is not None}
    return f"{path}?{urlencode(given, errors=_BYTES_AS_THEY_ARE)}" if given else path


def _text(value: str, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{what}: {value!r:.80} is not text", hint="write it in quotes")
    return value


def _segment(text: str, what: str) -> str:
    if not _text(text, what):
        # An empty word would turn the path of one thing into that of the list.
        raise NotFound(
            f"no {what} is named by an empty word", hint=f"give its name or id; gpulayer {what} list shows them"
        )
    return quote(text, safe="", errors=_BYTES_AS_THEY_ARE)
