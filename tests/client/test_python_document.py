"""docs/python.md is a program: it runs, top to bottom, and leaves nothing behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpulayer as gl
from tests.integration.daemon import Daemon

DOCUMENT = Path(__file__).parents[2] / "docs" / "python.md"


def program() -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL))


def test_the_examples_of_the_document_run(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPULAYER_DATA_DIR", str(daemon.data_dir))
    monkeypatch.delenv("GPULAYER_URL", raising=False)
    exec(compile(program(), str(DOCUMENT), "exec"), {})  # the document's own code, from this repository
    said = capsys.readouterr().out
    for words in ("False 1 of 1 would wait: ", "succeeded\n", "0 output two\n", "refused", "gpus: 'two' is not a num"):
        assert words in said, said
    assert said.count("three\nfour\n") == 2, said
    assert said.count("n1 True\n") == 2, said
    assert client_jobs(daemon) == []


def client_jobs(daemon: Daemon) -> list[str]:
    return [job["name"] for job in gl.connect(data_dir=str(daemon.data_dir)).jobs()]


def test_a_type_checker_knows_what_the_examples_do(tmp_path: Path) -> None:
    """What a program gets from `import gpulayer` has types, though its names are imported at first use."""
    asked = """
reveal_type(client)
reveal_type(web)
reveal_type(web.endpoints(wait=60))
reveal_type(next(web.logs(follow=True)).text)
reveal_type(gl.aio.connect())
gl.service(["true"], gpus=[1])
gl.connect(user="me")
"""
    (tmp_path / "program.py").write_text(program() + asked)
    words = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(tmp_path / "program.py")]
    done = subprocess.run(words, cwd=DOCUMENT.parents[1], capture_output=True, text=True, timeout=120)
    said = re.sub(r"^.*program.py:\d+: ", "", done.stdout, flags=re.MULTILINE)
    for revealed in ("gpulayer.client.sync.Client", "gpulayer.client.sync.Job", "list[str]", "str"):
        assert re.search(rf'^note: Revealed type is "(builtins\.)?{re.escape(revealed)}', said, re.MULTILINE), said
    assert 'note: Revealed type is "gpulayer.client.aio.Client"' in said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2, said
    assert 'Argument "gpus" to "service"' in errors[0]
    assert 'Unexpected keyword argument "user"' in errors[1]


def test_every_call_is_in_the_document() -> None:
    text = DOCUMENT.read_text()
    calls = {name for kind in (gl.Client, gl.Job) for name in vars(kind) if not name.startswith("_")}
    internal = {"submit_document", "daemon_pid", "is_local", "url"}
    assert not {name for name in calls - internal if f".{name}(" not in text}
