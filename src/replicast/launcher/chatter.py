"""Recognizes info lines of TensorFlow's C++ code in a worker's output. Pure functions.

The screen omits them; a worker's log has every line. Warnings and errors are always shown, except for a few
that every healthy job prints at its start, and the echoes of a transfer that replicast itself has aborted
because another worker failed: the worker says that in a line of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_LOGGED = re.compile(
    r"(?:(?P<absl>[IWEF])\d{4} \d\d:\d\d:\d+\.\d+ +\d+|"
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: (?P<tensorflow>[IWEF]))"
    r" \S+\.(?:cc|cpp|c|h|inc):\d+\] "  # not .py: those lines come from the script
)
_AT_EVERY_START = re.compile(r"Unable to register cu\w+ factory|computation placer already registered")
_ABORTED_BY_US = re.compile(
    r"(BaseCollectiveExecutor::StartAbort|Aborting Ring\w+ with|Local rendezvous is aborting with status:) "
    r"ABORTED: (Collective ops is aborted by: )?worker \d+ "
)
_WITHOUT_LEVEL = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR|"
    r"To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler flags\.|"
    r"/job:\w+/replica:\d+/task:\d+|"  # a worker that has not connected yet
    r"The error could be from a previous operation\. Restart your program to reset\.( \[type\..*\])?|"
    r"\s*\[\[\{\{node \S+\}\}\]\] \[type\.googleapis.*\]"
)


def is_chatter(line: str) -> bool:
    """Whether a line is an info message of TensorFlow's C++ code."""
    logged = _LOGGED.match(line)
    if logged is None:
        return _WITHOUT_LEVEL.fullmatch(line) is not None
    level = logged["absl"] or logged["tensorflow"]
    ours = _AT_EVERY_START.match(line, logged.end()) or _ABORTED_BY_US.match(line, logged.end())
    return level == "I" or (level != "F" and ours is not None)


def wants_chatter(environ: Mapping[str, str]) -> bool:
    """Whether the user has set TensorFlow's log level: then everything is shown."""
    return _LOG_LEVEL in environ
