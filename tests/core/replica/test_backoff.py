"""How long a crashing replica waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpulayer.core.replica import backoff


def _delays(uptimes: list[float]) -> list[float]:
    failures, delays = 0, []
    for uptime in uptimes:
        failures = backoff.failures_after(failures, uptime)
        delays.append(backoff.delay(failures))
    return delays


def test_the_delay_doubles_from_one_second_to_thirty() -> None:
    assert _delays([0.3] * 7) == [1, 2, 4, 8, 16, 30, 30]


def test_a_run_that_was_up_for_more_than_a_minute_starts_again_from_one_second() -> None:
    assert _delays([0.3, 0.3, 61.0, 0.3]) == [1, 2, 1, 2]


def test_a_minute_sharp_is_not_more_than_a_minute() -> None:
    assert _delays([0.3, 60.0]) == [1, 2]


@given(st.integers(min_value=1, max_value=10**12))
def test_a_delay_is_bounded_whatever_a_marker_says(failures: int) -> None:
    assert 1.0 <= backoff.delay(failures) <= 30.0
