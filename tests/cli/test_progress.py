"""What `submit --service` says to who waits long."""

from __future__ import annotations

from tests.integration.daemon import Daemon


def test_who_waits_long_hears_once_how_to_see_what_is_done(daemon: Daemon) -> None:
    """A model that loads for a minute looks like one that hangs: only its own log tells which it is."""
    done = daemon.cli("submit", "--service", "--name", "slow", "--wait", "12s", "--", "sleep", "300")
    daemon.cli("job", "cancel", "slow", "--wait", "10s")
    assert done.returncode == 124
    lines = done.stderr.splitlines()
    reminders = [place for place, line in enumerate(lines) if line.startswith("still waiting: replica 0 is starting")]
    assert len(reminders) == 1, done.stderr  # the same words come again after a minute
    hint = "hint: see what it does with: gpulayer job logs slow -f; Ctrl-C ends only the waiting"
    assert lines[reminders[0] + 1] == hint
    assert lines.count(hint) == 1
