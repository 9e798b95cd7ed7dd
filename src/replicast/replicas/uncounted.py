"""Steps that a `fit` without our callback has trained: no boundary has counted them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import keras

from replicast.replicas.run_files import RunFiles
from replicast.runtime import Session
from replicast.storage.runfiles import WITHOUT_CALLBACK

logger = logging.getLogger("replicast")


class Uncounted:
    """Notices such a `fit`, and counts its steps afterwards. For the training thread.

    The number comes from the optimizer, so that whatever is applied later is said to be at a true step.
    """

    def __init__(
        self,
        session: Session,
        run_files: RunFiles,
        optimizers: Iterable[keras.optimizers.Optimizer],
    ) -> None:
        self._session = session
        self._run_files = run_files
        self._optimizers = tuple(optimizers)
        self._since: int | None = None

    def fit_begins(self) -> None:
        """A `fit` of this model begins that was not given our callback."""
        if self._since is None:
            self._since = self._iterations()
        self._run_files.waiting_for = WITHOUT_CALLBACK

    def count(self, known: int = 0) -> None:
        """The training thread is between steps again: what was trained meanwhile is one boundary.

        Args:
            known: So many steps are counted by the caller.
        """
        since, self._since = self._since, None
        if since is None:
            return
        self._run_files.waiting_for = ""
        steps = self._iterations() - since - known
        if steps > 0:
            self._session.arrive(self._session.step + steps)

    def _iterations(self) -> int:
        return max((int(each.iterations.numpy()) for each in self._optimizers), default=0)


def holds_callback(callbacks: Any, kind: type[keras.callbacks.Callback]) -> bool:
    """Whether what was given to `fit` has a callback of this kind: a list, a `CallbackList`, one, or None."""
    each = getattr(callbacks, "callbacks", callbacks)
    return any(isinstance(one, kind) for one in (each if isinstance(each, list | tuple) else [each]))


def warn_of_missing_callback(rank: int) -> None:
    """Says what does not happen in a `fit` without our callback."""
    logger.warning(
        "worker %d: fit was not given replicas.callback(). Updates wait for its end, nothing is saved or "
        "audited, and SIGTERM loses the state. Call fit(..., callbacks=[replicas.callback()])",
        rank,
    )
