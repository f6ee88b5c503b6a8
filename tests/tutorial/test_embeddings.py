"""The example that the tutorial runs: what serve.py refuses, how it ends, and that ask.py counts what is lost."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.daemon import Daemon, free_port, refuses, wait_for
from tests.tutorial.needs import needs_the_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "embeddings"
# Importing PyTorch takes 5 s on an idle machine, and a multiple of it on one whose cores are taken.
LOAD_SECONDS_MAX = 90
DIMENSIONS = 384


@dataclass
class Server:
    """A serve.py that nobody supervises."""

    process: subprocess.Popen[bytes]
    endpoint: str
    log: Path
    was_listening_before_it_was_loaded: bool = False

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.endpoint, timeout=30)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def embed(self, *texts: Any) -> tuple[int, Any]:
        return self.ask("POST", "/embed", json.dumps({"texts": texts}))

    def wait_until_loaded(self) -> None:
        def is_listening() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            if refuses(self.endpoint):
                return False
            self.was_listening_before_it_was_loaded |= "loaded" not in self.log.read_text()
            return True

        wait_for(is_listening, LOAD_SECONDS_MAX, self.log.read_text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    needs_the_model()
    log = tmp_path_factory.mktemp("server") / "log"
    port = free_port()
    # No proxy and no token of this machine's user: the model must come out of the package.
    environment = {"PATH": os.environ["PATH"], "HOME": str(log.parent), "HOST": "127.0.0.1", "PORT": str(port)}
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLE / "serve.py")], env=environment, stdout=file, stderr=file
        )
    found = Server(process, f"127.0.0.1:{port}", log)
    try:
        found.wait_until_loaded()
        yield found
    finally:
        process.kill()
        process.wait(10)


def test_it_listens_only_when_it_can_answer(server: Server) -> None:
    assert not server.was_listening_before_it_was_loaded
    assert server.ask("GET", "/healthz") == (200, {"status": "ok"})


def test_a_text_becomes_a_vector_of_length_1(server: Server) -> None:
    status, answer = server.embed("one", "another", "")
    assert status == 200
    assert [len(vector) for vector in answer["vectors"]] == [DIMENSIONS] * 3
    assert sum(x * x for x in answer["vectors"][0]) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "not JSON"),
        ("{}", "not JSON"),
        ("[" * 500_000, "not JSON"),
        ("\xff\xfe".encode("latin-1"), "not JSON"),
        ('{"texts": "one"}', "not a list of strings"),
        ('{"texts": [1]}', "not a list of strings"),
        ('{"texts": []}', "0 texts; 1 to 32"),
        (json.dumps({"texts": ["x"] * 33}), "33 texts; 1 to 32"),
        (json.dumps({"texts": ["x" * 10_001]}), "10001 characters; 10000 at most"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(server: Server, body: str | bytes, words: str) -> None:
    status, answer = server.ask("POST", "/embed", body)
    assert (status, words in answer["error"]) == (400, True), answer


def test_a_body_that_is_too_big_or_has_no_length_is_not_read(server: Server) -> None:
    status, answer = server.ask("POST", "/embed", b"x" * 1_500_000)
    assert (status, answer["error"]) == (413, "a body of 1500000 bytes; 1048576 at most")
    assert server.ask("POST", "/embed", headers={"Content-Length": "-1"})[0] == 411
    assert server.ask("POST", "/embed", headers={"Content-Length": "9" * 5000})[0] == 411


def test_half_a_surrogate_pair_is_a_text_with_an_unknown_character(server: Server) -> None:
    """It is valid JSON, and no valid text: the tokenizer would fail on it."""
    assert server.ask("POST", "/embed", r'{"texts": ["\ud800"]}')[0] == 200


def test_an_unknown_path_names_those_there_are(server: Server) -> None:
    for method in ("GET", "POST"):
        status, answer = server.ask(method, "/embeddings", b"{}")
        assert (status, answer["error"]) == (404, "no /embeddings here; there are GET /healthz and POST /embed")


def test_sigterm_lets_it_finish_what_it_has_begun(server: Server) -> None:
    """The last test of this server: it ends here."""
    answers: list[tuple[int, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(server.embed(*["many words " * 900] * 32)))
    begun = server.log.read_text().count("texts: 32")
    asking.start()
    # It takes seconds, so it is on when a shorter one that came later still waits for its turn.
    wait_for(lambda: connections_of(server) >= 1, 10)
    server.process.terminate()
    asking.join(60)
    assert answers
    assert answers[0][0] == 200
    assert server.process.wait(20) == 0
    said = server.log.read_text()
    assert said.count("texts: 32") == begun + 1
    assert re.search(r"SIGTERM: ending after the requests that are on\n(.*\n)*ended\n$", said), said
    assert "Traceback" not in said


def connections_of(server: Server) -> int:
    """How many TCP connections it has accepted and not closed (/proc/net/tcp of its own file descriptors)."""
    descriptors = Path(f"/proc/{server.process.pid}/fd").iterdir()
    inodes = {os.readlink(entry) for entry in descriptors if entry.is_symlink()}
    port = int(server.endpoint.rpartition(":")[2])
    established = [
        line.split()
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "01"
    ]
    return sum(f"socket:[{columns[9]}]" in inodes for columns in established)


def test_a_request_that_nobody_answers_is_counted_as_lost(tmp_path: Path) -> None:
    """Against a service that is ready and refuses every POST: all that ask.py can say then is that they are lost."""
    daemon = Daemon(tmp_path).start()
    try:
        job = daemon.submit(["sh", "-c", "exec python3 -m http.server --bind $HOST $PORT"], name="deaf")
        daemon.wait_ready(job)
        done = subprocess.run(
            [sys.executable, str(EXAMPLE / "ask.py"), "deaf", "--seconds", "1"],
            env=daemon.env | {"GPULAYER_DATA_DIR": str(daemon.data_dir)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        daemon.end()
    assert done.returncode == 1, done.stdout
    assert re.search(r"answered 0 \(\), asked again \d+, lost 4;", done.stdout.splitlines()[-1]), done.stdout
