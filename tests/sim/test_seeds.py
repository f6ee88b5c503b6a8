"""Seeds for as long as there is time: GPULAYER_SIM_SECONDS of it (60), from GPULAYER_SIM_SEED (1) on."""

from __future__ import annotations

import os
import time

from tests.sim.scenarios import draw, play, shrink


def test_what_was_promised_holds_under_any_mixture_of_faults() -> None:
    seconds = float(os.environ.get("GPULAYER_SIM_SECONDS", "60"))
    seed = first = int(os.environ.get("GPULAYER_SIM_SEED", "1"))
    began, node_seconds = time.monotonic(), 0.0
    while seed == first or time.monotonic() - began < seconds:
        plan = draw(seed)
        outcome = play(plan)
        node_seconds += outcome.node_seconds
        if outcome.broken:
            few = ",".join(map(str, shrink(plan, tries=20)))
            raise AssertionError(f"python -m tests.sim --seed {seed} --only {few}\n{plan.told()}\n{outcome.broken}")
        seed += 1
    print(f"seeds {first} to {seed - 1}: {node_seconds:.0f} node-seconds in {time.monotonic() - began:.0f} s")
