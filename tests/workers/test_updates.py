"""One worker writes, every replica follows: the promises of an update, on real workers that train."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicast
from replicast.replicas.joined_worker import JoinedWorker
from replicast.storage import inbox
from replicast.storage.journal import committed_updates
from replicast.training.variables import component
from replicast.transport import Transport, open_transport, shared
from replicast.transport.shared import arrays_in
from replicast.update.edits import apply_edit
from replicast.update.schema import Limits, planned
from replicast.update.update import Update
from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all, digest, state
from tests.workers.recipes import CLASSES, FEATURES, arrays, perceptron

WAIT_SECS = 240.0
STEPS = 5
"""Steps between two questions whether all workers have seen enough."""

OUTSIDE = """
import sys
from pathlib import Path
from replicast.storage import inbox
from replicast.update.update import Update
for place in sys.argv[2:]:
    inbox.submit(Path(sys.argv[1]), Update.load(place))
assert "tensorflow" not in sys.modules
"""


@contextlib.contextmanager
def replicas_of(model: keras.Model, **options: Any) -> Iterator[replicast.Replicas]:
    """Replicas that are closed together; not after an error, because the others would wait."""
    replicas = replicast.Replicas(model, **{"durability": "memory", **options})
    yield replicas
    replicas.close()


class Meeting:
    """Lets all workers decide alike whether they have seen enough."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._name = strategy.next_name("test-meeting")
        self._count = 0

    def all_say(self, yes: bool = True) -> bool:
        self._count += 1
        words, key = self._strategy.coordination, f"{self._name}/{self._count}"
        words.put(f"{key}/{self._strategy.rank}", str(yes))
        said = [words.get(f"{key}/{rank}", WAIT_SECS) for rank in range(self._strategy.size)]
        assert None not in said, f"not all came: {said}"
        return said == ["True"] * self._strategy.size


class Until(keras.callbacks.Callback):
    """Ends a training on all workers after the epoch in which `enough` holds on all of them."""

    def __init__(self, meeting: Meeting, enough: Callable[[], bool]) -> None:
        super().__init__()
        self._meeting = meeting
        self._enough = enough

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = self._meeting.all_say(self._enough())


class AtStep(keras.callbacks.Callback):
    """Calls a function after each batch, with the number of batches so far."""

    def __init__(self, act: Callable[[int], None]) -> None:
        super().__init__()
        self._act = act
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        self._act(self._steps)


def quietly(replicas: replicast.Replicas, act: Callable[[int], Any], enough: Callable[[], bool]) -> None:
    """Boundaries without steps, so that nothing but updates changes the state."""
    meeting = Meeting(replicas.model.distribute_strategy)
    ends = time.monotonic() + WAIT_SECS
    for number in itertools.count(1):
        replicas.boundary()
        act(number)
        if number % STEPS == 0 and meeting.all_say(enough()):
            return
        assert time.monotonic() < ends, "never enough"
        time.sleep(0.001)  # what a step would take: the other threads of a worker need some time as well


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01)


def in_thread(act: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def from_outside(run_dir: Path, updates: list[Update]) -> subprocess.Popen[bytes]:
    """Puts updates into the inbox by a process without TensorFlow."""
    places = [run_dir.parent / f"{update.id}.safetensors" for update in updates]
    for update, place in zip(updates, places, strict=True):
        update.save(place)
    return subprocess.Popen([sys.executable, "-c", OUTSIDE, str(run_dir), *map(str, places)])


Seen = list[tuple[int, tuple[bool, ...], dict[str, str]]]


def train(
    replicas: replicast.Replicas, way: str, act: Callable[[int], Any], enough: Callable[[], bool]
) -> Seen:
    """Trains until all workers have seen enough; for each boundary its step, the marks and the digests."""
    model, strategy = replicas.model, replicas.model.distribute_strategy
    meeting = Meeting(strategy)
    seen: Seen = []

    def look(_: int) -> None:
        marked = state(model)["sequential/dense_1/bias"] > 50
        seen.append((replicas.step, tuple(marked.tolist()), digest(model)))

    def each(step: int) -> None:
        act(step)
        look(step)

    if way == "custom loop":
        custom_loop(replicas, each, lambda: meeting.all_say(enough()))
        return seen
    callbacks = [replicas.callback(), AtStep(each), Until(meeting, enough)]
    x, y = arrays(STEPS * 8 * 4)
    model.fit(x, y, batch_size=8, epochs=100_000, verbose=0, shuffle=False, callbacks=callbacks)
    return seen


def custom_step(model: keras.Model) -> Callable[[], tf.Tensor]:
    """A step of a custom training loop, on rows of this worker: returns its loss."""
    strategy = model.distribute_strategy
    x, y = (part[strategy.rank :: strategy.size][:16] for part in arrays())

    def one_step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            )
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    return tf.function(lambda: strategy.run(one_step))


