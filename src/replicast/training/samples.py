"""Checks that all workers have the same data, by comparing samples at the first pass.

Each worker takes its own rows of every batch, so all must have the same batches; otherwise training would
silently use wrong examples. What is compared:

    arrays                      the number of rows, and 64 rows spread over them, including the first and last
    generator                   its first batch
    tf.data, PyDataset, others  the number of batches, if an epoch uses all of them, and the first batch used

Lengths, arrays and generators are known before the pass, so their samples are exchanged when the workers meet
to open it. The first batch of a pipeline is reported from the pipeline's own thread when it is read.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf
import xxhash

from replicast.errors import JobFailed, NotSupported

logger = logging.getLogger("replicast")

PARTS = ("x", "y", "sample_weight")
ROWS_OF_ARRAYS = 64
FIRST_BATCH_SECS = 60.0  # how long worker 0 waits for another worker's; the step would wait for it anyway
WHAT = {
    "fit": "training data",
    "validation": "validation data",
    "evaluate": "data for evaluate",
    "predict": "data for predict",
}


class Sample(msgspec.Struct, frozen=True):
    """A description of one worker's data for the other workers."""

    what: str
    length: int | None = None
    unit: str = "batches"
    order: str = ""
    digests: dict[str, str] = {}
    divided: bool = False
    labelled: bool = False


class DataComparison:
    """Compares the workers' data of one `fit`, `evaluate` or `predict`."""

    def __init__(
        self,
        own: Sample,
        strategy: Any,
        meet: Callable[[str], dict[int, str]],
        warn: Callable[[str], None],
    ) -> None:
        self._own = own
        self._strategy = strategy
        self._meet = meet
        self._warn = warn
        self._key = f"replicast/{strategy.next_name('first-batch')}"
        self._compared = False
        self.first_rows: int | None = None  # the rows of the first batch, once a pipeline has read it

    def open_pass(self) -> None:
        """Waits for the other workers before a pass; before the first one, compares the samples."""
        if self._compared:
            self._meet("")
            return
        self._compared = True
        heard = self._meet(msgspec.json.encode(self._own).decode())
        samples = {worker: _decoded(text) for worker, text in sorted(heard.items()) if text}
        refuse_other_lengths(samples)
        self._compare(samples, "a sample of its rows" if self._own.unit == "rows" else "its first batch")

    def report_first_batch(self, parts: Mapping[str, Sequence[np.ndarray[Any, Any]]]) -> None:
        """Compares the first batch of a pipeline. Worker 0 waits for the others, at most 60 s."""
        self.first_rows = next((len(a) for part in parts.values() for a in part if a.ndim), None)
        rank, coordination = self._strategy.rank, self._strategy.coordination
        try:
            sample = _sample(self._own.what, parts, self._own.order)
            coordination.put(f"{self._key}/{rank}", msgspec.json.encode(sample).decode())
            if rank == 0:
                self._compare({0: sample, **self._reported()}, "its first batch")
        except JobFailed:
            logger.debug("the first batch was not compared: the job has failed", exc_info=True)
        except Exception:  # a value that cannot be digested: training continues without the comparison
            logger.warning("Could not compare the first batch with the other workers'", exc_info=True)

    def _reported(self) -> dict[int, Sample]:
        ends = time.monotonic() + FIRST_BATCH_SECS
        coordination, found = self._strategy.coordination, {}
        for worker in range(1, self._strategy.size):
            text = None
            while text is None and time.monotonic() < ends:
                self._strategy.lifetime.check()
                text = coordination.get(f"{self._key}/{worker}", 1.0)
            if text is not None:
                found[worker] = _decoded(text)
                continue
            logger.warning(
                "Worker %d did not read its first batch of %s within %.0f s: it is not compared",
                worker,
                self._own.what,
                FIRST_BATCH_SECS,
            )
        for worker in range(self._strategy.size):
            coordination.delete(f"{self._key}/{worker}")
        return found

    def _compare(self, samples: Mapping[int, Sample], compared: str) -> None:
        found = differing_parts(samples)
        if self._strategy.rank != 0 or not found:
            return
        workers = ", ".join(str(worker) for worker in found)
        parts = ", ".join(dict.fromkeys(part for differing in found.values() for part in differing))
        self._warn(
            f"The workers have different {self._own.what} (worker 0 and worker {workers} differ in {parts} "
            f"of {compared}). Each worker takes its own rows of its own batch, so some examples may be used "
            "twice in an epoch and others not at all. Give every worker all of the data, in the same order: "
            "call keras.utils.set_random_seed(n) first or pass a seed to dataset.shuffle(), and do not "
            "divide the data by rank. To divide a tf.data.Dataset yourself, set its auto_shard_policy to OFF."
        )


def _decoded(text: str) -> Sample:
    return msgspec.json.decode(text, type=Sample)


