"""Who an update is by when its author does not say so."""

from __future__ import annotations

import getpass
import os
import socket


def this_user() -> str:
    """Who runs this, as user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # A container's user without a name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
