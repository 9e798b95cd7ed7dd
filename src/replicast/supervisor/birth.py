"""The first breath of a worker: asks the kernel to end it with its launcher, then becomes the user's program.

Run as a script by its path, with the launcher's process id and the program to become as arguments. A separate
program, because code between fork and exec in the launcher would have to be safe among threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(launcher: int) -> None:
    """Has this process killed when its launcher ends in any way, kill -9 included. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # It ended before the kernel knew our wish.
        os._exit(128 + signal.SIGKILL)


def main() -> None:
    """Becomes the program that the arguments name."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
