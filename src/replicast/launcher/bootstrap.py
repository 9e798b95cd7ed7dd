"""Bootstraps a worker: asks the kernel to kill it when its launcher dies, then execs the user's program.

Run as a script by its path; the arguments are the launcher's process id and the program with its arguments.
It is a separate program, because code between fork and exec in the launcher would have to be thread-safe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":  # Makes the kernel kill this process when its launcher dies, also by kill -9.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(sys.argv[1]):  # It died before the call above.
            os._exit(128 + signal.SIGKILL)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
