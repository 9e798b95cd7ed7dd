"""What the launcher's main thread learns from the thread that serves the other hosts."""

from __future__ import annotations

from dataclasses import dataclass

from replicast.supervisor.hosts.member import Command


@dataclass(frozen=True, slots=True)
class Broken:
    """The thread has ended by an error."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Tell:
    """A line for the screen."""

    text: str


@dataclass(frozen=True, slots=True)
class NotWelcome:
    """The first launcher has refused this one."""

    why: str


Event = Command | Broken | Tell | NotWelcome
