"""Updates, trials and restarts for the tools that people have: TensorBoard and OpenTelemetry.

Worker 0 tells them once the receipt of an update is durable, in a lane of its own. The training thread only
says where TensorBoard writes, when a `fit` begins. What fails here is logged once and changes nothing else.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from replicast.core.records import Stage
from replicast.storage.journal import Journal, Updates, UpdateView

logger = logging.getLogger("replicast")

_MOST_CHANGES = 20  # so many variables of an update have a curve of their own


class Telemetry:
    """Worker 0. Call the methods in its lane: they may block as long as a disk or a collector does."""

    def __init__(self, journal: Journal, attempt: int) -> None:
        self._journal = journal
        self._attempt = attempt
        self._updates: Updates | None = None
        self._boards: dict[str, Any] = {}
        self._warned = False

    def open_board(self, log_dir: str, step: int) -> None:
        """Writes below a directory in which Keras' TensorBoard callback writes, from this step on."""
        with self._one_warning():
            if log_dir in self._boards:
                return
            import tensorflow as tf  # a user's test has workers without it

            place = tf.io.gfile.join(log_dir, "replicast")
            board = self._boards[log_dir] = tf.summary.create_file_writer(place)
            with board.as_default(step):
                tf.summary.scalar("replicast/attempt", self._attempt)
                if self._attempt:
                    text = f"Attempt {self._attempt} begins at step {step}"
                    tf.summary.text("replicast/restarts", text)
                board.flush()

    def tell(self, sequence: int) -> None:
        """Tells of an update that has a receipt."""
        with self._one_warning():
            tools: list[Callable[[UpdateView], None]] = []
            if self._boards:
                tools.append(self._write)
            with contextlib.suppress(ImportError):
                import opentelemetry.trace

                tools.append(lambda view: _trace(opentelemetry.trace, view))
            if tools:
                self._updates = self._updates or Updates(self._journal)
                self._updates.read_on()
                view = self._updates.committed(sequence)
                for tool in tools:
                    tool(view)

    @contextlib.contextmanager
    def _one_warning(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            if not self._warned:
                self._warned = True
                logger.exception("TensorBoard or OpenTelemetry cannot be told of updates")

    def _write(self, view: UpdateView) -> None:
        import tensorflow as tf

        for board in self._boards.values():
            with board.as_default(view.step):
                tf.summary.text("replicast/updates", _text(view))
                for name, (begun, ended) in view.timings.items() if len(view.receipts) == 1 else ():
                    tf.summary.scalar(f"replicast/{name}_secs", ended - begun)
                for effect in view.effects[:_MOST_CHANGES]:
                    if effect.relative is not None:
                        tf.summary.scalar(f"replicast/relative_change/{effect.variable}", effect.relative)
                if (trial := view.outcome) is not None:
                    text = f"Update {view.sequence} is {trial.outcome}: {trial.reason}"
                    tf.summary.text("replicast/trials", text, trial.step)
                    for when, value in (("before", trial.before), ("during", trial.during)):
                        if value is not None:
                            tf.summary.scalar(f"replicast/trial_{trial.metric}_{when}", value, trial.step)
                board.flush()


def _text(view: UpdateView) -> str:
    """What an update was, in Markdown."""
    why = " · ".join(filter(None, (view.author, view.note)))
    changes = "".join(f"\n- {text}" for text in view.texts)
    replayed = ", again after a restart" if len(view.receipts) > 1 else ""
    return f"**Update {view.sequence}: {view.stage}** at step {view.step}{replayed}\n\n{why}\n{changes}"


def _trace(api: Any, view: UpdateView) -> None:
    """One span, from the proposal to the receipt, with one inside for each part of it."""
    receipt, outcome = view.receipt, view.outcome
    if receipt is None or len(view.receipts) > 1:  # an earlier attempt has told of it
        return
    tracer = api.get_tracer("replicast")
    begins, ends = zip(*view.timings.values(), strict=True)
    about = {
        "id": view.id,
        "sequence": view.sequence,
        "step": view.step,
        "attempt": view.attempt,
        "stage": str(view.stage),
        "author": view.author,
        "note": view.note,
        "changes": view.texts,
        "workers": view.workers,
        "digest": receipt.digests[0],
        "trial": None if outcome is None else outcome.reason,
    }
    attributes = {f"replicast.{name}": value for name, value in about.items() if value is not None}
    # Not within a span of whatever runs in this thread: an update is a trace of its own.
    root = api.set_span_in_context(api.INVALID_SPAN)
    span = tracer.start_span("replicast.update", root, attributes=attributes, start_time=_ns(min(begins)))
    inside = api.set_span_in_context(span)
    for name, (begun, ended) in view.timings.items():
        tracer.start_span(f"replicast.{name}", inside, start_time=_ns(begun)).end(_ns(ended))
    if view.stage is Stage.FAILED:
        span.set_status(api.StatusCode.ERROR, "the workers' digests differ")
    span.end(_ns(max(ends)))


def _ns(secs: float) -> int:
    return int(secs * 1e9)
