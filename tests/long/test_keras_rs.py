"""`keras_rs` itself, installed by `make test-newest`: numbers of plain Keras, tables read by rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from replicast.training.rows import is_written_by_rows
from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all
from tests.pool.worker import start_afresh
from tests.scripts.compare import assert_close, in_plain_keras_and_on, weights
from tests.scripts.test_data import of_all_workers
from tests.scripts.test_rows import IDS, ROWS, WIDTH, optimizer_of, uses_of

keras_rs = pytest.importorskip("keras_rs", reason="needs keras_rs, which make test-newest installs")


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    ids = np.stack([random.permutation(ROWS)[:IDS] for _ in range(48)]).astype("int32")
    return ids, random.uniform(0.1, 1, (48, IDS)).astype("float32")


def reduced(ids: Any, numbers: Any) -> Any:
    """`EmbedReduce`: each way to combine rows, with weights and without, and of one id."""
    layers = [keras_rs.layers.EmbedReduce(ROWS, WIDTH, combiner=how) for how in ("mean", "sum", "sqrtn")]
    found = [part for layer in layers for part in (layer(ids), layer(ids, numbers))]
    return keras.layers.Concatenate()([*found, layers[0](ids[:, 0])])


def ragged(ids: Any, numbers: Any) -> Any:
    """`EmbedReduce` of ragged ids."""
    layer = keras_rs.layers.EmbedReduce(ROWS, WIDTH)

    class Cut(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            layer.build(shape)
            self.layer = layer

        def call(self, ids: Any) -> Any:
            return layer(tf.RaggedTensor.from_tensor(ids, 1 + ids[:, 0] % IDS))

        def compute_output_shape(self, _: Any) -> Any:
            return (None, WIDTH)

    return Cut()(ids)


def ranking(ids: Any, numbers: Any) -> Any:
    """A small DLRM: `DistributedEmbedding`, of which two features share a table, and its interactions."""

    def table(name: str) -> Any:
        # The default is drawn when keras_rs is imported, whatever seed is set later.
        return keras_rs.layers.TableConfig(name, ROWS, WIDTH, keras.initializers.RandomUniform(seed=1))

    def feature(name: str, of: Any) -> Any:
        return keras_rs.layers.FeatureConfig(name, of, (None, IDS), (None, WIDTH))

    items, users = table("items"), table("users")
    lookup = keras_rs.layers.DistributedEmbedding(
        {"seen": feature("seen", items), "liked": feature("liked", items), "user": feature("user", users)}
    )
    found = lookup(
        {"seen": ids, "liked": ids[:, ::-1], "user": ids},
        {"seen": numbers, "liked": numbers, "user": numbers},
    )
    dense = keras.layers.Dense(WIDTH, activation="relu")(numbers)
    pairs = keras_rs.layers.DotInteraction()([*found.values(), dense])
    x = keras.layers.Concatenate()([*found.values(), dense, pairs])
    return keras_rs.layers.FeatureCross(projection_dim=3)(x, keras_rs.layers.FeatureCross()(x, x))


def listed(ids: Any, numbers: Any) -> Any:
    """A score for each item of a list."""
    user = keras_rs.layers.EmbedReduce(ROWS, WIDTH)(ids[:, 0])
    return keras.layers.Dot(axes=(2, 1))([keras.layers.Embedding(ROWS, WIDTH)(ids), user])


class TwoTowers(keras.Model):
    """As in the tutorials of keras_rs, with the items of the whole batch as negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.users = keras_rs.layers.EmbedReduce(ROWS, WIDTH)
        self.items = keras.layers.Embedding(ROWS, WIDTH)
        self.found = keras_rs.layers.BruteForceRetrieval(k=5, return_scores=False)
        self.without_hits = keras_rs.layers.RemoveAccidentalHits()
        self.corrected = keras_rs.layers.SamplingProbabilityCorrection()
        self.hard = keras_rs.layers.HardNegativeMining(3)

    def build(self, shape: Any) -> None:
        self.users.build(shape)
        self.items.build(shape)
        self.found.candidate_embeddings = self.items.embeddings
        self.found.build(shape)
        super().build(shape)

    def call(self, ids: Any, training: bool = False) -> Any:
        users = self.users(ids)
        return {"users": users} if training else {"users": users, "found": self.found(users)}

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: Any = True
    ) -> Any:
        users, items = y_pred["users"], self.items(y)
        count = tf.shape(items)[0]
        logits = ops.matmul(users, ops.transpose(of_all_workers(items)))
        first = tf.distribute.get_replica_context().replica_id_in_sync_group * count
        labels = tf.one_hot(first + tf.range(count), tf.shape(logits)[1])
        logits = self.corrected(logits, ops.full_like(logits, 0.3))
        logits, labels = self.hard(self.without_hits(logits, labels, of_all_workers(y)), labels)
        return ops.mean(keras.losses.categorical_crossentropy(labels, logits, from_logits=True))


def trained(strategy: Any, how: str, name: str) -> tuple[dict[str, Any], list[Any]]:
    """What a training leaves, and how its step uses each variable that is as large as a table."""
    start_afresh()  # here again: keras_rs draws a seed where it is imported
    ids, numbers = data()
    x, y = ([ids, numbers], (numbers > 0.5).astype("float32")) if how != "towers" else (ids, ids[:, 0])
    with strategy.scope():
        optimizer = optimizer_of(name)
        if how == "towers":
            model = TwoTowers()
            model.compile(optimizer)
            model.build(ids.shape)
        else:
            inputs = keras.Input((IDS,), dtype="int32"), keras.Input((IDS,))
            outputs = globals()[how](*inputs)
            loss, metrics = "mse", []
            if how == "listed":
                loss = keras_rs.losses.PairwiseLogisticLoss()
                metrics = [keras_rs.metrics.NDCG(k=3), keras_rs.metrics.MeanReciprocalRank()]
            else:
                outputs = keras.layers.Dense(IDS)(outputs)
            model = keras.Model(inputs, outputs)
            model.compile(optimizer, loss, metrics=metrics)
    graphs, update_step = [], optimizer.update_step

    def noted(*args: Any) -> None:
        graphs.append(tf.compat.v1.get_default_graph())
        update_step(*args)

    optimizer.update_step = noted
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    uses = [
        (v.path, uses_of(graphs[0], v), is_written_by_rows(v))
        for v in ((*model.weights, *optimizer.variables) if strategy.size > 1 else ())
        if tuple(v.shape) == (ROWS, WIDTH)
    ]
    predicted = model.predict(x, batch_size=16, verbose=0)
    return {"history": history, "weights": weights(model), "predicted": predicted}, uses


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "LazyAdam", "Adam"])
@pytest.mark.parametrize("how", ["reduced", "ragged", "ranking", "listed", "towers"])
def test_a_model_of_keras_rs_trains_as_in_plain_keras_and_reads_no_table(
    how: str, name: str, pool2: Pool, plain: Pool
) -> None:
    (expected, _), results = in_plain_keras_and_on(pool2, plain, trained, how, name)
    assert_equal_on_all([found for found, _ in results])
    assert_close(results[0][0], expected, rtol=1e-4, atol=1e-6)
    for path, operations, by_rows in results[0][1]:
        assert by_rows == (name != "Adam"), path
        # Adam moves every row: it reads its blocks, or a small table as a whole.
        assert ("ReadVariableOp" in operations) == (name == "Adam"), f"{path}: {operations}"
    assert results[0][1]
