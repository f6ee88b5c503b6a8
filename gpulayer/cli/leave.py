"""gpulayer leave: the daemon says good-bye and ends."""

from __future__ import annotations

import os
import select
import time
from collections import Counter

from gpulayer.cli.connection import LOCAL, Connection
from gpulayer.cli.render import counted, note
from gpulayer.client.sync import Client
from gpulayer.model.errors import GpulayerError, Unreachable

# Its answer was sent by then; what is left to it is closing files.
GONE_SECONDS_MAX = 10.0
# Of the jobs that end with it, each is named up to here.
JOBS_NAMED_MAX = 50


def leave(*, stop_all: bool = False, connection: Connection = LOCAL) -> None:
    """Let the daemon leave and end; returns when it is gone. Refused while replicas run.

    Parameters
    ----------
    stop_all
        First end every job that has a replica here, its replicas on other nodes too.
    """
    client = connection.client()
    if stop_all:
        _say_what_ends(client)
    leave_and_wait(client, stop_all=stop_all)
    note("left; the daemon has ended")


def _say_what_ends(client: Client) -> None:
    """Each job that ends with this node, and how much of it is elsewhere."""
    try:
        nodes, jobs = client.nodes(), client.jobs("live")
        own = next(node for node in nodes if node["is_self"])
        here = Counter(replica["job"] for replica in client.node(own["id"])["replicas"])
    except (GpulayerError, StopIteration):
        return  # whoever cannot be asked now says so when it is asked to leave
    ending = [job for job in jobs if here[job["id"]] or len(nodes) == 1]
    for job in ending[:JOBS_NAMED_MAX]:
        elsewhere = job["replicas"] - here[job["id"]] if len(nodes) > 1 else 0
        more = f", {elsewhere} of its {counted(job['replicas'], 'replica')} not on {own['name']}" if elsewhere else ""
        note(f"ends job {job['name']}{more}")
    if len(ending) > JOBS_NAMED_MAX:
        note(f"ends {counted(len(ending) - JOBS_NAMED_MAX, 'more job')}")


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
