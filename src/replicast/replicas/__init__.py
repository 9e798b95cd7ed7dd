"""One façade per worker: propose, boundary, sync; the Keras callback; the files that others watch."""

from replicast.replicas.callback import BoundaryCallback
from replicast.replicas.replicas import Replicas

__all__ = ["BoundaryCallback", "Replicas"]
