"""The environment variables that TensorFlow, Keras and numpy read while they are imported.

A standby process of `replicast run --standby` imports them before it knows its worker. So that this has the
same effect as in a cold start, every worker tells its launcher the values of `PASSED_ON` that its script has
set, and the launcher starts the next standby processes with the same ones.

A variable may name a library to load, so it must not come from anybody else. The worker writes into anonymous
memory of the launcher, whose descriptor it has inherited: no file has a name that others could write to. And
only the variables of a fixed list pass, none of which names code.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from replicast.config import CHANGES_FD, without

_PREFIXES = (
    "ABSL_", "BLIS_", "CUDA_", "DNNL_", "GLOG_", "GOMP_", "GOTO_", "GRPC_", "KERAS_", "KMP_", "MKL_", "NCCL_",
    "NPY_", "NUMEXPR_", "NUMPY_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "TF2_", "TF_", "VECLIB_", "XLA_",
)  # fmt: skip
_MEMORY = "replicast-changes"
_MAX_BYTES = 1 << 16

# The only variables that a standby takes over, by what happens with them during the imports. Found by logging
# every getenv during the imports. Left out is what only tests and profilers of TensorFlow set, and
# TF_PLUGGABLE_DEVICE_LIBRARY_PATH, which names a library to load: it belongs into the environment of
# `replicast run`.
PASSED_ON = (
    # Keras chooses its backend, float type and epsilon, and limits every fit and epoch.
    "KERAS_BACKEND", "KERAS_HOME", "KERAS_MAX_EPOCHS", "KERAS_MAX_STEPS_PER_EPOCH",
    # TensorFlow chooses what tf.keras is, how it traces loops, and whether it compiles functions.
    "TF_USE_LEGACY_KERAS", "TF_ENABLE_CONTROL_FLOW_V2", "TF_FUNCTION_JIT_COMPILE_DEFAULT",
    # TensorFlow, numpy and OpenBLAS choose their kernels: other rounding.
    "TF_ENABLE_ONEDNN_OPTS", "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "OPENBLAS_CORETYPE",
    # TensorFlow logs from then on.
    "TF_CPP_MIN_LOG_LEVEL", "TF_CPP_MAX_VLOG_LEVEL", "TF_CPP_VMODULE",
    # OpenBLAS and OpenMP start and place their threads, and choose how these wait.
    "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS", "OMP_DYNAMIC", "OMP_THREAD_LIMIT",
    "OMP_PLACES", "OMP_PROC_BIND", "OMP_SCHEDULE", "OMP_WAIT_POLICY", "GOMP_CPU_AFFINITY", "GOMP_SPINCOUNT",
)  # fmt: skip

# In a process that was a standby, set by `launcher/prepared.py`: the environment during its imports.
imported_with: Mapping[str, str] | None = None


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_PREFIXES) and name != "TF_CONFIG"  # which is not read at import
    }


def without_effect() -> list[str]:
    """In a process that was a standby: the variables that its script has set too late for the imports.

    One that is missing now was set by a library during its import, or by the script in an attempt before.
    """
    if imported_with is None:
        return []
    now = relevant(os.environ)
    return sorted(name for name, value in now.items() if imported_with.get(name) != value)


def make_memory() -> int:
    """Anonymous memory of the launcher, for what one worker tells; returns its descriptor."""
    return os.memfd_create(_MEMORY)


def tell_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Tells the launcher what the script of this process has set; nothing if it keeps no standby.

    A crash between truncating and writing leaves nothing to read, as before.
    """
    memory = environ.get(CHANGES_FD, "")
    with contextlib.suppress(OSError, ValueError):
        # A child of the script inherits the variable without the descriptor: there it may be any other file.
        if str(Path(f"/proc/self/fd/{memory}").readlink()) == f"/memfd:{_MEMORY} (deleted)":
            told = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
            os.ftruncate(int(memory), 0)
            os.pwrite(int(memory), json.dumps(told).encode(), 0)


def as_told(environ: Mapping[str, str], memory: int) -> dict[str, str]:
    """An environment with what a worker's script had set in its last attempt, if that is known."""
    try:
        told = dict(json.loads(os.pread(memory, _MAX_BYTES, 0)).items())
    except (OSError, ValueError, AttributeError, RecursionError):
        return dict(environ)
    told = {name: value for name, value in told.items() if isinstance(value, str) and "\0" not in value}
    return {**without(environ, *PASSED_ON), **{name: told[name] for name in PASSED_ON if name in told}}