def custom_loop(replicas: replicast.Replicas, each: Callable[[int], Any], enough: Callable[[], bool]) -> None:
    step = custom_step(replicas.model)
    ends = time.monotonic() + WAIT_SECS  # not after some steps: a process that pushes may start slowly
    for number in itertools.count(1):
        step()
        replicas.boundary()
        each(number)
        if number % STEPS == 0 and enough():
            return
        assert time.monotonic() < ends, "never enough"


def first_seen(seen: Seen, place: int) -> int:
    return next(step for step, marks, _ in seen if marks[place])


# An update from each source, in each kind of training.


def mark(place: int) -> Update:
    """An update that can be seen: no training brings a bias so far."""
    value = np.zeros(CLASSES, np.float32)
    value[place] = 100
    return Update(id=f"mark-{place}", note="to be seen").add("dense_1/bias", value)


def reaches_all(strategy: Any, way: str, directory: Path) -> dict[str, Any]:
    steps = 4 if way == "4 steps per execution" else 1
    model = perceptron(strategy, adam, steps_per_execution=steps)
    last = strategy.rank == strategy.size - 1
    run_dir = directory / "run"
    given: list[Any] = []

    def act(step: int) -> None:
        if step == 2 and last:
            given.append(replicas.propose(mark(0)))
            given.append(in_thread(lambda: replicas.propose(mark(1)).result(WAIT_SECS)))
            given.append(from_outside(run_dir, [mark(2)]))

    with replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        seen = train(replicas, way, act, lambda: len(replicas.history) == 3)
        if last:
            ticket, thread, process = given
            assert ticket.result(0).id == "mark-0"
            thread.join()
            assert process.wait(WAIT_SECS) == 0
        receipts = {receipt.id: (receipt.step, receipt.digests) for receipt in replicas.history}
    return {"seen": seen, "receipts": receipts, "digest": digest(model)}


def assert_all_were_reached(results: list[dict[str, Any]]) -> None:
    assert_equal_on_all(results)
    found = results[0]
    assert sorted(found["receipts"]) == ["mark-0", "mark-1", "mark-2"]
    for place in range(3):
        step, digests = found["receipts"][f"mark-{place}"]
        assert sorted(digests) == list(range(len(results)))
        assert len(set(digests.values())) == 1
        assert first_seen(found["seen"], place) == step, "it was seen at another step than its receipt's"


WAYS = ["fit", "custom loop", "4 steps per execution"]


@pytest.mark.parametrize("way", WAYS)
def test_updates_by_the_last_worker_a_thread_and_another_process_reach_all_at_one_step(
    pool3: Pool, way: str, tmp_path: Path
) -> None:
    assert_all_were_reached(pool3.run(reaches_all, way, tmp_path))


def test_updates_of_three_sources_are_applied_in_a_job_of_one(pool1: Pool, tmp_path: Path) -> None:
    assert_all_were_reached(pool1.run(reaches_all, "custom loop", tmp_path))


# Many updates at once.

COUNTS = {"callback": 17, "thread": 17, "outside": 16}


