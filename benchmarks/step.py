"""The questions about a training step: how long it takes, what the exchange costs, and what `fit` adds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.question import QUICK_SECS, WORKERS, Contestant, Question, Ratio
from benchmarks.step_task import StepTask

MODULE = "benchmarks.step_keras"
FIT = Contestant("replicast fit, arrays", "replicast", f"{MODULE}:FitArrays")
DATASET = Contestant("replicast fit, tf.data", "replicast", f"{MODULE}:FitDataset")
LOOP = Contestant("replicast loop, constant batch", "replicast", f"{MODULE}:ConstantBatch")
DDP_ARRAYS = Contestant("torch DDP (gloo) loop, arrays", "torch", "benchmarks.peers.ddp:Arrays")
DDP = Contestant("torch DDP (gloo) loop, constant batch", "torch", "benchmarks.peers.ddp:ConstantBatch")
STOCK = Contestant("stock MWMS loop, constant batch", "stock", f"{MODULE}:ConstantBatch")
ITERATOR = Contestant("stock MWMS loop, distributed iterator", "stock", f"{MODULE}:DistributedIterator")
TF_KERAS = Contestant("stock MWMS, tf_keras fit, arrays", "stock", f"{MODULE}:FitTfKeras", "tf_keras")
FLOOR = Contestant("floor: TensorFlow, no exchange", "stock", f"{MODULE}:NoExchange", role="floor")
FIT_ALONE = Contestant("plain Keras fit, arrays, no exchange", "stock", f"{MODULE}:FitAlone", role="part")
DATASET_ALONE = Contestant(
    "plain Keras fit, tf.data, no exchange", "stock", f"{MODULE}:FitDatasetAlone", role="part"
)
TORCH_FLOOR = Contestant("torch, no exchange", "torch", "benchmarks.peers.ddp:NoExchange", role="part")

NOTES = (
    "A ratio: median of the rounds' ratios, and range. Every process has one thread; loops keep no metrics.",
    "Contestants take turns in every round; a turn of fit is one complete call, metrics included.",
)


@dataclass(frozen=True, slots=True)
class Size:
    """One size of the model: its name, its layers, and how long a turn is."""

    name: str
    units: tuple[int, ...]
    steps: int
    epochs: int
    budget_secs: float

    def task(self) -> StepTask:
        return StepTask(steps=self.steps, epochs=self.epochs, units=self.units)


SIZES = (
    Size("0.1M", (128,), 300, 3, 160.0),
    Size("0.67M", (512, 512), 90, 3, 80.0),
    Size("5.8M", (2048, 2048), 16, 2, 90.0),
)


def step(size: Size) -> Question:
    """The time of a step of one model, by everybody who can train it."""
    more = (DATASET, DATASET_ALONE, ITERATOR) if size.name == SIZES[0].name else ()
    layers = "-".join(str(width) for width in (784, *size.units, 10))
    return Question(
        name=f"step-{size.name}",
        title=f"A training step: MLP {layers} ({size.name} parameters), Adam, batch 128, {WORKERS} workers",
        unit="ms per step",
        contestants=(FIT, LOOP, DDP_ARRAYS, DDP, STOCK, TF_KERAS, FLOOR, FIT_ALONE, TORCH_FLOOR, *more),
        task=size.task(),
        ratios=(
            Ratio("replicast fit / torch DDP, both on arrays", FIT, DDP_ARRAYS, "at most", 1.0),
            Ratio("replicast loop / torch DDP, both on a constant batch", LOOP, DDP, "at most", 1.0),
            Ratio("replicast fit on arrays / its constant-batch loop", FIT, LOOP, "at most", 1.15),
            Ratio("plain Keras: fit on arrays / constant-batch loop, no exchange in both", FIT_ALONE, FLOOR),
            Ratio("replicast fit / plain Keras fit without exchange", FIT, FIT_ALONE),
            *(
                ratio
                for ratio in (
                    Ratio(
                        "replicast fit on tf.data / its constant-batch loop", DATASET, LOOP, "at most", 1.25
                    ),
                    Ratio("plain Keras: fit on tf.data / constant-batch loop", DATASET_ALONE, FLOOR),
                )
                if ratio.above in more
            ),
            Ratio("stock tf_keras fit / replicast fit", TF_KERAS, FIT, "at least", 2.0),
        ),
        notes=NOTES,
        budget_secs=size.budget_secs,
    )


CONVOLUTION = StepTask(steps=10, batch=64, kind="convolution", units=(32, 32))
ONE = Contestant("1 worker, 64 examples a step", "replicast", f"{MODULE}:ConstantBatch", workers=1)
TWO = Contestant(
    "2 workers, 128 examples a step",
    "replicast",
    f"{MODULE}:ConstantBatch",
    task=replace(CONVOLUTION, batch=128),
)
TWO_PROCESSES = replace(
    TWO,
    name="floor: 2 processes, no exchange",
    pool="stock",
    factory=f"{MODULE}:NoExchange",
    role="floor",
)
SCALING = Question(
    name="scaling",
    title="Examples per second from 1 to 2 workers: two convolutions of 32 filters, Adam, 64 examples each",
    unit="ms per step",
    contestants=(ONE, TWO, TWO_PROCESSES),
    task=CONVOLUTION,
    ratios=(
        Ratio("examples per second, 2 workers / 1 worker", ONE, TWO, "at least", 1.8, factor=2.0),
        Ratio("the same, 2 processes without exchange / 1 worker", ONE, TWO_PROCESSES, factor=2.0),
    ),
    notes=NOTES[:1],
    turns=2,
    budget_secs=60.0,
)

ROWS_ALONE = "benchmarks.step_floor:TouchedRows"
TABLE_ROWS = (10_000, 1_000_000, 10_000_000)
TABLE_DDP = Contestant("torch DDP (gloo), sparse=True, arrays", "torch", "benchmarks.peers.ddp:TableArrays")
TABLE_ALONE = replace(FIT_ALONE, name="plain Keras fit in each process, side by side, no exchange")


def table(optimizer: str, peers: str) -> Question:
    """The time of a step on a few rows of a large table, with one optimizer."""
    few = StepTask(steps=20, kind="embedding", table=1_000_000, words=20, optimizer=optimizer)
    task = few if optimizer == "Adam" else replace(few, steps=200)  # plain Keras takes long for a step
    by_itself = replace(TABLE_ALONE, task=few)
    contestants = (FIT, by_itself) if optimizer == "Adam" else (FIT, TABLE_DDP, by_itself)
    against_torch = Ratio(f"replicast fit / torch DDP sparse ({peers})", FIT, TABLE_DDP, "at most", 1.0)
    alone = Ratio("replicast fit / plain Keras, side by side", FIT, by_itself, "at most", 1.1)
    return Question(
        name=f"table-{optimizer}",
        title=f"A step on 128 × 20 ids of a table of 1,000,000 × 64: {optimizer}, {WORKERS} workers",
        unit="ms per step",
        contestants=contestants,
        task=task,
        ratios=(alone,) if optimizer == "Adam" else (against_torch, alone),
        notes=NOTES[:1],
        turns=2,
        budget_secs=60.0,
    )


def table_sizes(optimizer: str) -> Question:
    """How the time of a step grows with the rows of the table, of which it touches as many as before."""
    tasks = [
        StepTask(steps=200, kind="embedding", table=rows, words=20, optimizer=optimizer)
        for rows in TABLE_ROWS
    ]
    sized = [
        replace(
            FIT,
            name=f"{task.table:,} rows",
            task=task,
            role="part" if task is tasks[0] else None,
            at=1.0,
        )
        for task in tasks
    ]
    # First and by themselves: not all tables have room at once.
    alone = [
        replace(
            one, name=f"floor: the touched rows alone, {one.name}", factory=ROWS_ALONE, role="floor", at=0.0
        )
        for one in sized
    ]
    (smallest, *larger), (floor, *floors) = sized, alone
    return Question(
        name=f"table-sizes-{optimizer}",
        title=f"A step on 128 × 20 ids of a larger and larger table, {optimizer}, {WORKERS} workers",
        unit="ms per step",
        contestants=(*alone, *sized),
        task=tasks[0],
        ratios=(
            *(Ratio(f"{one.name} / {smallest.name}", one, smallest, "at most", 1.3) for one in larger),
            *(
                Ratio(
                    f"the same if only the touched rows took longer: {one.name}",
                    smallest,
                    smallest,
                    beyond=(slower, floor),
                )
                for one, slower in zip(larger, floors, strict=True)
            ),
        ),
        notes=(
            *NOTES[:1],
            "The floor: the gathers and scatters of the optimizer alone, in TensorFlow, on as many rows,",
            "on both workers at once.",
        ),
        turns=2,
        budget_secs=150.0,
        staged=True,
    )


TABLES = (
    *(table("SGD", "SGD"), table("Adagrad", "Adagrad"), table("LazyAdam", "SparseAdam"), table("Adam", "")),
    *(table_sizes("SGD"), table_sizes("Adagrad"), table_sizes("LazyAdam")),
)
QUESTIONS = (*(step(size) for size in SIZES), SCALING, *TABLES)
QUICK = (step(replace(SIZES[0], steps=100, epochs=2, budget_secs=QUICK_SECS)),)
