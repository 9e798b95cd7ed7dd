"""Checkpoints: the whole state in files that any tool can read, and what can be done with them offline.

`CheckpointStore` has the checkpoints of a run; `open_checkpoint` opens one by its directory.
"""

from __future__ import annotations

from replicast.checkpoint.layout import file_order
from replicast.checkpoint.manifest import Draft, Manifest
from replicast.checkpoint.reading import CheckpointReader, open_checkpoint
from replicast.checkpoint.store import CheckpointStore

__all__ = [
    "CheckpointReader",
    "CheckpointStore",
    "Draft",
    "Manifest",
    "file_order",
    "open_checkpoint",
]