def numbered(source: str, number: int) -> Update:
    """One of several kinds, such that another order gives other weights."""
    random = np.random.default_rng([len(source), number])

    def some(*shape: int) -> np.ndarray:
        return (0.1 * random.standard_normal(shape)).astype(np.float32)

    update = Update(id=f"{source}-{number}", author=source)
    match number % 7:
        case 0:
            return update.add("dense/kernel", some(FEATURES, 16))
        case 1:
            return update.scale("dense/kernel", 0.9).scale("dense_1/kernel", 1.1)
        case 2:
            return update.assign_rows("dense/kernel", [number % FEATURES], some(1, 16))
        case 3:
            return update.scale("optimizer/learning_rate", 0.97)
        case 4:
            return update.blend("sequential_dense_kernel_momentum", some(FEATURES, 16), 0.3)
        case 5:
            return update.add_low_rank("dense/kernel", some(FEATURES, 2), some(2, 16))
        case _:
            return update.add("optimizer/learning_rate", np.float32(0.001)).assign("dense/bias", some(16))


def all_numbered() -> dict[str, Update]:
    return {u.id: u for source, count in COUNTS.items() for u in (numbered(source, n) for n in range(count))}


def fifty(strategy: Any, way: str, directory: Path) -> dict[str, Any]:
    model = perceptron(strategy, adam)
    run_dir = directory / "run"
    outside: list[Any] = []

    def act(step: int) -> None:
        if strategy.rank == min(1, strategy.size - 1) and step <= COUNTS["callback"]:
            replicas.propose(numbered("callback", step - 1))

    def from_thread() -> None:
        tickets = [replicas.propose(numbered("thread", number)) for number in range(COUNTS["thread"])]
        for ticket in tickets:
            ticket.result(WAIT_SECS)

    with replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        before = replicas.read(variable.name for variable in replicas.schema)
        thread = threading.Thread(target=from_thread)
        if strategy.rank == strategy.size - 1:
            thread.start()
        if strategy.rank == 0:
            given = [numbered("outside", number) for number in range(COUNTS["outside"])]
            outside.append(from_outside(run_dir, given))
        seen: Any = None
        if way == "quietly":
            quietly(replicas, act, lambda: len(replicas.history) == 50)
        else:
            seen = train(replicas, way, act, lambda: len(replicas.history) == 50)
        if thread.ident is not None:
            thread.join()
        assert [process.wait(WAIT_SECS) for process in outside] == [0] * len(outside)
        after = replicas.read(variable.name for variable in replicas.schema)
        receipts = sorted(replicas.history, key=lambda receipt: receipt.sequence)
        reference = dict(before)
        for receipt in receipts:
            for edit in planned(all_numbered()[receipt.id], replicas.schema).edits:
                reference[edit.variable] = apply_edit(edit, reference[edit.variable])
    order = [(receipt.sequence, receipt.id, receipt.step) for receipt in receipts]
    return {"order": order, "seen": seen, "after": after, "reference": reference}


@pytest.mark.parametrize("way", ["quietly", "fit"])
def test_fifty_updates_of_three_sources_at_once_have_one_order_and_none_is_lost_or_applied_twice(
    pool3: Pool, way: str, tmp_path: Path
) -> None:
    results = pool3.run(fifty, way, tmp_path)
    assert_equal_on_all(results)
    order = results[0]["order"]
    assert [sequence for sequence, _, _ in order] == list(range(1, 51))
    assert sorted(id_ for _, id_, _ in order) == sorted(all_numbered())
    assert [step for _, _, step in order] == sorted(step for _, _, step in order)
    assert [(r.sequence, r.id) for r in committed_updates(tmp_path / "run")] == [entry[:2] for entry in order]
    if way == "quietly":
        assert_equal_on_all([results[0]["reference"], results[0]["after"]])
    assert not list((tmp_path / "run" / "inbox").glob("*.safetensors")), "the inbox is not empty"


# Steps, functions, sync.


