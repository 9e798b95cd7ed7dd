"""Worker 0's writes: journal entries in one lane, and checkpoints, which take longer, in another."""

from __future__ import annotations

import logging
from collections.abc import Callable

from replicast import faults
from replicast.core.entries import Committed, Decided, Entry, Payload, Receipt, Saved
from replicast.core.events import WriteOutcome
from replicast.core.history import History
from replicast.errors import FileDamaged, JobFailed
from replicast.runtime.parcels import Parcels
from replicast.runtime.threads import Threads
from replicast.storage.journal import Journal, NotWritten, PerhapsWritten
from replicast.update.update import Update

logger = logging.getLogger("replicast")


class Writer:
    """Writes the coordinator's decisions.

    Args:
        journal: Stores the entries.
        checkpoints: The `Saved` entries of the checkpoints that exist already.
        write_checkpoint: Writes the state of a `Saved` and returns the outcome.
    """

    def __init__(
        self,
        journal: Journal,
        checkpoints: list[Saved] | None = None,
        write_checkpoint: Callable[[Saved], WriteOutcome] = lambda saved: WriteOutcome.DURABLE,
    ) -> None:
        self.journal = journal
        self.write_checkpoint = write_checkpoint
        self._checkpoints = checkpoints or []

    def start(self, threads: Threads) -> None:
        """Starts the lanes."""
        self._entries = threads.lane("journal")
        self._saver = threads.lane("saver")

    def history(self) -> History:
        """The history according to the journal and the checkpoints."""
        history = self.journal.history()
        for saved in self._checkpoints:
            history.add(saved)
        return history

    def write(self, entry: Entry, parcels: Parcels, then: Callable[[WriteOutcome, str], None]) -> None:
        """Writes an entry, then calls `then` with the outcome and any reason for failure. Returns at once."""
        if isinstance(entry, Saved):
            self._saver.do(lambda: then(self.write_checkpoint(entry), "The checkpoint cannot be written"))
            return
        update = parcels.prepared(entry.id, entry.digest) if isinstance(entry, Payload) else None
        self._entries.do(lambda: then(*self._written(entry, update)))

    def remove_payloads(self, held: frozenset[int], pending: frozenset[tuple[str, str]] | None) -> None:
        """Removes the payloads that no kept checkpoint needs (`Journal.remove_payloads`). Returns at once."""
        self._entries.do(lambda: self.journal.remove_payloads(held, pending))

    def _written(self, entry: Entry, update: Update | None) -> tuple[WriteOutcome, str]:
        if isinstance(entry, Receipt):
            faults.point("verify")
        elif isinstance(entry, Decided):
            faults.point("decide")
        try:
            self.journal.write(entry, update)
        except NotWritten as error:
            logger.warning("%s", error)
            return WriteOutcome.FAILED, str(error)
        except (PerhapsWritten, FileDamaged) as error:
            logger.error("%s", error)
            return WriteOutcome.UNKNOWN, str(error)
        except JobFailed as error:
            logger.error("%s", error)
            return WriteOutcome.FENCED, str(error)
        if isinstance(entry, Committed):
            faults.point("commit")
        return WriteOutcome.DURABLE, ""
