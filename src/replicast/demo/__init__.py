"""The programs that `replicast demo` and `replicast bench` run on real workers, and what both sides know.

- `train`: the training script of the demo, to read and to copy.
- `measure`: what the workers of the bench run.
"""

from pathlib import Path

# The figures of one round of the bench, in the order in which they are measured.
MEASURES = {
    "copy": "copy in memory (floor)",
    "all-reduce": "all-reduce",
    "update": "update: proposed to applied by all",
    "checkpoint-stall": "checkpoint: training stops",
    "checkpoint": "checkpoint: durable",
    "audit": "audit of all replicas",
}
FLOOR = "copy"
WARM_UP = -1  # The number of the round that does not count.


def figures_file(directory: Path, rank: int) -> Path:
    """Where a worker of the bench writes its times."""
    return directory / f"bench-{rank}.jsonl"
