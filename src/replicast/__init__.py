"""One worker writes, every replica follows.

TensorFlow is loaded when a name that needs it is first used, not when this package is imported: the command
line and every tool that only reads files work without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from replicast.errors import (
    CheckpointError,
    ClusterError,
    FileDamaged,
    JobFailed,
    LaunchRefused,
    NoAnswer,
    NotFound,
    NotSupported,
    PayloadRemoved,
    ReplicasDiverged,
    ReplicastError,
    RequestFailed,
    RequestRefused,
    ServeRefused,
    UpdateFailed,
    UpdateIdInUse,
    UpdatePending,
    UpdateRefused,
)

if TYPE_CHECKING:
    from replicast import callbacks, optimizers
    from replicast.client import connect
    from replicast.core.entries import Receipt
    from replicast.core.operation import Timeouts
    from replicast.launcher.function import launch
    from replicast.replicas.replicas import Replicas
    from replicast.training import Strategy, per_worker
    from replicast.update.guard import Guard
    from replicast.update.schema import Limits
    from replicast.update.trial import Trial
    from replicast.update.update import Update

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ClusterError",
    "FileDamaged",
    "Guard",
    "JobFailed",
    "LaunchRefused",
    "Limits",
    "NoAnswer",
    "NotFound",
    "NotSupported",
    "PayloadRemoved",
    "Receipt",
    "Replicas",
    "ReplicasDiverged",
    "ReplicastError",
    "RequestFailed",
    "RequestRefused",
    "ServeRefused",
    "Strategy",
    "Timeouts",
    "Trial",
    "Update",
    "UpdateFailed",
    "UpdateIdInUse",
    "UpdatePending",
    "UpdateRefused",
    "__version__",
    "callbacks",
    "connect",
    "launch",
    "optimizers",
    "per_worker",
]

# What is loaded on first use: the command line answers before numpy could be loaded.
_LATE = {
    "Guard": "replicast.update.guard",
    "Limits": "replicast.update.schema",
    "Receipt": "replicast.core.entries",
    "Replicas": "replicast.replicas.replicas",
    "Strategy": "replicast.training",
    "Timeouts": "replicast.core.operation",
    "Trial": "replicast.update.trial",
    "Update": "replicast.update.update",
    "callbacks": "replicast.callbacks",
    "connect": "replicast.client",
    "launch": "replicast.launcher.function",
    "optimizers": "replicast.optimizers",
    "per_worker": "replicast.training",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'replicast' has no attribute {name!r}")
    try:
        module = import_module(_LATE[name])
    except ModuleNotFoundError as error:
        if error.name not in ("tensorflow", "keras"):
            raise
        raise ImportError(
            f"replicast.{name} needs {error.name}, which is not installed here. "
            "Install one of: pip install 'replicast[cpu]' (no GPU), pip install 'replicast[tensorflow]'."
        ) from error
    value = globals()[name] = module if name in ("callbacks", "optimizers") else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
