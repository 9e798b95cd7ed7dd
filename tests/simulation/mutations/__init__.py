"""Deliberate breaks of the core, each of which the simulation must notice.

`python -m tests.simulation.mutations` prints which schedule is the first to notice each: for `CAUGHT_BY`, and
for docs/faults.md.
"""

from tests.simulation.mutations import (  # noqa: F401 - they fill MUTATIONS
    audits,
    boundaries,
    outcomes,
    requests,
    restarts,
)
from tests.simulation.mutations.caught import CAUGHT_BY, is_caught
from tests.simulation.mutations.registry import MUTATIONS

__all__ = ["CAUGHT_BY", "MUTATIONS", "is_caught"]
