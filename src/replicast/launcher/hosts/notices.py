"""What is said of launchers that do not belong together: a few lines, however often one comes. Pure."""

from __future__ import annotations

import collections

from replicast.errors import printable
from replicast.launcher.hosts.events import Tell

EVERY_SECS = 300.0
"""The same line is not said again within this time."""
MAX_LINES = 6
"""How many lines are said within this time."""
MAX_CHARACTERS = 1000
"""How much of a line is said."""


class Notices:
    """Decides which lines are said: each at most once in `EVERY_SECS`, and `MAX_LINES` of them.

    Use one for strangers and another one for launchers that know the secret: strangers must not hide a line
    that the user needs.
    """

    def __init__(self) -> None:
        self._said: collections.deque[tuple[float, str]] = collections.deque()

    def say(self, text: str, now: float) -> list[Tell]:
        """The line to show, if any; without what would move the cursor of a terminal."""
        if len(text) > MAX_CHARACTERS:
            text = f"{text[:MAX_CHARACTERS]}…"
        while self._said and now - self._said[0][0] >= EVERY_SECS:
            self._said.popleft()
        if len(self._said) >= MAX_LINES or any(text == said for _, said in self._said):
            return []
        self._said.append((now, text))
        shown = printable(text)
        if len(self._said) == MAX_LINES:
            shown = f"{shown} (more lines like this are not shown for {EVERY_SECS / 60:.0f} min)"
        return [Tell(shown)]
