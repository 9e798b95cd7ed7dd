"""The rows of a batch: which of its arrays have them, how many there are, a placeholder if there are none.

A batch may hold arrays that are not rows: a table, an adjacency matrix, the edges of a graph. Only rows are
divided among the workers; every worker gets the rest whole. What counts as rows follows from the batch alone,
so that all workers decide alike:

- The first dimension of y and sample_weight is the number of rows. All of their arrays must have it, and at
  least one array of x. Without y and sample_weight, all arrays of x must have the same first dimension.
- An array of x has rows if its first dimension is that number. A first dimension that is fixed while the
  number of rows is not (`dataset.batch(8)` does not fix it) is another one, even if they happen to be equal.
  What can only be told from values is told by the first batch, and must hold for every later one.
- Scalars are not rows.

A batch for which this does not work is refused, with its shapes.

A batch with fewer rows than workers leaves some workers without rows. They must still take part in the step's
transfer, but many layers fail on an empty batch (a convolution) or return NaN (a mean). So such a worker
computes one row of zeros, which is ignored: its weight is 0, and what it adds to metrics is discarded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from replicast.errors import NotSupported

PARTS = ("x", "y", "sample_weight")


def named_leaves(structure: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a structure in the order of `tf.nest`, with a name for each: x['table'], x[0]."""
    if isinstance(structure, dict):
        for key in sorted(structure):
            yield from named_leaves(structure[key], f"{name}[{key!r}]")
    elif isinstance(structure, (tuple, list)):
        for place, part in enumerate(structure):
            yield from named_leaves(part, f"{name}[{place}]")
    else:
        yield from ((name, leaf) for leaf in tf.nest.flatten(structure))


def _arrays(batch: Any) -> tuple[list[tuple[int, str, Any]], list[tuple[int, str, Any]]]:
    """The arrays of x, and those of y and sample_weight: with places in the flat batch, and names."""
    as_keras = isinstance(batch, (tuple, list)) and 0 < len(batch) <= len(PARTS)
    found: tuple[list[Any], list[Any]] = ([], [])
    place = 0
    for part, value in zip(PARTS, batch, strict=False) if as_keras else (("x", batch),):
        for name, leaf in named_leaves(value, part):
            shape = getattr(leaf, "shape", None)  # None: an absent part of the batch
            if shape is not None and tf.TensorShape(shape).rank != 0:
                found[part != "x"].append((place, name, leaf))
            place += 1
    return found


def _fixed_length(array: Any) -> int | None:
    shape = tf.TensorShape(array.shape)
    return None if shape.rank is None else shape[0]


def length_of(array: Any) -> tf.Tensor:
    """The first dimension of an array, ragged or sparse tensor."""
    if isinstance(array, tf.RaggedTensor):
        return tf.cast(array.nrows(), tf.int32)
    if isinstance(array, tf.SparseTensor):
        return tf.cast(array.dense_shape[0], tf.int32)
    return tf.shape(array)[0]


class Division:
    """Which arrays of a dataset's batches have rows.

    Args:
        spec: The types of a batch, or a batch.
        first_batch: The first batch, if it is known.

    Raises:
        NotSupported: That cannot be told.
    """

    def __init__(self, spec: Any, first_batch: Any = None) -> None:
        inputs, labels = _arrays(spec)
        self.counted = labels or inputs
        """The arrays whose first dimension is the number of rows."""
        self._arrays = [*inputs, *labels]
        fixed = {place: _fixed_length(array) for place, _, array in self._arrays}
        rows = {fixed[place] for place, _, _ in self.counted} - {None}
        if len(rows) > 1:
            raise self._refusal()
        self.rows = next(iter(rows), None)
        """The number of rows, if it is fixed."""
        self.kinds: dict[int, bool | None] = dict.fromkeys((place for place, _, _ in self.counted), True)
        """By place, whether an array has rows; None if the first batch tells it."""
        if labels:
            unfixed = any(fixed[place] is None for place, _, _ in inputs)
            for place, _, _ in inputs:
                length = fixed[place]
                if length is not None and (self.rows is not None or unfixed):
                    self.kinds[place] = length == self.rows
                else:
                    self.kinds[place] = None
            possible = [place for place, _, _ in inputs if self.kinds[place] is not False]
            if inputs and not possible:
                raise self._refusal()
            if len(possible) == 1:
                self.kinds[possible[0]] = True
        self._inputs = [place for place, _, _ in inputs]
        self._fixed = fixed
        if first_batch is not None:
            self.kinds = Division(first_batch).kinds

    def tell(self, flat: list[Any], told: tf.Tensor) -> tuple[tf.Tensor, dict[int, Any], tf.Tensor]:
        """The number of rows of a batch, whether each of its arrays has rows, and what is told now.

        Args:
            flat: The parts of the batch.
            told: By place, what earlier batches have told: 1 for rows, -1 for something else, 0 if nothing.
        """
        lengths = {place: length_of(flat[place]) for place in self.kinds}
        first = self.counted[0][0]
        rows = lengths[first] if self.rows is None else tf.constant(self.rows)
        has_rows: dict[int, Any] = dict(self.kinds)
        agree = [
            lengths[place] == rows
            for place, kind in self.kinds.items()
            if kind and (place != first if self.rows is None else self._fixed[place] is None)
        ]
        for place in (place for place, kind in self.kinds.items() if kind is None):
            equal = lengths[place] == rows
            has_rows[place] = tf.where(told[place] == 0, equal, told[place] > 0)
            agree.append(equal | ~has_rows[place])
            told = tf.tensor_scatter_nd_update(told, [[place]], [tf.where(has_rows[place], 1, -1)])
        if None in self.kinds.values():
            agree.append(tf.reduce_any([tf.convert_to_tensor(has_rows[place]) for place in self._inputs]))
        if agree:
            names = ", ".join(name for _, name, _ in self._arrays)
            message = f"{self._refusal()} First dimensions of {names} in this batch, and the number of rows:"
            given = [lengths[place] for place, _, _ in self._arrays]
            tf.debugging.Assert(tf.reduce_all(agree), [message, *given, rows], summarize=len(given) + 1)
        return rows, has_rows, told

    def _refusal(self) -> NotSupported:
        shapes = ", ".join(f"{name} {tf.TensorShape(array.shape)}" for _, name, array in self._arrays)
        return NotSupported(
            f"A batch whose number of rows cannot be told ({shapes})",
            reason="replicast divides the rows of every batch among the workers; they are counted by y and "
            "sample_weight, or by all of x if there is neither",
            remedy="Give y one entry per row: (x, y), also for predict. Add a first axis of 1 to an array "
            "that is not rows, if its first dimension may equal their number. For batches whose rows belong "
            "together, such as one large graph, turn off auto_shard_policy and give each worker its own "
            "batches (docs/training.md)",
        )


