"""docs/http-api.md: its examples are one shell session, and what they answer has the keys that it shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpulayer.api.openapi import OPERATIONS
from gpulayer.wire.http import SPEC_KEYS

if TYPE_CHECKING:
    from tests.api.conftest import Daemon

DOCUMENT = Path(__file__).parents[2] / "docs" / "http-api.md"
EXAMPLE = re.compile(r"^```sh\n(.*?)^```\n\n```json\n(.*?)^```", re.MULTILINE | re.DOTALL)
BETWEEN = "--- the next example ---"
ELLIPSIS = "…"


def documents(text: str) -> list[Any]:
    """JSON, one after the other, however the lines are broken."""
    found, decoder = [], json.JSONDecoder()
    text = text.strip()
    while text:
        document, end = decoder.raw_decode(text)
        found.append(document)
        text = text[end:].lstrip()
    return found


def differences(shown: Any, found: Any, where: str) -> list[str]:
    """In keys and in kinds of values. A key that is an ellipsis stands for any others."""
    if isinstance(shown, dict) and isinstance(found, dict):
        missing = {key for key in shown if key != ELLIPSIS} ^ set(found)
        if ELLIPSIS in shown:
            missing -= set(found)
        wrong = [f"{where}: {key} is only in one of them" for key in sorted(missing)]
        return wrong + [
            each for key in shown if key in found for each in differences(shown[key], found[key], f"{where}.{key}")
        ]
    if isinstance(shown, list) and isinstance(found, list):
        return [
            each for one, other in zip(shown, found, strict=False) for each in differences(one, other, f"{where}[]")
        ]
    kinds = (dict, list, str, bool, int | float, type(None))
    is_same = any(isinstance(shown, kind) and isinstance(found, kind) for kind in kinds)
    return [] if is_same else [f"{where}: {shown!r} is shown, {found!r} is answered"]


def test_every_example_runs_and_answers_what_is_shown(daemon: Daemon, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    examples = EXAMPLE.findall(DOCUMENT.read_text())
    assert len(examples) > 8
    # Each request's answer on lines of its own, as a person sees them.
    script = 'set -eu\ncurl() { command curl "$@"; code=$?; echo; return $code; }\n'
    script += f"echo '{BETWEEN}'\n".join(code for code, _ in examples)
    environment = os.environ | {"GPULAYER_DATA_DIR": str(daemon.data_dir), "HOME": str(tmp_path)}
    done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    for (code, shown), said in zip(examples, done.stdout.split(BETWEEN), strict=True):
        expected, found = documents(shown), documents(said)
        assert len(found) >= len(expected), (code, said)
        for one, other in zip(expected, found, strict=False):
            assert differences(one, other, "answer") == [], (code, said)


def test_the_specification_that_is_shown_has_every_key_and_is_taken(daemon: Daemon) -> None:
    (shown,) = re.findall(r"takes a specification:\n\n```json\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    specification = json.loads(shown)
    assert set(specification) == set(SPEC_KEYS)
    assert daemon.ask("POST", "/v1/jobs?dry_run=1", specification).status == 200


def test_every_request_is_in_the_document() -> None:
    text = DOCUMENT.read_text()
    for operation in OPERATIONS:
        path = operation.path.replace("{job}", "JOB").replace("{node}", "NODE").replace("{token_id}", "ID")
        assert f"`{operation.method.upper()} {path}" in text, operation.id
        for name in operation.query:
            assert re.search(rf"[?&]{name}=|\[\?{name}=", text), (operation.id, name)
