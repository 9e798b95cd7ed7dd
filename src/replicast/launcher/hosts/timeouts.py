"""How long the launchers of a job wait for each other."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimeouts:
    """The time limits between launchers."""

    join_secs: float = 600.0
    beat_secs: float = 1.0
    silent_secs: float = 30.0
    reconnect_secs: float = 2.0
    redial_secs: float = 5.0
    leave_secs: float = 5.0
    tell_after_secs: float = 10.0
    tell_again_secs: float = 30.0


def host_timeouts(*, join_secs: float, heartbeat_secs: float) -> HostTimeouts:
    """The time limits between launchers whose workers give each other up after `heartbeat_secs`."""
    usual = HostTimeouts(join_secs=join_secs)
    return replace(usual, silent_secs=max(usual.silent_secs, 2 * heartbeat_secs))