def differing_parts(samples: Mapping[int, Sample]) -> dict[int, list[str]]:
    """The parts of each worker's sample that differ from worker 0's, if that means different examples.

    If only the inputs differ and the targets identify examples, these are the same examples with random
    augmentation. Each worker takes its own rows, so that is harmless.
    """
    found: dict[int, list[str]] = {}
    first = samples.get(0)
    for worker, sample in samples.items():
        if first is None or (sample.what, sample.order) != (first.what, first.order):
            continue
        names = list(dict.fromkeys([*first.digests, *sample.digests]))
        parts = [name for name in names if first.digests.get(name) != sample.digests.get(name)]
        if parts and not (parts == ["x"] and first.labelled):
            found[worker] = parts
    return found


def refuse_other_lengths(samples: Mapping[int, Sample]) -> None:
    known = {worker: sample for worker, sample in samples.items() if sample.length is not None}
    if len({(sample.length, sample.unit, sample.what) for sample in known.values()}) < 2:
        return
    first = next(iter(known.values()))
    lengths = ", ".join(f"worker {worker} has {s.length} {s.unit}" for worker, s in known.items())
    what = f"{first.what[0].upper()}{first.what[1:]} of different lengths ({lengths})"
    if first.divided:
        raise NotSupported(
            what,
            reason="every step uses one batch of each worker",
            remedy="Give every worker the same number of batches, for example with dataset.take(n)",
        )
    raise NotSupported(
        what,
        reason="each worker takes its own rows of every batch, so all need the same data",
        remedy="Give every worker all of the data, and do not divide it by rank",
    )


def sample_of_arrays(what: str, arrays: Any) -> Sample:
    """A sample of arrays in memory: their length, and some rows."""
    rows = int(tf.nest.flatten(arrays)[0].shape[0])
    some = np.unique(np.linspace(0, max(rows - 1, 0), ROWS_OF_ARRAYS).astype(np.int64))[:rows]

    def rows_of(array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(tf.gather(array, some)) if isinstance(array, tf.Tensor) else np.asarray(array[some])

    digests = {
        name: digest_of_batch([rows_of(leaf) for leaf in tf.nest.flatten(part)])
        for name, part in _parts_of(arrays).items()
    }
    return Sample(what, length=rows, unit="rows", digests=digests)


def sample_of_batch(what: str, batch: Any) -> Sample:
    """A sample of a generator, whose first batch is known before it is used."""
    parts = {
        name: [np.asarray(leaf) for leaf in tf.nest.flatten(part, expand_composites=True)]
        for name, part in _parts_of(batch).items()
    }
    return _sample(what, parts)


def order_of_batches() -> str:
    """Identifies the order that Keras will draw for the batches of a PyDataset, with Python's generator."""
    return xxhash.xxh3_64_hexdigest(repr(random.getstate()).encode())


def sampled(
    batches: tf.data.Dataset, report: Callable[[dict[str, list[np.ndarray[Any, Any]]]], None]
) -> tf.data.Dataset:
    """The same batches; also reports the first one of a pass, from the pipeline's own thread."""

    def tensors_of(part: Any) -> list[tf.Tensor]:
        leaves = tf.nest.flatten(part, expand_composites=True)
        return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and leaf.dtype != tf.variant]

    def look(number: tf.Tensor, batch: Any) -> Any:
        leaves = [(name, leaf) for name, part in _parts_of(batch).items() for leaf in tensors_of(part)]

        def report_leaves(*values: np.ndarray[Any, Any]) -> np.int64:
            parts: dict[str, list[np.ndarray[Any, Any]]] = {}
            for (name, _), value in zip(leaves, values, strict=True):
                parts.setdefault(name, []).append(value)
            report(parts)
            return np.int64(0)

        tf.cond(
            tf.equal(number, 0),
            lambda: tf.numpy_function(report_leaves, [leaf for _, leaf in leaves], tf.int64),
            lambda: tf.constant(0, tf.int64),
        )
        return batch

    return batches.enumerate().map(look)


def digest_of_batch(components: Sequence[np.ndarray[Any, Any]]) -> str:
    """A digest of the bytes, types and shapes of some arrays."""
    digest = xxhash.xxh3_64()
    for component in components:
        if component.dtype == object:  # strings
            digest.update(repr(component.tolist()).encode())
        elif component.size:
            digest.update(np.ascontiguousarray(component).view(np.uint8).data)
        digest.update(f"{component.dtype} {component.shape}".encode())
    return digest.hexdigest()


def _sample(what: str, parts: Mapping[str, Sequence[np.ndarray[Any, Any]]], order: str = "") -> Sample:
    # Whether the targets identify the examples.
    labelled = any(target.ndim > 0 and bool(np.any(target != target[:1])) for target in parts.get("y", ()))
    digests = {name: digest_of_batch(part) for name, part in parts.items()}
    return Sample(what, order=order, digests=digests, labelled=labelled)


def _parts_of(batch: Any) -> dict[str, Any]:
    """The inputs, targets and weights of a batch, by name."""
    return dict(zip(PARTS, batch, strict=False)) if isinstance(batch, tuple) else {"x": batch}