def change_here_only(model: keras.Model, layer: str, weight: str, by: float) -> None:
    variable = component(getattr(model.get_layer(layer), weight))
    variable.assign_add(tf.fill(variable.shape, by))


def synced(strategy: Any) -> dict[str, Any]:
    model = perceptron(strategy, adam)
    steps: dict[str, Any] = {}
    last = strategy.size - 1

    def note(name: str) -> None:
        steps[name] = {path: value.sum() for path, value in state(model).items() if "/dense/" in path}

    with replicas_of(model) as replicas:
        train(replicas, "fit", lambda step: None, lambda: True)
        assert replicas.sync() is None, "nothing differed"
        note("before")
        if strategy.rank == last:
            change_here_only(model, "dense", "kernel", 1.0)
            change_here_only(model, "dense", "bias", 1.0)
        ticket = replicas.propose(mark(0)) if strategy.rank == 0 else None
        of_bias = replicas.sync(source=last, variables=["dense/bias"])
        assert (of_bias is None) == (strategy.size == 1)
        note("the bias is the last worker's")
        assert ticket is None or ticket.result(WAIT_SECS).sequence == 1
        whole = replicas.sync(source=0)
        assert (whole is None) == (strategy.size == 1)
        note("everything is worker 0's")
        assert replicas.sync(source=0) is None
        touched = [receipt.id.split("-")[0] for receipt in replicas.history]
    return {"digest": digest(model), "steps": steps, "touched": touched}


def test_sync_makes_every_replica_that_of_its_source(pool3: Pool) -> None:
    results = pool3.run(synced)
    assert_equal_on_all([r["digest"] for r in results])
    kernel, bias = "sequential/dense/kernel", "sequential/dense/bias"
    before, of_bias, whole = results[0]["steps"].values()
    assert results[0]["touched"] == ["mark", "sync", "sync"]
    assert of_bias[bias] == pytest.approx(before[bias] + 16, rel=1e-5)
    assert of_bias[kernel] == before[kernel], "only the bias was asked for"
    assert whole == of_bias
    differing = [r["steps"]["the bias is the last worker's"][kernel] for r in results]
    assert differing[0] == differing[1] != differing[2]


# Refusals.


def bad_updates() -> dict[str, Any]:
    """Updates that are refused, each at another place; a function is what it computes."""

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    def raises(values: Any) -> None:
        raise KeyError("no such column")

    return {
        "unknown": Update().add("dense/bais", zeros(16)),
        "out of range": Update().assign_rows("dense_1/kernel", [99], zeros(1, CLASSES)),
        "NaN": Update().add("dense/bias", np.full(16, np.nan, np.float32)),
        "too large": Update().add("dense/kernel", zeros(FEATURES, 16)),
        "denied": Update().scale("optimizer/learning_rate", 0.5),
        "half bad": Update().scale("dense/bias", 2.0).add("dense_1/bias", zeros(1)),
        "other content": Update(id="known").scale("dense/bias", 2.0),
        "raises": raises,
        "returns nothing": lambda values: None,
        "returns a stranger": lambda values: {"dense/bais": zeros(16)},
    }


EXPECTED = {
    "unknown": ("no variable with this name", "sequential/dense/bias"),
    "out of range": ("out of range", "0 to 15"),
    "NaN": ("not finite", "allow_nonfinite"),
    "too large": ("too large", "at most 512 bytes"),
    "denied": ("The guard denies", "(deny)"),
    "half bad": ("shape", "(4,)"),
    "other content": ("other content", "id of its own"),
    "raises": ("KeyError", "no such column"),
    "returns nothing": ("must return an Update", "NoneType"),
    "returns a stranger": ("no variable with this name", "sequential/dense/bias"),
}


