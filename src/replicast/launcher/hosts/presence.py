"""Whether the other end of a connection is still there. Pure: the caller has the clock."""

from __future__ import annotations

from replicast.launcher.hosts.timeouts import HostTimeouts


class Presence:
    """When the other side was last heard of, and whether it counts as lost."""

    def __init__(self, timeouts: HostTimeouts) -> None:
        self._timeouts = timeouts
        self._closed_at: float | None = None
        self.connected = False
        self.heard_at: float | None = None

    def hear(self, now: float) -> None:
        """A message came."""
        self.connected, self.heard_at, self._closed_at = True, now, None

    def close(self, now: float) -> None:
        """The connection was closed."""
        self.connected = False
        if self._closed_at is None:
            self._closed_at = now

    def why_lost(self, now: float, *, is_stopping: bool = False) -> str:
        """What happened if the other side counts as lost; empty if it does not."""
        if self.heard_at is None:
            return "it has not come"
        at_most_secs = self._timeouts.leave_secs if is_stopping else self._timeouts.silent_secs
        silent_secs = now - self.heard_at
        if silent_secs >= at_most_secs:
            return f"nothing was heard of it for {silent_secs:.0f} s"
        if self._closed_at is not None and now - self._closed_at >= self._timeouts.reconnect_secs:
            return "its connection was closed, as when its process or machine ends"
        return ""
