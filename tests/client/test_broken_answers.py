"""What the client makes of an answer that breaks off: a daemon may be killed at any byte of it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpulayer as gl
from tests.client.peers import answering

ACCEPTED = json.dumps({"id": "j-abcdefghij", "name": "once", "revision": 1, "replayed": False}).encode()
HEADER = b"HTTP/1.1 201 Created\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ACCEPTED)


@pytest.mark.parametrize("kept", [0, 1, len(ACCEPTED) - 1])
def test_a_submit_whose_answer_breaks_off_is_repeated_with_its_key(tmp_path: Path, kept: int) -> None:
    """It was taken for the answer of something that is no daemon, and nobody knew whether there is a job."""
    with answering(tmp_path / "s", [HEADER + ACCEPTED[:kept], HEADER + ACCEPTED]) as asked:
        job = gl.connect(f"unix://{tmp_path}/s").submit(gl.batch(["true"], name="once"))
    assert job.id == "j-abcdefghij"
    first, second = asked
    assert first == second
    assert b"Idempotency-Key" in first


@pytest.mark.parametrize("status", [b"200 OK", b"404 Not Found"])
def test_any_other_answer_that_breaks_off_is_none(tmp_path: Path, status: bytes) -> None:
    answer = b"HTTP/1.1 " + status + b'\r\ncontent-length: 1000\r\n\r\n{"code": "not_'
    with answering(tmp_path / "s", [answer]), pytest.raises(gl.Unreachable, match="went away"):
        gl.connect(f"unix://{tmp_path}/s").status()


def as_json(document: object) -> bytes:
    content = json.dumps(document).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content) + content


ASKED: list[tuple[Callable[[gl.Client], object], object]] = [
    (lambda client: client.status(), []),
    (lambda client: client.jobs(), {}),
    (lambda client: client.jobs(), {"jobs": {}, "next": None}),
    (lambda client: client.nodes(), None),
    (lambda client: client.nodes(), {}),
    (lambda client: client.tokens(), []),
    (lambda client: client.job("web"), {"status": "ok"}),
    (lambda client: client.submit(gl.batch(["true"])), {"status": "ok"}),
    (lambda client: gl.Job(client, "j", "j").endpoints(), {}),
    (lambda client: gl.Job(client, "j", "j").endpoints(), [{}]),
    (lambda client: list(gl.Job(client, "j", "j").watch()), {"status": "ok"}),
    (lambda client: list(gl.Job(client, "j", "j").logs()), {"status": "ok"}),
]


@pytest.mark.parametrize(("ask", "answer"), ASKED)
def test_what_answers_in_json_all_the_same_is_said_to_be_no_daemon(
    tmp_path: Path, ask: Callable[[gl.Client], object], answer: object
) -> None:
    with (
        answering(tmp_path / "s", [as_json(answer)]),
        pytest.raises(gl.GpulayerError, match="is not a gpulayer daemon") as caught,
    ):
        ask(gl.connect(f"unix://{tmp_path}/s"))
    assert caught.value.hint == "check --url"


def test_a_warning_that_is_an_error_does_not_cost_the_handle(tmp_path: Path) -> None:
    """The job was accepted durably by then."""
    waits: dict[str, Any] = {"code": "never_fits", "text": "no node has a GPU", "hint": "gpus=0"}
    accepted = as_json({"id": "j-abcdefghij", "name": "once", "warning": waits})
    with answering(tmp_path / "s", [accepted, accepted]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert gl.connect(f"unix://{tmp_path}/s").submit(gl.batch(["true"])).id == "j-abcdefghij"
        with pytest.warns(gl.JobWaits, match="job once waits: no node has a GPU") as told:
            gl.connect(f"unix://{tmp_path}/s").submit(gl.batch(["true"]))
    assert told[0].filename == __file__