def spoil_inbox(run_dir: Path) -> None:
    place = run_dir / "inbox"
    place.mkdir(exist_ok=True)
    good = run_dir / "good.safetensors"
    Update(id="cut").scale("dense/bias", 2.0).add("dense/bias", np.ones(16, np.float32)).save(good)
    content = good.read_bytes()
    files = {
        "cut": content[:-7],
        "hostile": b"\xff" * 8 + b"{}",
        "stranger": content,
        "pickled": b"\x80\x04cos\nsystem\n.",
    }
    for name, written in files.items():
        (run_dir / name).write_bytes(written)
        (run_dir / name).rename(place / f"{name}.safetensors")


def trained_on(strategy: Any, bad: bool, directory: Path) -> dict[str, Any]:
    tf.config.experimental.enable_op_determinism()
    model = perceptron(strategy, adam)
    run_dir = directory / f"run-{bad}"
    tickets: dict[str, Any] = {}

    def act(step: int) -> None:
        if not bad:
            return
        if step == 2 and strategy.rank == 0:
            spoil_inbox(run_dir)
        if step == 2 and strategy.rank == strategy.size - 1:
            replicas.propose(Update(id="known").scale("dense/bias", 1.0))
            tickets.update({kind: replicas.propose(update) for kind, update in bad_updates().items()})

    def all_refused() -> bool:
        files = len(list((run_dir / "refused").glob("*.json"))) if bad and strategy.rank == 0 else 4
        return files == 4 and all(ticket.done() for ticket in tickets.values())

    x, y = arrays(80)
    options: dict[str, Any] = {
        "limits": Limits(max_bytes=512),
        "guard": replicast.Guard(deny=["optimizer/*"]),
    }
    with replicas_of(model, run_dir=run_dir, durability="disk", **options) as replicas:
        callbacks = [replicas.callback(), AtStep(act)]
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        quietly(replicas, lambda step: None, all_refused)
        refused = {}
        for kind, ticket in tickets.items():
            with pytest.raises(replicast.UpdateRefused) as caught:
                ticket.result(0)
            refused[kind] = str(caught.value)
    return {"digest": digest(model), "refused": refused}


def test_bad_updates_are_refused_and_training_ends_with_the_same_weights_as_without_them(
    pool3: Pool, tmp_path: Path
) -> None:
    without = pool3.run(trained_on, False, tmp_path)
    found = pool3.run(trained_on, True, tmp_path)
    assert_equal_on_all([result["digest"] for result in [*without, *found]])
    refused = found[-1]["refused"]
    assert refused.keys() == EXPECTED.keys()
    for kind, words in EXPECTED.items():
        assert all(word in refused[kind] for word in words), f"{kind}: {refused[kind]}"
    assert sorted(inbox.ended(tmp_path / "run-True")) == ["cut", "hostile", "pickled", "stranger"]
    assert not list((tmp_path / "run-True" / "inbox").glob("*.safetensors"))
    assert [record.id for record in committed_updates(tmp_path / "run-True")] == ["known"]


@contextlib.contextmanager
def transports_opened() -> Iterator[list[Any]]:
    """The transports of the replicas that are made in it."""
    opened: list[Any] = []

    def noted(*given: Any) -> Any:
        opened.append(open_transport(*given))
        return opened[-1]

    with mock.patch("replicast.replicas.joined_worker.open_transport", noted):
        yield opened


def flipped(data: np.ndarray) -> np.ndarray:
    data[::64] ^= 1  # in every array: workers check a share each, and worker 0 the first
    return data


