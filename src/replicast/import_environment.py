"""The environment variables that TensorFlow, Keras and numpy read while they are imported.

A standby process of `replicast run --standby` imports them before it knows its worker. So that this has the
same effect as in a cold start, every worker tells its launcher which of `PASSED_ON` its script has changed,
and the launcher starts the next standby processes with the same changes.

A variable may name a library to load, so it must not come from anybody else. The worker writes into anonymous
memory of the launcher, whose descriptor it has inherited: no file has a name that others could write to. And
only the variables of a fixed list pass, none of which names code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from replicast.config import CHANGES_FD

_PREFIXES = (
    "ABSL_", "BLIS_", "CUDA_", "DNNL_", "GLOG_", "GOMP_", "GOTO_", "GRPC_", "KERAS_", "KMP_", "MKL_", "NCCL_",
    "NPY_", "NUMEXPR_", "NUMPY_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "TF2_", "TF_", "VECLIB_", "XLA_",
)  # fmt: skip
_MEMORY = "replicast-changes"
_MAX_BYTES = 1 << 16

# The only variables that a standby takes over, and what happens with them during the imports.
# Found by logging every getenv during the imports. Left out is what only tests and profilers of TensorFlow
# set, and TF_PLUGGABLE_DEVICE_LIBRARY_PATH, which names a library to load: it belongs into the environment of
# `replicast run`.
PASSED_ON = {
    "KERAS_BACKEND": "Keras chooses its backend",
    "KERAS_HOME": "Keras reads keras.json there: backend, float type, epsilon",
    "KERAS_MAX_EPOCHS": "Keras limits every fit",
    "KERAS_MAX_STEPS_PER_EPOCH": "Keras limits every epoch",
    "TF_USE_LEGACY_KERAS": "TensorFlow chooses what tf.keras is",
    "TF_ENABLE_CONTROL_FLOW_V2": "TensorFlow chooses how it traces loops",
    "TF_FUNCTION_JIT_COMPILE_DEFAULT": "TensorFlow chooses whether it compiles functions",
    "TF_ENABLE_ONEDNN_OPTS": "TensorFlow registers its kernels: other rounding",
    "TF_CPP_MIN_LOG_LEVEL": "TensorFlow logs from then on",
    "TF_CPP_MAX_VLOG_LEVEL": "TensorFlow logs from then on",
    "TF_CPP_VMODULE": "TensorFlow logs from then on",
    "NPY_DISABLE_CPU_FEATURES": "numpy chooses its loops: other rounding",
    "NPY_ENABLE_CPU_FEATURES": "numpy chooses its loops: other rounding",
    "OPENBLAS_CORETYPE": "OpenBLAS chooses its kernels: other rounding",
    "OPENBLAS_NUM_THREADS": "OpenBLAS starts its threads",
    "GOTO_NUM_THREADS": "OpenBLAS starts its threads",
    "OMP_NUM_THREADS": "OpenBLAS and OpenMP size their thread pools",
    "OMP_DYNAMIC": "OpenMP sizes its thread pool",
    "OMP_THREAD_LIMIT": "OpenMP sizes its thread pool",
    "OMP_PLACES": "OpenMP places its threads",
    "OMP_PROC_BIND": "OpenMP places its threads",
    "OMP_SCHEDULE": "OpenMP divides loops",
    "OMP_WAIT_POLICY": "OpenMP chooses how threads wait",
    "GOMP_CPU_AFFINITY": "OpenMP places its threads",
    "GOMP_SPINCOUNT": "OpenMP chooses how threads wait",
}

# In a process that was a standby, set by `launcher/prepared.py`: the environment during its imports, and the
# one that its script started with.
imported_with: Mapping[str, str] | None = None
called_with: Mapping[str, str] | None = None


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_PREFIXES) and name != "TF_CONFIG"  # which is not read at import
    }


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """What was changed of the relevant variables; None for one that was removed."""
    old, new = relevant(before), relevant(after)
    return {name: new.get(name) for name in sorted({*old, *new}) if old.get(name) != new.get(name)}


def without_effect() -> list[str]:
    """In a process that was a standby: the variables that its script has set too late for the imports.

    One that is missing now was set by a library during its import, or by the script in an attempt before.
    """
    if imported_with is None:
        return []
    return [name for name, value in changes(imported_with, os.environ).items() if value is not None]


def make_memory() -> int:
    """Anonymous memory of the launcher, for the changes of one worker; returns its descriptor."""
    return os.memfd_create(_MEMORY)


def note_changes(environ: Mapping[str, str] = os.environ) -> None:
    """Tells the launcher what the script of this process has changed; nothing if it keeps no standby.

    A crash between truncating and writing leaves nothing to read, as before.
    """
    memory, before = environ.get(CHANGES_FD, ""), called_with
    try:
        # A child of the script inherits the variable without the descriptor: there it may be any other file.
        if str(Path(f"/proc/self/fd/{memory}").readlink()) == f"/memfd:{_MEMORY} (deleted)":
            if before is None:  # as the kernel keeps it: `NAME=VALUE`, each ended by a zero byte
                entries = Path("/proc/self/environ").read_bytes().split(b"\0")
                pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
                before = {name: value for name, _, value in pairs}
            changed = changes(before, os.environ)
            passed_on = {name: value for name, value in changed.items() if name in PASSED_ON}
            os.ftruncate(int(memory), 0)
            os.pwrite(int(memory), json.dumps(passed_on).encode(), 0)
    except (OSError, ValueError):
        return


def read_changes(memory: int) -> dict[str, str | None]:
    """What a worker's script changed in its last attempt; nothing if that is not known."""
    try:
        found = json.loads(os.pread(memory, _MAX_BYTES, 0)).items()
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return {
        name: value
        for name, value in found
        if name in PASSED_ON and (value is None or isinstance(value, str)) and "\0" not in str(value)
    }


def with_changes(environ: Mapping[str, str], changed: Mapping[str, str | None]) -> dict[str, str]:
    merged = {**environ, **changed}
    return {name: value for name, value in merged.items() if value is not None}
