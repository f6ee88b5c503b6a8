"""How far this node may trust its own judgement: Lifeguard's local health score (Dadgar, Phillips, Currey 2018).

0 is well. It grows with everything that says "the trouble may be here": answers that did not come back from relays
that should be well, having been accused, having slept. It slows our probing and takes the weight from our word.
"""

from __future__ import annotations

from gpulayer.core.gossip.profile import Profile


class Health:
    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.score = 0

    @property
    def is_reliable(self) -> bool:
        """Whether our word confirms a suspicion."""
        return self.score < self._profile.health_unreliable

    @property
    def probe_interval(self) -> float:
        """Seconds of one round: Lifeguard scales the interval, and not the timeout of the direct ping."""
        return self._profile.probe_interval * (self.score + 1)

    def better(self) -> None:
        self.score = max(0, self.score - 1)

    def worse(self, by: int = 1) -> None:
        assert by >= 0, by
        self.score = min(self._profile.health_max, self.score + by)

    def worst(self) -> None:
        self.score = self._profile.health_max

    def check(self) -> None:
        assert 0 <= self.score <= self._profile.health_max, self.score