def cannot_stage(strategy: Any) -> list[str]:
    """Worker 1 proposes; what it is told, in turn."""
    model = perceptron(strategy)
    before = digest(model)
    said: list[str] = []

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with transports_opened() as opened, replicas_of(model) as replicas:
        transport = opened[0]
        assert isinstance(transport, Transport)
        publish = transport.publish

        def published_and_damaged(parcel_id: str, given: Any, **how: Any) -> Any:
            parcel = publish(parcel_id, given)
            with transport._path(parcel_id).open("r+b") as file:
                first = file.read(1)
                file.seek(0)
                file.write(bytes([first[0] ^ 1]))
            return parcel

        damaged_here = mock.patch.object(
            shared, "arrays_in", lambda content, parts: arrays_in(flipped(content.copy()), parts)
        )
        damaged_there = mock.patch.object(transport, "publish", published_and_damaged)
        full = mock.patch("os.posix_fallocate", no_room)
        for worker, fault in ((0, damaged_here), (1, damaged_there), (1, full)):
            with fault if strategy.rank == worker else contextlib.nullcontext():
                ticket = replicas.propose(mark(0)) if strategy.rank == 1 else None
                quietly(replicas, lambda step: None, lambda ticket=ticket: ticket is None or ticket.done())
            if ticket is not None:
                with pytest.raises(replicast.UpdateRefused) as caught:
                    ticket.result(0)
                said.append(f"{caught.value.worker}: {caught.value}")
            assert digest(model) == before, "refused, and yet something has changed"
            Meeting(strategy).all_say()  # the fault is over
        ticket = replicas.propose(mark(0)) if strategy.rank == 1 else None
        quietly(replicas, lambda step: None, lambda: len(replicas.history) == 1)
        assert state(model)["sequential/dense_1/bias"][0] == 100.0
    return said


def test_a_worker_that_cannot_stage_refuses_for_all_and_is_named(pool3: Pool) -> None:
    _, said, _ = pool3.run(cannot_stage)
    alone, everywhere, full = said
    assert alone.startswith("0: ")
    assert "damaged at worker 0" in alone
    assert "damaged" in everywhere
    assert full.startswith("1: ")
    assert "no room" in full


# What it costs when there is nothing to do.

WATCHED: dict[str, Any] = {"thread": None, "events": []}


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if threading.get_ident() == WATCHED["thread"] and event.startswith(("open", "os.", "socket.", "fcntl.")):
        WATCHED["events"].append((event, str(arguments)[:100]))


def idle(strategy: Any, directory: Path) -> dict[str, Any]:
    model = perceptron(strategy, adam)
    sys.addaudithook(watch)
    coordination, asked, called = strategy.coordination, [], set[str]()

    def counted(name: str) -> Any:
        original = getattr(coordination, name)

        def call(*given: Any) -> Any:
            called.add(name)
            if threading.get_ident() == WATCHED["thread"]:
                asked.append((name, given))
            return original(*given)

        return mock.patch.object(coordination, name, call)

    def watched_boundary(worker: JoinedWorker, **given: Any) -> None:
        transfers = strategy.extended.transfers_started()
        turns = strategy.lifetime.turns
        WATCHED["thread"] = threading.get_ident()
        try:
            boundary(worker, **given)
        finally:
            WATCHED["thread"] = None
        moved.append(strategy.extended.transfers_started() - transfers + strategy.lifetime.turns - turns)

    moved: list[int] = []
    WATCHED["events"].clear()
    with replicas_of(model, run_dir=directory / "run", durability="disk") as replicas:
        boundary = JoinedWorker.boundary
        patches = [counted(name) for name in ("put", "get", "delete")]
        with (
            patches[0],
            patches[1],
            patches[2],
            mock.patch.object(JoinedWorker, "boundary", watched_boundary),
        ):
            train(replicas, "fit", lambda step: None, lambda: True)
        WATCHED["thread"] = threading.get_ident()  # and the watch itself works
        (directory / "run").exists()
        os.listdir(directory)  # noqa: PTH208 - one event
        WATCHED["thread"] = None
    events = [event for event, _ in WATCHED["events"]]
    return {"moved": moved, "asked": asked, "called": called, "events": events}


def test_an_idle_job_pays_no_transfer_no_question_and_no_file_access_in_the_training_thread(
    pool2: Pool, tmp_path: Path
) -> None:
    for found in pool2.run(idle, tmp_path):
        assert found["moved"] == [0] * 20
        assert found["asked"] == []
        assert "get" in found["called"], "other threads ask: the calls are seen"
        assert found["events"] == ["os.listdir"]
