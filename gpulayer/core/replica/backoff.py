"""How long a replica waits before its next run. Numbers only: lifecycle.py says when they apply.

`failures` counts the runs that ended one after the other without having been up for long; it is kept in each run's
marker, so that a daemon that comes back does not begin again at one second.
"""

from __future__ import annotations

from gpulayer.model.units import Duration

# A crash that was an accident costs a second; one that comes again and again costs two short starts a minute and no
# more, and a cause that goes away (a mount that comes back) is noticed within half a minute.
FIRST_DELAY = Duration(1.0)
LONGEST_DELAY = Duration(30.0)

# Twice the longest delay: what stayed up for longer than this is not in a crash loop.
STEADY_AFTER = Duration(60.0)

_DOUBLINGS_MAX = 5  # 2**5 is above LONGEST_DELAY; and no power grows without end


def failures_after(failures: int, uptime_seconds: float) -> int:
    """The count after one more run has ended, up for `uptime_seconds` since its exec (0: it never got so far)."""
    assert failures >= 0
    return 1 if uptime_seconds > STEADY_AFTER else failures + 1


def delay(failures: int) -> Duration:
    """From the end of a run to the start of the next: 1, 2, 4, 8, 16, 30, 30, ... seconds."""
    assert failures >= 1
    doublings = min(failures - 1, _DOUBLINGS_MAX)
    return Duration(min(FIRST_DELAY * 2.0**doublings, LONGEST_DELAY))
