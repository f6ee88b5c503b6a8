"""What every machine of core has in common: one shape, and the promises that go with it.

`step(event, now)` gives effects in the order in which they are to be done, and `deadline` says when it wants a Tick
(infinite when idle). The same events at the same instants give the same effects. A late or doubled Tick is harmless.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The deadline has passed."""
