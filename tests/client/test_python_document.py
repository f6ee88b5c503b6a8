"""docs/python.md is a program: it runs, top to bottom, and leaves nothing behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gpulayer as gl
from tests.integration.daemon import Daemon

DOCUMENT = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_examples_of_the_document_run(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPULAYER_DATA_DIR", str(daemon.data_dir))
    monkeypatch.delenv("GPULAYER_URL", raising=False)
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(blocks), str(DOCUMENT), "exec"), {})  # the document's own code, from this repository
    said = capsys.readouterr().out
    for words in ("False 1 of 1 would wait: ", "succeeded\n", "0 output two\n", "refused"):
        assert words in said, said
    assert client_jobs(daemon) == []


def client_jobs(daemon: Daemon) -> list[str]:
    return [job["name"] for job in gl.connect(data_dir=str(daemon.data_dir)).jobs()]


def test_every_call_is_in_the_document() -> None:
    text = DOCUMENT.read_text()
    calls = {name for kind in (gl.Client, gl.Job) for name in vars(kind) if not name.startswith("_")}
    internal = {"submit_document", "daemon_pid", "is_local", "url"}
    assert not {name for name in calls - internal if f".{name}(" not in text}
