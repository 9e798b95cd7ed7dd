"""How long the launchers of a job wait for each other."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimeouts:
    """The time limits between launchers.

    Attributes:
        join_secs: How long to wait for a host that is not there, at the start and after a failure.
        beat_secs: How often each side sends its state.
        silent_secs: After this time without a message a host is lost. Longer than the time after which
            TensorFlow's workers give each other up, so that those who know more can say so first.
        reconnect_secs: How long a launcher whose connection was closed may take to connect again. Its process
            has ended if it does not.
        redial_secs: After this time without a message a launcher connects again: after a pause of the
            network, TCP itself may take as long as the pause once more.
        leave_secs: How long the first launcher waits until all others know that the job is over, and how long
            a host may be silent when the job is being stopped.
        tell_after_secs: After this time a launcher says for whom it waits.
        tell_again_secs: How often it does so again.
    """

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
