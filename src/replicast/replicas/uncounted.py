"""Steps trained by a `fit` without our callback, which no boundary has counted."""

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
    """Detects such a `fit` and counts its steps afterwards. For the training thread.

    The count comes from the optimizer, so that later updates are recorded at their true step.
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
        """Called when a `fit` of this model begins without our callback."""
        if self._since is None:
            self._since = self._iterations()
        self._run_files.waiting_for = WITHOUT_CALLBACK

    def count(self, known: int = 0) -> None:
        """Called between steps: counts the steps trained meanwhile as one boundary.

        Args:
            known: The number of steps that the caller counts itself.
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
    """Whether the `callbacks` argument of `fit` (a list, a `CallbackList`, one, or None) has this kind."""
    each = getattr(callbacks, "callbacks", callbacks)
    return any(isinstance(one, kind) for one in (each if isinstance(each, list | tuple) else [each]))


def warn_of_missing_callback(rank: int) -> None:
    """Warns about what does not work in a `fit` without our callback."""
    logger.warning(
        "worker %d: fit was not given replicas.callback(). Updates wait for its end, nothing is saved or "
        "audited, and SIGTERM loses the state. Call fit(..., callbacks=[replicas.callback()])",
        rank,
    )
