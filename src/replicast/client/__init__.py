"""One Python face for a run: its directory, or the address at which it is served. Needs no TensorFlow."""

from replicast.client.connection import connect
from replicast.client.directory import is_run
from replicast.client.metrics import Metrics, Series
from replicast.client.run import Brief, CheckpointView, Overview, Pulled, Pushed, Run
from replicast.storage.journal import UpdateView
from replicast.storage.run_files import Annotation
from replicast.update.guard import EditView, Examination

__all__ = [
    "Annotation",
    "Brief",
    "CheckpointView",
    "EditView",
    "Examination",
    "Metrics",
    "Overview",
    "Pulled",
    "Pushed",
    "Run",
    "Series",
    "UpdateView",
    "connect",
    "is_run",
]
