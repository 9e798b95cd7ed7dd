"""Who may write into a run directory: the group of workers that was started last.

A worker of an earlier group may have been stopped, or live on another host, and go on when it is thought
dead. It finds that another has taken the run, and writes nothing more.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from replicast.errors import JobFailed
from replicast.files import json_bytes, make_durably, read_json, sync_directory, write_durably


class Fence:
    """One group's claim on a run directory. Made by its worker 0, before it writes anything.

    Args:
        run_dir: The run directory.
        attempt: Which life of the job this is.
    """

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self._path = Path(run_dir) / "fence.json"
        self._token = uuid.uuid4().hex
        make_durably(self._path.parent)
        with contextlib.suppress(PermissionError):  # Who may not open the parent has not made the run in it.
            # It was there, perhaps: a launcher or a user had made it, and waited for no disk.
            sync_directory(self._path.parent.resolve().parent)
        claim = {"token": self._token, "attempt": attempt, "pid": os.getpid()}
        write_durably(self._path, [json_bytes(claim)])

    def check(self) -> None:
        """Raises when another group has taken the run since. To be called before anything becomes visible.

        Raises:
            JobFailed: It has.
        """
        claim = read_json(self._path)
        if claim.get("token") != self._token:
            raise JobFailed(
                f"Another group of workers (attempt {claim.get('attempt')}, process {claim.get('pid')}) has "
                f"taken over {self._path.parent}; this one was thought dead, and writes nothing more"
            )
