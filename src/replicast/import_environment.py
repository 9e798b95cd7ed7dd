"""The environment variables that TensorFlow, Keras and numpy read while they are imported.

A standby process of `replicast run --standby` imports them before it knows its worker. So that this has the
same effect as in a cold start, every worker writes down which of these variables its script has changed, and
the launcher starts the next standby processes with the same changes. No other variable is written: the
environment may hold secrets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

_PREFIXES = (
    "ABSL_", "BLIS_", "CUDA_", "DNNL_", "GLOG_", "GOMP_", "GOTO_", "GRPC_", "KERAS_", "KMP_", "MKL_", "NCCL_",
    "NPY_", "NUMEXPR_", "NUMPY_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "TF2_", "TF_", "VECLIB_", "XLA_",
)  # fmt: skip
_NOT_AT_IMPORT = ("TF_CONFIG",)
_MAX_BYTES = 1 << 20

imported_with: Mapping[str, str] | None = None
"""In a process that was a standby: the environment during its imports. Set by `supervisor/prepared.py`."""
called_with: Mapping[str, str] | None = None
"""In a process that was a standby: the environment that its script started with."""


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that matter to the imports."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_PREFIXES) and name not in _NOT_AT_IMPORT
    }


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """What was changed of the relevant variables; None for one that was removed."""
    old, new = relevant(before), relevant(after)
    return {name: new.get(name) for name in sorted({*old, *new}) if old.get(name) != new.get(name)}


def parse(block: bytes) -> dict[str, str]:
    """Reads an environment as the kernel keeps it: `NAME=VALUE`, each ended by a zero byte."""
    pairs = (entry.partition(b"=") for entry in block.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def script_changes() -> dict[str, str | None]:
    """What the script of this process has changed so far."""
    before = called_with
    if before is None:
        try:
            before = parse(Path("/proc/self/environ").read_bytes())
        except OSError:
            return {}
    return changes(before, os.environ)


def without_effect() -> list[str]:
    """In a process that was a standby: the variables that its script has set too late for the imports.

    One that is missing now was set by a library during its import, or by the script in an attempt before.
    """
    if imported_with is None:
        return []
    return [name for name, value in changes(imported_with, os.environ).items() if value is not None]


def path_in(run_dir: Path, rank: int) -> Path:
    """The file in which a worker writes its script's changes."""
    return Path(run_dir) / "workers" / f"{rank}.environment"


def to_text(attempt: int) -> str:
    """The content of that file for this process."""
    return json.dumps({"attempt": attempt, "changes": script_changes()})


def read_changes(run_dir: Path, rank: int) -> dict[str, str | None]:
    """What a worker's script changed in its last attempt; nothing if that is not known."""
    try:
        with path_in(run_dir, rank).open("rb") as file:
            found = json.loads(file.read(_MAX_BYTES))["changes"]
        pairs = {str(name): value for name, value in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return {
        name: value
        for name, value in pairs.items()
        if name.startswith(_PREFIXES) and (value is None or isinstance(value, str)) and "\0" not in str(value)
    }


def with_changes(environ: Mapping[str, str], changed: Mapping[str, str | None]) -> dict[str, str]:
    """An environment after a script's changes."""
    merged = {**environ, **changed}
    return {name: value for name, value in merged.items() if value is not None}
