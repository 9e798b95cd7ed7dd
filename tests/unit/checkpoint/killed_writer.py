"""Writes a checkpoint again and again, each time killed by -9 one file operation later.

Arguments: a directory with a run named `before`; each attempt is made on a copy of it, named by its number.
Prints one JSON line for each: the operation it was killed at, or null when it came to its end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from replicast.storage.checkpoints import CheckpointStore, patch
from replicast.update.update import Update
from tests.unit.checkpoint.operations import Operations
from tests.unit.checkpoint.samples import draft_of, state_of


def write(what: str, run: Path) -> None:
    if what == "patch":
        patch(run / "checkpoints" / "00000005", Update(id="u").scale("half", 2.0), run / "patched")
    elif what == "remove":
        CheckpointStore(run).remove(5)
    else:
        arrays = state_of(seed=1)
        CheckpointStore(run).write(draft_of(arrays, 5 if what == "replace" else 6), arrays)


def attempt(what: str, run: Path, number: int) -> int:
    """The child's end, as `os.waitpid` gives it."""
    child = os.fork()
    if child == 0:
        note = run.with_suffix(".note")
        operations = Operations(number, lambda: (note.write_text(str(operations.fired)), kill())[1])
        operations.install(setattr)
        write(what, run)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    for number in range(1, 1000):
        run = folder / str(number)
        shutil.copytree(folder / "before", run)
        status = attempt(what, run, number)
        note = run.with_suffix(".note")
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print(json.dumps({"number": number, "killed_at": note.read_text() if killed else None}), flush=True)
        if not killed:
            sys.exit(status)


if __name__ == "__main__":
    main()
