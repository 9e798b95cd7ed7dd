"""Checkpoints: the whole state in files that any tool can read, and offline operations on them.

`CheckpointStore` manages the checkpoints of a run; `open_checkpoint` opens one by its directory; `patch`
applies an update to one; `diff` compares two, and `differences` compares two models.
"""

from __future__ import annotations

from replicast.storage.checkpoint.choosing import choose
from replicast.storage.checkpoint.comparing import Comparison, Difference, Verdict, diff, differences
from replicast.storage.checkpoint.layout import dtype_of, file_order
from replicast.storage.checkpoint.manifest import Draft, Manifest, PendingUpdate, saved_of
from replicast.storage.checkpoint.patching import patch
from replicast.storage.checkpoint.reading import CheckpointReader, Progress, advice, open_checkpoint
from replicast.storage.checkpoint.store import CheckpointStore

__all__ = [
    "CheckpointReader",
    "CheckpointStore",
    "Comparison",
    "Difference",
    "Draft",
    "Manifest",
    "PendingUpdate",
    "Progress",
    "Verdict",
    "advice",
    "choose",
    "diff",
    "differences",
    "dtype_of",
    "file_order",
    "open_checkpoint",
    "patch",
    "saved_of",
]
