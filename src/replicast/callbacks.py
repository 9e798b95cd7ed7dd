"""The Keras callback of replicast; `Replicas.callback` creates it."""

from replicast.replicas.callback import ReplicasCallback

__all__ = ["ReplicasCallback"]
