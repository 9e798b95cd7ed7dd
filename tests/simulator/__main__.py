"""`python -m tests.simulator --seeds 100000`: runs many schedules and prints statistics.

`--seed N` runs one schedule and prints its transcript.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulator.plan import random_plan
from tests.simulator.replica import StoryFailed
from tests.simulator.world import World, worlds


def main() -> int:
    """Runs schedules; returns 1 if an invariant was violated in one of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="number of schedules")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first schedule")
    parser.add_argument("--seed", type=int, help="run this schedule and print its transcript")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return show(arguments.seed)
    return play(range(arguments.first, arguments.first + arguments.seeds))


def show(seed: int) -> int:
    """Runs one schedule and prints its transcript."""
    world = World(random_plan(seed), recording=True)
    failure = ""
    try:
        world.run()
    except StoryFailed as error:
        failure = f"\nFAILED: {error}"
    print(f"{world.story.plan}\n")
    print("\n".join(world.notes.lines) + failure)
    return 1 if failure else 0


def play(seeds: range) -> int:
    """Runs many schedules and prints what happened, and what was lost."""
    counts, faults, failed = Counter[str](), Counter[str](), list[int]()
    began, used = time.perf_counter(), time.process_time()
    for seed, world in zip(seeds, worlds(seeds), strict=True):
        try:
            world.run()
        except StoryFailed as error:
            failed.append(seed)
            print(f"seed {seed}: {error}\n  python -m tests.simulator --seed {seed}", flush=True)
        counts.update(world.notes.counts)
        faults.update(world.notes.faults)
    wall, cpu = time.perf_counter() - began, time.process_time() - used
    rate = f"{len(seeds) / cpu:.0f} per second of one core"
    print(f"{len(seeds)} schedules in {wall:.1f} s, of which {cpu:.1f} s are computing: {rate}")
    for title, numbers in (("what happened", counts), ("faults fired", faults)):
        print(f"{title}:\n" + "\n".join(f"  {number:>9}  {what}" for what, number in numbers.most_common()))
    print(f"promises broken: {len(failed)}" + (f", by seeds {failed[:20]}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