def rows_of(data: Any) -> tf.Tensor:
    """The number of rows of a share."""
    inputs, labels = _arrays(data)
    for _, _, array in (*labels, *inputs):
        return length_of(array)
    return tf.constant(1)


def first_input_is_whole(data: Any) -> tf.Tensor | None:
    """Whether the first array of x, by which Keras weights the loss in its logs, is not rows.

    None if it certainly is rows.
    """
    inputs, labels = _arrays(data)
    return length_of(inputs[0][2]) != length_of(labels[0][2]) if labels and len(inputs) > 1 else None


def at_least_one_row(data: Any, rows: tf.Tensor) -> Any:
    """The share, with a row of zeros if it has no rows."""

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (None, 0):
            return leaf
        if leaf.shape[0] is not None and leaf.shape[0] > 0:
            return leaf
        shape = tf.shape(leaf)
        zeros = functools.partial(tf.zeros, tf.concat([[1], shape[1:]], axis=0), leaf.dtype)
        # A conditional even if there are certainly no rows: `slices.py` must recognize rows of a batch here,
        # as on the workers that have some.
        whole = tf.cond((shape[0] > 0) | (rows > 0), lambda: leaf, zeros)
        whole.set_shape([1 if leaf.shape[0] == 0 else None, *leaf.shape[1:]])
        return whole

    return tf.nest.map_structure(filled, data)


def only_real(tensor: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """What was computed from a share; empty if the share has no rows, but a row of zeros instead."""
    return tensor[: tf.where(rows > 0, tf.shape(tensor)[0], 0)]


def with_unknown_rows(data: Any) -> Any:
    """The share, without its number of rows in the static shapes of its tensors."""

    def unknown(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (None, 0) or leaf.shape[0] is None:
            return leaf
        return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])

    return data if tf.executing_eagerly() else tf.nest.map_structure(unknown, data)


def predicting_all_rows(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a prediction function; for a share without rows it returns empty tensors."""

    def predict(data: Any) -> Any:
        rows = rows_of(data)
        inputs, labels = _arrays(data)
        fixed = _fixed_length([*labels, *inputs][0][2]) if inputs or labels else None
        outputs = function(at_least_one_row(data, rows))
        for name, output in named_leaves(outputs, "output"):
            if isinstance(output, tf.Tensor) and output.shape.rank is not None:
                _refuse_without_rows(name, output, fixed)

        def of_the_share(output: Any) -> Any:
            known = isinstance(output, tf.Tensor) and output.shape.rank is not None
            return only_real(output, rows) if known else output

        return tf.nest.map_structure(of_the_share, outputs)

    return predict


_MIXING = {
    "Circle": "gather the embeddings and labels of all workers in compute_loss",
    "Dice": "leave out axis 0, for one value per row: Dice(axis=(1, 2, 3))",
    "Tversky": "leave out axis 0, for one value per row: Tversky(axis=(1, 2, 3))",
}
"""The losses of Keras whose value for a row depends on other rows, and what to do."""


def losses_that_mix_rows(loss: Any) -> dict[str, str]:
    """The names of such losses in an argument of `compile`, and a warning for each."""
    found = {}
    for given in tf.nest.flatten(loss):
        name = given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
        name = name.replace("_", "").capitalize()
        axis = getattr(given, "axis", None)
        if name in _MIXING and (axis is None or 0 in tf.nest.flatten(axis)):
            found[name] = (
                f"The loss {name} compares the rows of a batch with each other. Each worker computes it from "
                f"its own rows, so training differs from one process. To avoid that, {_MIXING[name]} "
                "(docs/training.md, losses and layers that mix rows of a batch)."
            )
    return found


def _refuse_without_rows(name: str, output: tf.Tensor, rows: int | None) -> None:
    """Refuses an output that `predict` cannot join: the workers' parts are joined row by row."""
    length = output.shape[0] if output.shape.rank else None
    whole = length is not None and (rows is None or length % max(rows, 1) != 0)
    if output.shape.rank == 0 or whole:
        raise NotSupported(
            f"predict with an output that has no rows: {name} has the shape {output.shape}",
            reason="each worker computes it from its own rows of the batch, and predict joins rows",
            remedy="Return one entry per row, or call the model itself on the whole batch: model(x)",
        )
