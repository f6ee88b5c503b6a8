"""Programs as people run them: each becomes ready on $PORT, answers, is cancelled, and leaves nothing."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.integration.conftest import DaemonMaker
from tests.integration.daemon import Daemon, children, get, is_alive, wait_for
from tests.integration.programs import python, sh

ASGI_APP = """
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"asgi"})
"""
WSGI_APP = """
import os
def app(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]
"""


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[dev-servers]'")


def assert_is_cancelled_without_trace(daemon: Daemon, job: str) -> None:
    pids = daemon.runs_on_host()
    assert pids
    daemon.cancel(job)
    assert daemon.wait_ended(job, 30)["state"] == "cancelled"
    assert not [pid for pid in pids if is_alive(pid)]
    assert not daemon.all_on_host()
    assert daemon.differences() == []


def test_a_jupyter_server(daemon: Daemon, tmp_path: Path) -> None:
    needs("jupyter_server")
    job = daemon.submit(
        sh(
            f"exec {sys.executable} -m jupyter_server --no-browser --allow-root --ip=$HOST --port=$PORT"
            " --ServerApp.port_retries=0 --IdentityProvider.token=''"
        ),
        env={"HOME": str(tmp_path), "JUPYTER_PLATFORM_DIRS": "1"},
        name="jupyter",
    )
    (endpoint,) = daemon.wait_ready(job, 60)
    assert '"version"' in get(endpoint, "/api")
    assert_is_cancelled_without_trace(daemon, job)


def test_a_uvicorn_server(daemon: Daemon, tmp_path: Path) -> None:
    needs("uvicorn")
    (tmp_path / "app.py").write_text(ASGI_APP)
    job = daemon.submit(
        sh(f"exec {sys.executable} -m uvicorn app:app --host $HOST --port $PORT"), workdir=str(tmp_path), name="uvicorn"
    )
    (endpoint,) = daemon.wait_ready(job, 30)
    assert get(endpoint) == "asgi"
    assert_is_cancelled_without_trace(daemon, job)


def test_gunicorn_with_workers_that_come_and_go(daemon: Daemon, tmp_path: Path) -> None:
    needs("gunicorn")
    (tmp_path / "app.py").write_text(WSGI_APP)
    job = daemon.submit(
        sh(f"exec {sys.executable} -m gunicorn --workers 3 --bind $HOST:$PORT app:app"), workdir=str(tmp_path)
    )
    (endpoint,) = daemon.wait_ready(job, 30)
    master = daemon.replica(job)["pid"]
    workers = wait_for(lambda: len(found := children(master)) == 3 and found)
    wait_for(lambda: int(get(endpoint)) in workers)
    os.kill(workers[0], signal.SIGKILL)
    wait_for(lambda: workers[0] not in children(master) and len(children(master)) == 3)
    assert get(endpoint)
    replica = daemon.replica(job)
    assert (replica["pid"], replica["restarts"], replica["endpoint"]) == (master, 0, endpoint)
    assert_is_cancelled_without_trace(daemon, job)


def test_a_shell_script_that_execs_its_server(daemon: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text('#!/bin/sh\nset -eu\ncd "$(dirname "$0")"\necho preparing\nexec "$@" --bind "$HOST" "$PORT"\n')
    script.chmod(0o755)
    (tmp_path / "index.html").write_text("from a script")
    job = daemon.submit([str(script), sys.executable, "-m", "http.server"])
    (endpoint,) = daemon.wait_ready(job)
    assert get(endpoint) == "from a script"
    assert daemon.output(job)[0] == "preparing"
    assert_is_cancelled_without_trace(daemon, job)


def test_a_shell_script_that_does_not_exec_its_server(daemon: Daemon) -> None:
    """The server is the shell's child: the signal to stop reaches both."""
    job = daemon.submit(sh(f"{sys.executable} -m http.server --bind $HOST $PORT; echo never"))
    (endpoint,) = daemon.wait_ready(job)
    assert get(endpoint)
    assert_is_cancelled_without_trace(daemon, job)


def test_a_server_that_forks_its_workers_before_it_listens(daemon: Daemon) -> None:
    prefork = """
import os, socket, time
def work():
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((os.environ["HOST"], int(os.environ["PORT"])))
    listener.listen()
    while True:
        connection, _ = listener.accept()
        if connection.recv(4096):
            connection.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n%d" % os.getpid())
        connection.close()
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        work()
while True:
    time.sleep(1)
"""
    job = daemon.submit(python(prefork))
    (endpoint,) = daemon.wait_ready(job)
    pid = daemon.replica(job)["pid"]
    assert int(get(endpoint)) in children(pid)
    assert_is_cancelled_without_trace(daemon, job)


def test_a_server_that_logs_50_megabytes_a_second(make_daemon: DaemonMaker) -> None:
    daemon = make_daemon(config='[logs]\nmax_bytes = "2MiB"\nkeep = 3\n').start()
    chatty = """
import os, socket, threading, time
listener = socket.create_server((os.environ["HOST"], int(os.environ["PORT"])))
written = 0
def talk():
    global written
    chunk, begun = (b"y" * 99 + b"\\n") * 640, time.monotonic()
    while True:
        written += os.write(1, b"mark %d\\n" % written + chunk)
        time.sleep(max(0, written / 50e6 - (time.monotonic() - begun)))
threading.Thread(target=talk, daemon=True).start()
while True:
    connection, _ = listener.accept()
    if connection.recv(4096):
        connection.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n%d" % written)
    connection.close()
"""
    job = daemon.submit(python(chatty))
    (endpoint,) = daemon.wait_ready(job)
    before, begun = int(get(endpoint)), time.monotonic()
    logs = Path(daemon.replica(job)["sandbox"]) / "logs"
    sizes = []
    while time.monotonic() - begun < 3:
        sizes.append(sum(file.stat().st_size for file in logs.iterdir() if file.exists()))
        time.sleep(0.1)
    rate = (int(get(endpoint)) - before) / (time.monotonic() - begun)
    assert rate > 20e6, f"{rate / 1e6:.0f} MB/s: the replica was held up"
    assert max(sizes) <= 3 * 2**21
    written = int(get(endpoint))
    newest = max(int(line.split()[1]) for line in daemon.output(job, "tail=5000") if line.startswith("mark "))
    assert newest > written - 6 * 2**20
    assert_is_cancelled_without_trace(daemon, job)
