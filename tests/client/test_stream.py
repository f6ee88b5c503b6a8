"""How a stream is waited for and taken up again; no daemon, no clock."""

from __future__ import annotations

import math
from typing import Any

import pytest

import gpulayer as gl
from gpulayer.client.calls import Feed
from gpulayer.client.exchange import NoAnswer
from gpulayer.client.stream import LINE_BYTES_MAX, RECONNECT_SECONDS_MAX, Absence, Following, Lines, StreamLost

REFUSED = gl.Unreachable("no daemon answers")


def feed(*, is_resumed: bool = True) -> Feed[Any]:
    return Feed(
        path_after=lambda last: f"/v1/events?after={last['offset']}" if last else "/v1/events",
        read=lambda document: document,
        is_resumed=is_resumed,
    )


def following(seconds: float = math.inf, *, is_resumed: bool = True, absence: Absence | None = None) -> Following:
    return Following(feed(is_resumed=is_resumed), seconds, now=0.0, absence=absence)


def test_documents_are_put_together_from_any_pieces() -> None:
    text = b'{"a": 1}\n\n{"b": "\xc3\xa4"}\n  \n{"c": 3}'
    for size in range(1, len(text) + 1):
        lines = Lines()
        found = [each for at in range(0, len(text), size) for each in lines.documents(text[at : at + size])]
        assert [*found, *lines.rest()] == [{"a": 1}, {"b": "ä"}, {"c": 3}], size


def test_what_came_before_a_line_that_is_no_document_is_given() -> None:
    documents = Lines().documents(b'{"a": 1}\nnonsense\n')
    assert next(documents) == {"a": 1}
    with pytest.raises(gl.GpulayerError, match="not JSON"):
        next(documents)


def test_a_line_without_an_end_is_not_read_for_ever() -> None:
    lines = Lines()
    for _ in range(LINE_BYTES_MAX // 2**20):
        assert list(lines.documents(b"x" * 2**20)) == []
    with pytest.raises(gl.GpulayerError, match="longer than"):
        next(lines.documents(b"x"))


def test_a_daemon_that_is_not_there_is_said_at_once() -> None:
    state = following()
    state.path()
    with pytest.raises(gl.Unreachable):
        state.pause_after(REFUSED, now=0.1)


def test_a_stream_goes_on_behind_its_last_document() -> None:
    state = following()
    assert state.path() == "/v1/events"
    state.opened(now=0.0)
    state.got({"offset": "7"})
    assert state.pause_after(StreamLost(), now=5.0) == 0.1
    assert state.path() == "/v1/events?after=7"


def test_it_is_tried_for_a_minute_and_less_and_less_often() -> None:
    state, now, pauses = following(), 0.0, []
    state.path()
    state.opened(now)
    state.got({"offset": "1"})
    pauses.append(state.pause_after(StreamLost(), now))
    while (now := now + pauses[-1]) <= RECONNECT_SECONDS_MAX:
        state.path()
        pauses.append(state.pause_after(REFUSED, now))
    with pytest.raises(gl.Unreachable, match="no daemon answers"):
        state.pause_after(REFUSED, now)
    assert now < RECONNECT_SECONDS_MAX + 3
    assert max(pauses) == 2.0
    assert len(pauses) < 60


def test_each_loss_has_a_minute_of_its_own() -> None:
    state = following()
    for number in range(5):
        lost_at = number * 100.0
        state.path()
        state.opened(lost_at - 50)
        assert state.pause_after(StreamLost(), lost_at) == 0.1
        state.path()
        assert state.pause_after(REFUSED, lost_at + RECONNECT_SECONDS_MAX - 1) > 0


def test_what_is_not_followed_is_not_taken_up_again() -> None:
    state = following(is_resumed=False)
    state.path()
    state.opened(now=0.0)
    state.got({"offset": "1"})
    with pytest.raises(StreamLost):
        state.pause_after(StreamLost(), now=1.0)


def test_time_that_is_over_is_a_timeout_whatever_happened() -> None:
    state = following(10.0)
    state.path()
    assert state.patience(now=0.0) == 10.0
    state.opened(now=0.0)
    state.got({"offset": "1"})
    assert isinstance(state.silence(now=9.0), StreamLost)
    assert isinstance(state.silence(now=10.0), gl.WaitTimeout)
    for error in (NoAnswer("late"), StreamLost(), REFUSED):
        with pytest.raises(gl.WaitTimeout):
            state.pause_after(error, now=10.0)
    with pytest.raises(gl.WaitTimeout):
        state.patience(now=10.0)


def test_who_waits_for_no_time_gets_one_look() -> None:
    state = following(0.0)
    state.path()
    state.opened(now=0.0)
    assert state.patience(now=0.2) == pytest.approx(0.8)
    state.got({"offset": "1"})
    with pytest.raises(gl.WaitTimeout):
        state.patience(now=0.3)


def test_no_wait_is_longer_than_a_daemon_is_silent() -> None:
    state = following()
    state.path()
    state.opened(now=0.0)
    assert state.patience(now=0.0) == 45.0


def test_an_absence_is_told_once_and_its_end_too() -> None:
    told: list[bool] = []
    state = following(absence=Absence(told.append))
    now = 0.0
    state.path()
    state.opened(now)
    state.got({"offset": "1"})
    now += state.pause_after(StreamLost(), now)
    state.path()
    while now < 2.0:
        assert told == []
        now += state.pause_after(REFUSED, now)
    for now in (2.0, 4.0, 8.0):
        state.pause_after(REFUSED, now)
        assert told == [True]
    state.opened(now)
    state.got({"offset": "2"})
    assert told == [True, False]
