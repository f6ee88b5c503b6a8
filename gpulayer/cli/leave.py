"""gpulayer leave: the daemon says good-bye and ends."""

from __future__ import annotations

import os
import select
import time

from gpulayer.cli.connection import LOCAL, Connection
from gpulayer.cli.render import note
from gpulayer.client.sync import Client
from gpulayer.model.errors import GpulayerError, Unreachable

# Its answer was sent by then; what is left to it is closing files.
GONE_SECONDS_MAX = 10.0


def leave(*, stop_all: bool = False, connection: Connection = LOCAL) -> None:
    """Let the daemon leave and end; returns when it is gone. Refused while replicas run.

    Parameters
    ----------
    stop_all
        Stop every replica first.
    """
    leave_and_wait(connection.client(), stop_all=stop_all)
    note("left; the daemon has ended")


def leave_and_wait(client: Client, *, stop_all: bool) -> None:
    """Ask it to leave, tell how many replicas are left to stop, return when it does not answer any more."""
    told: int | None = None
    has_left = False
    daemon = _daemon_process(client)
    try:
        for progress in client.leave(stop_all=stop_all):
            has_left = progress["state"] == "left"
            left = progress.get("left")
            if left and left != told:
                note(f"stopping: {left} {'replica' if left == 1 else 'replicas'} left")
                told = left
    except Unreachable:
        # The daemon may be gone before the end of its own answer.
        if not has_left:
            raise
    if not has_left:
        raise GpulayerError("the daemon did not say that it has left", hint="see its log")
    if not _has_ended(client, daemon):
        raise GpulayerError("the daemon has left, but has not ended", hint="see its log")


def _daemon_process(client: Client) -> int | None:
    """A descriptor of the daemon's process (pidfd_open(2)), where it is one of this host."""
    pid = client.daemon_pid()
    if pid is None:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _has_ended(client: Client, daemon: int | None) -> bool:
    """Whether it ended in time: its process, which until then holds the lock of its data directory."""
    if daemon is not None:
        try:
            return bool(select.select([daemon], [], [], GONE_SECONDS_MAX)[0])
        finally:
            os.close(daemon)
    deadline = time.monotonic() + GONE_SECONDS_MAX
    while client.ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
