"""One Python face for a run: its directory, or the address at which it is served. Needs no TensorFlow."""

from __future__ import annotations

from replicast.client.connecting import connect
from replicast.client.run import Pushed, Run

__all__ = ["Pushed", "Run", "connect"]
