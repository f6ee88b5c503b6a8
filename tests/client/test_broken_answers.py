"""What the client makes of an answer that breaks off: a daemon may be killed at any byte of it."""

from __future__ import annotations

import json
from pathlib import Path

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
