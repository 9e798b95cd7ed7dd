"""Prints which schedule is the first to notice each break; names of breaks restrict it to those."""

from __future__ import annotations

import sys

from tests.simulation.mutations import MUTATIONS, is_caught

MOST = 30_000


def main() -> None:
    print("| break | schedules |\n| --- | --- |")
    for name in sys.argv[1:] or MUTATIONS:
        caught = next((seed for seed in range(MOST) if is_caught(name, seed)), None)
        schedules = f"more than {MOST:,}" if caught is None else f"{caught + 1:,}"
        print(f"| {name} | {schedules} |", flush=True)


if __name__ == "__main__":
    main()
