"""python -m tests.sim --seed N plays that seed, and finds the fewest faults that break a promise, if one breaks."""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.scenarios import draw, play, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="so many, from --seed on; stops at the first that fails")
    parser.add_argument("--seconds", type=float, help="of real time at most")
    parser.add_argument("--only", help="numbers of the faults that happen, with commas")
    parser.add_argument("--story", action="store_true", help="all that happened, also where nothing broke")
    parser.add_argument("--keep-faults", action="store_true", help="do not look for fewer faults that break it too")
    parser.add_argument("--keep-going", action="store_true", help="with --seeds: past one that fails")
    arguments = parser.parse_args()
    began, node_seconds, failed = time.monotonic(), 0.0, []
    last = arguments.seed
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        if arguments.seconds is not None and time.monotonic() - began > arguments.seconds:
            break
        last = seed
        plan = draw(seed)
        only = None if arguments.only is None else [int(word) for word in arguments.only.split(",") if word]
        outcome = play(plan, only)
        node_seconds += outcome.node_seconds
        if arguments.story:
            print(plan.told(), outcome.cluster.tail(5000), sep="\n")
        if not outcome.broken:
            continue
        failed.append(seed)
        print(f"seed {seed} breaks: {outcome.broken if not arguments.keep_going else outcome.broken.splitlines()[0]}")
        if arguments.keep_going:
            continue
        if only is None and not arguments.keep_faults:
            few = shrink(plan)
            print("it takes these faults:", *(f"  {plan.faults[number]}" for number in few), sep="\n")
            print(f"python -m tests.sim --seed {seed} --only {','.join(map(str, few))}")
            print(play(plan, few).broken)
        break
    spent = time.monotonic() - began
    print(
        f"seeds {arguments.seed} to {last}: {len(failed)} failed {failed or ''}; {node_seconds:.0f} node-seconds in "
        f"{spent:.1f} s ({node_seconds / max(spent, 1e-9):.0f} a second)"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
