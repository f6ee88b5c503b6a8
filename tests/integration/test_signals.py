"""What the daemon does on signals: it ends well, says so, and leaves the replicas alone."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import DaemonMaker
from tests.integration.daemon import GPULAYER, is_alive, wait_for
from tests.integration.programs import serve


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_daemon_well_and_leaves_the_replicas(
    make_daemon: DaemonMaker, number: signal.Signals
) -> None:
    """SIGHUP is the end of the terminal; it used to kill the daemon without a word."""
    daemon = make_daemon()
    daemon.start()
    job = daemon.submit(serve())
    daemon.wait_ready(job)
    pid = daemon.replica(job)["pid"]
    assert daemon.process is not None
    daemon.process.send_signal(number)
    assert daemon.process.wait(15) == 0
    assert is_alive(pid)
    assert number.name in daemon.log_tail()
    daemon.start()
    wait_for(lambda: daemon.replica(job)["state"] == "ready", what=lambda: daemon.replica(job))
    assert daemon.replica(job)["pid"] == pid


def test_under_nohup_the_end_of_the_terminal_is_ignored(make_daemon: DaemonMaker) -> None:
    daemon = make_daemon(command=("nohup", *GPULAYER))
    daemon.start()
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert int(status["SigIgn"], 16) & 1 << (signal.SIGHUP - 1)
    daemon.stop()


def test_a_daemon_started_without_descriptors_and_with_blocked_signals_serves_and_ends(
    make_daemon: DaemonMaker, tmp_path: Path
) -> None:
    """Its first file would become stderr, and SIGTERM would wait for ever."""
    starter = (
        "import os, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "for descriptor in range(3): os.close(descriptor)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'gpulayer', *sys.argv[1:]])\n"
    )
    daemon = make_daemon(command=(sys.executable, "-c", starter))
    daemon.start()
    job = daemon.submit(serve())
    daemon.wait_ready(job)
    daemon.cancel(job)
    daemon.wait_ended(job)
    assert daemon.stop() == 0
