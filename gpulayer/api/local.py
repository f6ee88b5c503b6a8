"""What nodes ask one another, beside the requests that they pass on: is a token good; and what the owner of a replica
alone has, its output and its history. Not there for clients, and no part of the API that they are promised.

What takes long is done in threads, within bounds: a disk may hang, and the daemon must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpulayer.api.access import TOKEN_PATH, caller_of
from gpulayer.api.kept_readers import KeptReaders, Place
from gpulayer.api.last_lines import last_output
from gpulayer.api.log_merge import BATCH_CHARS, BATCH_LINES, REPLICAS_MAX
from gpulayer.api.owners import ATTEMPTS_PATH, KEPT_PATH, LOGS_PATH
from gpulayer.api.requests import ASKED_BY_PEER, LocalRoute, answer, body_of, node_of
from gpulayer.model.errors import InvalidRequest
from gpulayer.model.ids import AttemptId
from gpulayer.model.job import REPLICAS_MAX as JOB_REPLICAS_MAX
from gpulayer.runtime.replica_logs import Cursor, LogReader, newest_end, tail_cursor
from gpulayer.runtime.sandboxes import attempt_id
from gpulayer.wire.http import Json, parse_json
from gpulayer.wire.peer import RequestHead

T = TypeVar("T")

# Apart from those of this node's own readers: nodes that wait for one another must not do so in a ring.
_threads = trio.CapacityLimiter(2)
_readers = KeptReaders()


async def token(request: Request) -> Response:
    """Whose token it is, by the digest that came along."""
    head: RequestHead = request.scope[ASKED_BY_PEER]
    caller = caller_of(head.token_digest, node_of(request).state)
    return answer({"id": caller.token, "role": caller.role})


async def attempts(request: Request) -> Response:
    """`{"of": [[attempt, run | null], …]}` → by attempt: where its sandbox is, what its life cycle remembers, and what
    the run, if one is named, wrote last."""
    node = node_of(request)
    with _read_from_peer():
        asked = [(_attempt(name), run) for name, run in _listed(request, JOB_REPLICAS_MAX)]
        logs_of = {str(each): (node.log_dir(each), int(run)) for each, run in asked if run is not None}
    lines = await _in_thread(partial(_last_outputs, logs_of)) if logs_of else {}
    found: Json = {}
    for each, _ in asked:
        history = [[round(ago, 3), text] for ago, text in node.history(each)]
        found[str(each)] = {
            "sandbox": str(node.sandbox(each)),
            "history": history,
            "lines": lines.get(str(each), []),
        }
    return answer(found)


def _last_outputs(logs_of: Mapping[str, tuple[Path, int]]) -> dict[str, list[str]]:
    return {attempt: last_output(directory, run) for attempt, (directory, run) in logs_of.items()}


async def kept(request: Request) -> Response:
    """`{"of": [attempt, …]}` → those of them whose logs are here."""
    with _read_from_peer():
        places = {name: node_of(request).log_dir(_attempt(name)) for name in _listed(request, JOB_REPLICAS_MAX)}
    return answer({"kept": await _in_thread(lambda: [name for name, path in places.items() if path.is_dir()])})


async def logs(request: Request) -> Response:
    """`{"of": [question, …]}` → an answer to each, in the same order: the next lines of a log, and how it stands after
    them. log_merge.py's RemoteLog asks, and reads what is answered."""
    with _read_from_peer():
        asked = [_Question(node_of(request).log_dir(_attempt(each["attempt"])), each) for each in _listed(request)]
        share = max(1, len(asked))
        read = partial(_read_all, asked, BATCH_LINES // share + 1, BATCH_CHARS // share + 1)
    found = await _in_thread(read)
    _readers.drop_later()
    return answer({"of": found})


class _Question:
    """What is asked of one log, read as strictly as it has to be."""

    def __init__(self, directory: Path, document: Json) -> None:
        self.directory = directory
        self.run = None if document["run"] is None else int(document["run"])
        self.since_utc = None if document["since"] is None else float(document["since"])
        self.tail = None if document["tail"] is None else int(document["tail"])
        self.after = None if document["after"] is None else Cursor.parse(document["after"])
        self.seen = _place(document["seen"])
        self.until = _place(document["until"])
        self.is_until_now = bool(document["is_until_now"])


def _place(value: list[int] | None) -> tuple[int, int] | None:
    return None if value is None else (int(value[0]), int(value[1]))


def _read_all(asked: list[_Question], lines_max: int, chars_max: int) -> list[Json]:
    return [_read(each, lines_max, chars_max) for each in asked]


def _read(asked: _Question, lines_max: int, chars_max: int) -> Json:
    # From before the reading: what comes meanwhile is news next time.
    size = newest_end(asked.directory)
    if asked.seen == size:
        return {"is_at_end": True, "seen": size, "until": asked.until, "lines": None, "begun": None}
    until = asked.until or (size if asked.is_until_now else None)
    reader = _reader_for(asked)
    try:
        if until is not None:
            reader.stop_at(until)
        else:
            reader.go_on()
        answer = _next_lines(reader, lines_max, chars_max)
    except BaseException:
        reader.close()
        raise
    if answer["is_at_end"] and until is not None:
        reader.close()  # nobody goes on from here
    else:
        _readers.keep(Place(str(asked.directory), asked.run, asked.since_utc, reader.cursor), reader)
    return answer | {"seen": size if answer["is_at_end"] else None, "until": until}


def _reader_for(asked: _Question) -> LogReader:
    after = asked.after
    if after is not None:
        kept = _readers.take(Place(str(asked.directory), asked.run, asked.since_utc, after))
        if kept is not None:
            return kept
    elif asked.tail is not None:
        after = tail_cursor(asked.directory, asked.tail, asked.run)
    return LogReader(asked.directory, since_utc=asked.since_utc, run=asked.run, cursor=after)


def _next_lines(reader: LogReader, lines_max: int, chars_max: int) -> Json:
    lines: list[list[object]] = []
    chars, is_at_end = 0, False
    while len(lines) < lines_max and chars < chars_max and not is_at_end:
        found = reader.read_available(1)
        is_at_end = not found
        for line in found:
            lines.append([line.at_utc, line.stream, line.run, line.text, line.kind, str(reader.cursor)])
            chars += len(line.text) + 100
    begun = [[line.at_utc, line.stream, line.run, line.text] for line in reader.unfinished()]
    return {"is_at_end": is_at_end, "lines": lines, "begun": begun, "after": str(reader.cursor)}


def _listed(request: Request, most: int = REPLICAS_MAX) -> list[Any]:
    document = parse_json(body_of(request))
    listed = document["of"] if isinstance(document, dict) else None
    if not isinstance(listed, list) or len(listed) > most:
        raise ValueError("no list, or too long a one")
    return listed


def _attempt(name: object) -> AttemptId:
    found = attempt_id(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError("not an attempt")
    return found


@contextmanager
def _read_from_peer() -> Iterator[None]:
    """What a node of another version, or one that fails, may say is an error of the request, and not of ours."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"not a question that nodes ask: {error!r:.80}", hint="upgrade the older node") from error


async def _in_thread(call: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(call, limiter=_threads, abandon_on_cancel=True)


ROUTES = [
    Route(TOKEN_PATH, token, methods=["GET"]),
    LocalRoute(ATTEMPTS_PATH, attempts, methods=["POST"]),
    LocalRoute(KEPT_PATH, kept, methods=["POST"]),
    LocalRoute(LOGS_PATH, logs, methods=["POST"]),
]
