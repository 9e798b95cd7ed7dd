"""What the launcher's main thread learns from the thread that serves the other hosts."""

from __future__ import annotations

from dataclasses import dataclass

from replicast.launcher.hosts.member import Command
from replicast.launcher.hosts.messages import Told


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
    """Another launcher has refused this one, which cannot be part of the job."""

    why: str
    by: str = "The first launcher"


Event = Command | Broken | Tell | NotWelcome | Told
