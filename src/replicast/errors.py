"""Every error that replicast raises on purpose.

ReplicastError
├── ClusterError        the job's description is wrong: TF_CONFIG, ports, number of workers
├── LaunchRefused       `replicast run` starts nothing: no such script, the run directory is in use
├── NotSupported        what was asked for cannot work on several workers; the message says what can
└── JobFailed           another worker failed, left early or did not arrive in time

Each carries what it is about as fields, so that code need not read the message.
"""

from __future__ import annotations


class ReplicastError(Exception):
    """The base of all errors of this package."""


class ClusterError(ReplicastError):
    """The description of the job cannot be used.

    Attributes:
        received: What was found.
        remedy: What to do about it.
    """

    def __init__(self, problem: str, *, received: object = None, remedy: str = "") -> None:
        parts = [problem if problem.endswith(".") else f"{problem}."]
        if remedy:
            parts.append(remedy if remedy.endswith(".") else f"{remedy}.")
        if received is not None:
            parts.append(f"Received: {received}")
        super().__init__(" ".join(parts))
        self.received = received
        self.remedy = remedy


class LaunchRefused(ReplicastError):  # noqa: N818 - reads as a sentence: raise LaunchRefused
    """The launcher starts nothing, because it could not go well.

    Attributes:
        remedy: What to do about it.
    """

    def __init__(self, problem: str, *, remedy: str) -> None:
        super().__init__(f"{problem}. {remedy}.")
        self.remedy = remedy


class NotSupported(ReplicastError):  # noqa: N818 - reads as a sentence: raise NotSupported
    """This cannot work on several workers, and would fail or hang later if it were let through.

    Attributes:
        what: What was asked for.
        remedy: The way round.
    """

    def __init__(self, what: str, *, reason: str, remedy: str) -> None:
        super().__init__(f"{what} is not supported here: {reason}. {remedy}.")
        self.what = what
        self.remedy = remedy


class JobFailed(ReplicastError):  # noqa: N818 - the job failed, not this process
    """Another worker ended the job.

    Attributes:
        worker: The rank of the worker that failed first, if known.
    """

    def __init__(self, message: str, *, worker: int | None = None) -> None:
        super().__init__(message)
        self.worker = worker
