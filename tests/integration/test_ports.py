"""Ports: new for every run, never one that is still held, and a clear word where one is taken (P5)."""

from __future__ import annotations

import os
import signal
import socket

from tests.integration.conftest import DaemonMaker
from tests.integration.daemon import Daemon, free_port, get, refuses, wait_for
from tests.integration.programs import python, serve, sh


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def test_a_new_run_never_gets_the_port_that_the_old_one_still_holds(daemon: Daemon) -> None:
    """The new copy could not bind, since the old one was still shutting down."""
    slow_to_stop = """
import os, signal, socket, time
listener = socket.create_server((os.environ["HOST"], int(os.environ["PORT"])))
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), os._exit(0)))
while True:
    listener.accept()[0].close()
"""
    job = daemon.submit(python(slow_to_stop))
    seen = [daemon.wait_ready(job)[0]]
    for _ in range(2):
        pid = daemon.replica(job)["pid"]
        daemon.call("POST", f"/v1/jobs/{job}/restart", {})
        after = daemon.wait_replica(job, lambda r, old=pid: r["state"] == "ready" and r["pid"] not in (None, old))  # type: ignore[misc]
        seen.append(after["endpoint"])
    assert len(set(seen)) == 3
    assert all(20000 <= port_of(endpoint) <= 29999 for endpoint in seen)
    assert not [line for line in daemon.output(job) if "in use" in line]


def test_a_second_daemon_on_the_same_port_fails_at_once_and_names_the_first(make_daemon: DaemonMaker) -> None:
    """A fixed port made the second start on a host fail half-way."""
    port = free_port()
    first = make_daemon(api_port=port)
    second = make_daemon(api_port=port)
    first.start()
    process = second.spawn()
    assert process.wait(15) not in (0, None)
    said = second.log_tail()
    assert str(port) in said
    assert str(first.pid) in said
    assert "--api-port" in said
    assert "Traceback" not in said
    assert not (second.data_dir / "log.db").exists(), "half a start"
    third = make_daemon()
    third.start()
    assert third.is_ready()


def test_two_daemons_on_one_host_give_their_replicas_different_ports(make_daemon: DaemonMaker) -> None:
    daemons = [make_daemon(config='[supervision]\nservice_ports = "21000-21007"\n').start() for _ in range(2)]
    jobs = [[daemon.submit(serve()) for _ in range(2)] for daemon in daemons]
    endpoints = [daemon.wait_ready(job)[0] for daemon, own in zip(daemons, jobs, strict=True) for job in own]
    assert len(set(endpoints)) == 4
    assert {get(endpoint) for endpoint in endpoints} == {"hello"}


def test_a_port_in_a_foreign_hand_is_a_reason_that_names_who_holds_it(daemon: Daemon) -> None:
    # The replica tells its port and does not listen; another program, ours, takes it.
    job = daemon.submit(sh("echo $PORT; exec sleep 1000"))
    (port,) = wait_for(lambda: daemon.output(job))
    with socket.create_server(("127.0.0.1", int(port))):
        reason = daemon.wait_replica(job, lambda r: r["reason"] and r["reason"]["code"] == "port_taken")["reason"]
        assert str(os.getpid()) in reason["text"]
        assert str(port) in reason["text"]
        assert daemon.call("GET", f"/v1/jobs/{job}/endpoints") == []


def test_a_service_that_listens_elsewhere_is_told_where(daemon: Daemon) -> None:
    other_port = free_port()
    wrong_port = daemon.submit(serve("--port", str(other_port)))
    reason = daemon.wait_replica(wrong_port, lambda r: r["reason"] and r["reason"]["code"] == "listens_elsewhere")[
        "reason"
    ]
    assert str(other_port) in reason["text"]
    wrong_host = daemon.submit(serve("--host", "127.0.0.2"))
    reason = daemon.wait_replica(wrong_host, lambda r: r["reason"] and r["reason"]["code"] == "listens_elsewhere")[
        "reason"
    ]
    assert "127.0.0.2" in reason["text"]
    everywhere = daemon.submit(serve("--host", "0.0.0.0"))
    assert get(daemon.wait_ready(everywhere)[0]) == "hello"


def test_an_endpoint_is_withdrawn_when_its_listener_goes_although_the_process_stays(daemon: Daemon) -> None:
    closes = """
import os, signal, socket, time
listener = socket.create_server((os.environ["HOST"], int(os.environ["PORT"])))
signal.signal(signal.SIGUSR1, lambda *_: listener.close())
while True:
    time.sleep(1)
"""
    job = daemon.submit(python(closes))
    (endpoint,) = daemon.wait_ready(job)
    pid = daemon.replica(job)["pid"]
    os.kill(pid, signal.SIGUSR1)
    wait_for(lambda: refuses(endpoint))
    replica = daemon.wait_replica(job, lambda replica: replica["state"] == "unready", seconds=3)
    assert (replica["endpoint"], replica["pid"], replica["reason"]["code"]) == (None, pid, "not_listening")


def test_a_worker_that_inherited_the_socket_keeps_the_endpoint_listed(daemon: Daemon) -> None:
    """Servers fork workers; the first process may be busy or even gone quiet."""
    forks = """
import os, socket, time
listener = socket.create_server((os.environ["HOST"], int(os.environ["PORT"])))
if os.fork():
    listener.close()
    while True: time.sleep(1)
while True:
    connection, _ = listener.accept()
    if connection.recv(4096):
        connection.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\nworker")
    connection.close()
"""
    job = daemon.submit(python(forks))
    assert get(daemon.wait_ready(job)[0]) == "worker"
