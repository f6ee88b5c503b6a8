"""gpulayer leave: the daemon says good-bye and ends."""

from __future__ import annotations

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
    deadline = time.monotonic() + GONE_SECONDS_MAX
    while client.ready():
        if time.monotonic() > deadline:
            raise GpulayerError("the daemon has left, but still answers", hint="see its log")
        time.sleep(0.02)
