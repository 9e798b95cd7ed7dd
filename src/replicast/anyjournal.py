"""What a journal does, with files or without; and the one without, in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod

from replicast.errors import FileDamaged
from replicast.records import Receipt, Record, StagedPayload
from replicast.trial import TrialOutcome
from replicast.update import Update


class AnyJournal(ABC):
    """What a journal does, with files or without. Only the coordinator writes.

    In a run directory that another group has taken over, each method that writes raises `JobFailed` when it
    has written: what it wrote may count or not, and must not be acted on.
    """

    @abstractmethod
    def stage(self, update: Update) -> StagedPayload:
        """Keeps the payload safe, before its place in the order is known.

        Raises:
            UpdateRefused: It cannot be written.
        """

    @abstractmethod
    def commit(self, staged: StagedPayload, record: Record) -> None:
        """Gives a staged update its place in the order. When this returns, it is committed and durable.

        Raises:
            UpdateRefused: It is not committed, and its payload is gone.
            FileDamaged: It cannot be known whether it is committed.
        """

    @abstractmethod
    def discard(self, staged: StagedPayload) -> None:
        """Forgets a staged update. Nothing happens when it is gone already."""

    @abstractmethod
    def write_receipt(self, receipt: Receipt) -> None:
        """Writes down how an update ended.

        Raises:
            OSError: It cannot be written.
        """

    @abstractmethod
    def move(self, sequence: int, step: int) -> None:
        """Writes down, before it happens, that a committed update is applied at an earlier step.

        Raises:
            OSError: It cannot be written.
        """

    @abstractmethod
    def moves(self) -> dict[int, int]:
        """The earlier steps of updates that were moved, by sequence number.

        Raises:
            FileDamaged: One is not what was written.
        """

    @abstractmethod
    def withdraw(self, sequence: int) -> None:
        """Writes down, before it is called off, that a committed update is never applied.

        Raises:
            OSError: It cannot be written.
        """

    @abstractmethod
    def withdrawn(self) -> frozenset[int]:
        """The sequence numbers of committed updates that were withdrawn.

        Raises:
            FileDamaged: One is not what was written.
        """

    @abstractmethod
    def write_outcome(self, outcome: TrialOutcome) -> None:
        """Writes down how a trial ended, before anybody acts on it.

        Raises:
            OSError: It cannot be written.
        """

    @abstractmethod
    def outcomes(self) -> dict[int, TrialOutcome]:
        """How the trials ended that are decided, by sequence number.

        Raises:
            FileDamaged: One is not what was written.
        """

    @abstractmethod
    def records(self) -> list[Record]:
        """All committed updates in their order.

        Raises:
            FileDamaged: A file is missing or not what was written.
        """

    @abstractmethod
    def load(self, sequence: int) -> Update:
        """A committed update.

        Raises:
            FileDamaged: Its file is missing or not what was written.
        """

    @abstractmethod
    def receipts(self) -> dict[int, Receipt]:
        """The receipts that were written, by sequence number.

        Raises:
            FileDamaged: One is not what was written.
        """

    @abstractmethod
    def clean(self) -> None:
        """Removes what a coordinator that died left behind. Only before anything is staged."""


KEPT_BYTES = 1 << 26
"""So much of the values of updates a journal in memory keeps."""


class MemoryJournal(AnyJournal):
    """A journal without files: for who wants no durability, and for tests.

    Of the values, only the last that are not too large together are kept.
    """

    def __init__(self) -> None:
        self._moves: dict[int, int] = {}
        self._withdrawn: set[int] = set()
        self._staged: dict[str, Update] = {}
        self._committed: list[tuple[Record, Update | None]] = []
        self._first_kept = 0
        self._kept_bytes = 0
        self._receipts: dict[int, Receipt] = {}
        self._outcomes: dict[int, TrialOutcome] = {}

    def stage(self, update: Update) -> StagedPayload:
        """As in `AnyJournal`; nothing is hashed, since nothing is written."""
        self._staged[update.id] = update
        return StagedPayload(update.id, None, "", update.nbytes)

    def commit(self, staged: StagedPayload, record: Record) -> None:
        """As in `AnyJournal`."""
        if staged.id != record.id:
            raise ValueError(f"The record belongs to another payload. Received: {record.id} for {staged.id}")
        if record.sequence != len(self._committed) + 1:
            raise ValueError(f"The next place is {len(self._committed) + 1}. Received: {record.sequence}")
        update = self._staged.pop(staged.id)
        self._committed.append((record, update))
        self._kept_bytes += update.nbytes
        while self._kept_bytes > KEPT_BYTES:
            record, oldest = self._committed[self._first_kept]
            self._committed[self._first_kept] = record, None
            self._kept_bytes -= 0 if oldest is None else oldest.nbytes
            self._first_kept += 1

    def discard(self, staged: StagedPayload) -> None:
        """As in `AnyJournal`."""
        self._staged.pop(staged.id, None)

    def move(self, sequence: int, step: int) -> None:
        """As in `AnyJournal`."""
        self._moves[sequence] = step

    def moves(self) -> dict[int, int]:
        """As in `AnyJournal`."""
        return dict(self._moves)

    def withdraw(self, sequence: int) -> None:
        """As in `AnyJournal`."""
        self._withdrawn.add(sequence)

    def withdrawn(self) -> frozenset[int]:
        """As in `AnyJournal`."""
        return frozenset(self._withdrawn)

    def write_receipt(self, receipt: Receipt) -> None:
        """As in `AnyJournal`."""
        self._receipts[receipt.sequence] = receipt

    def write_outcome(self, outcome: TrialOutcome) -> None:
        """As in `AnyJournal`."""
        self._outcomes[outcome.sequence] = outcome

    def outcomes(self) -> dict[int, TrialOutcome]:
        """As in `AnyJournal`."""
        return dict(self._outcomes)

    def records(self) -> list[Record]:
        """As in `AnyJournal`."""
        return [record for record, _ in self._committed]

    def load(self, sequence: int) -> Update:
        """As in `AnyJournal`."""
        if not 1 <= sequence <= len(self._committed):
            raise FileDamaged(f"update {sequence}", "it is not in the journal")
        update = self._committed[sequence - 1][1]
        if update is None:
            raise FileDamaged(f"update {sequence}", "its values are kept no longer: the journal is in memory")
        return update

    def receipts(self) -> dict[int, Receipt]:
        """As in `AnyJournal`."""
        return dict(self._receipts)

    def clean(self) -> None:
        """As in `AnyJournal`."""
        self._staged.clear()
