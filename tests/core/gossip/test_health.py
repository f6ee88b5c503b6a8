"""The local health score."""

from __future__ import annotations

from gpulayer.core.gossip.health import Health
from gpulayer.core.gossip.profile import Profile


def test_the_score_stays_between_nothing_and_its_most() -> None:
    health = Health(Profile())
    health.better()
    assert health.score == 0
    health.worse(100)
    assert health.score == 8
    health.check()


def test_a_worse_score_slows_probing() -> None:
    health = Health(Profile(probe_interval=0.5))
    assert health.probe_interval == 0.5
    health.worse(3)
    assert health.probe_interval == 2.0


def test_from_half_of_the_most_on_our_word_counts_for_nothing() -> None:
    health = Health(Profile())
    health.worse(3)
    assert health.is_reliable
    health.worse()
    assert not health.is_reliable
