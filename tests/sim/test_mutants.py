"""Negative controls: the protocol without one of its rules, and the story that finds it out.

A story that passes without the rule that it is told for proves nothing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpulayer.core.gossip.core import Gossip
from gpulayer.core.gossip.suspicion import Suspicions
from gpulayer.core.gossip.words import Words
from gpulayer.wire.replay import ReplayWindow
from tests.sim import test_scenarios as stories


def test_without_vouching_a_node_that_is_heard_and_hears_nobody_is_buried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Suspicions, "vouch", lambda *_, **__: False)
    with pytest.raises(AssertionError, match="dead"):
        stories.test_a_node_that_is_heard_and_hears_nobody_is_doubted_and_not_buried()


def test_without_the_late_wake_rule_a_machine_that_stood_still_accuses_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gossip, "_notice_late_wake", lambda *_: None)
    with pytest.raises(AssertionError, match="suspect"):
        stories.test_a_machine_that_stood_still_accuses_nobody_when_it_goes_on()


def test_with_stale_incarnations_applied_an_old_word_of_death_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Words.hear_accusation

    def wrong(self: Words, word, *rest) -> None:  # type: ignore[no-untyped-def]
        member = self._members.get(word.node)
        held = 0 if member is None else member.incarnation
        right(self, replace(word, incarnation=max(word.incarnation, held)), *rest)

    monkeypatch.setattr(Words, "hear_accusation", wrong)
    with pytest.raises(AssertionError, match="dead"):
        stories.test_a_word_of_death_about_a_lower_incarnation_is_not_believed()


def test_without_the_replay_window_a_capture_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayWindow, "is_fresh", lambda *_: True)
    monkeypatch.setattr(ReplayWindow, "accept", lambda *_: True)
    with pytest.raises(AssertionError, match="a replayed or damaged packet changes nothing"):
        stories.test_a_replayed_capture_changes_nothing()
