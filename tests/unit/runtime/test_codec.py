"""Every message and every order is decoded as it was encoded; other types are refused."""

from __future__ import annotations

import base64
import importlib
import math
import pkgutil
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from replicast.codec import decode, encode
from replicast.core import entries as n
from replicast.core import messages as m
from replicast.core import operations
from replicast.core.entries import Receipt
from replicast.core.operation import Outcome
from replicast.core.operations import apply, attempt, audit
from replicast.replicas.channel import Note
from replicast.transport import Parcel, Piece
from replicast.update.audit_report import AuditReport, Declared, Difference
from replicast.update.digest import deviation
from replicast.update.trial import Trial, TrialOutcome

PARCEL = Parcel("test-1-1", 1, 128, (Piece("float32", (4, 3), 0), Piece("bfloat16", (), 64)), "ab" * 16)
TRIAL = Trial(5, "accuracy", -0.1, "max")
PROPOSAL = n.Proposal("fix", "digest", PARCEL, 7, TRIAL, None, 'worker "1"', "note\nof two lines", 1.5)
RECEIPT = Receipt(
    3,
    "fix",
    7,
    {0: "a", 1: "b"},
    0.25,
    0.5,
    1e9,
    n.Stage.REVERTED,
    TrialOutcome(3, "reverted", 12, "loss", 0.1, None, "why"),
    2,
    (7, 7),
)
REFUSAL = m.Refusal(
    "There is no room",
    (1,),
    {"type": "UpdateRefused", "problem": "There is no room", "worker": 1, "variable": None},
)
DIFFERENCE = Difference(
    "dense/bias",
    ((0, 2), (1,)),
    0,
    "majority",
    {1: deviation(np.zeros(3, np.float32), np.ones(3, np.float32))},
)
REPORT = AuditReport(
    1, 20, 1e9, 20, 10, "healed", (DIFFERENCE,), (Declared("seed", True),), (4,), 0.01, ("request-1",)
)
ORDERS: list[Any] = [
    apply.Load("fix", "digest"),
    apply.Prepare("fix", "digest", PARCEL),
    apply.Apply("fix", "digest", 3),
    apply.Discard(("fix", "other")),
    apply.Compute("f"),
    audit.Digest(("dense/bias",)),
    audit.Publish("sync-1", ("dense/bias",)),
    attempt.TakeSnapshot("save-step-4"),
    attempt.Exit("the disk is full"),
    apply.Measure(TRIAL),
    apply.BeginTrial("fix", "digest", 3),
    apply.EndTrial(kept=False, sequence=7),
    audit.Examine(),
    audit.Expected(("dense/bias",)),
    audit.Compare("heal-1", "digest", ("dense/bias",)),
    audit.DeliverReport(REPORT, raises=True),
    audit.TakeRows("pull-1", "dense/bias", ((0, 3), (5, 6))),
    apply.WriteBefore(3),
    apply.Invert("undo", 3),
]
ANSWERS: list[Any] = [
    None,
    PARCEL,
    REFUSAL,
    m.Published("digest", PARCEL, "note"),
    m.Applied("digest", 1e9, 0.125, 7),
    m.SeenDigests(7, {"": "digest"}, {"seed": "other"}, 0.1, 7, 1e9),
    m.Snapshot(7, "digest", frozenset({1, 2}), [[7, 1, {"loss": 0.5}]]),
    {"dense/bias": "digest"},
    [0.1, 5],
    [None, 0],
    [-math.inf, 2],
]
MESSAGES: list[Any] = [
    m.Propose("worker-1-ab-1", PROPOSAL),
    m.Propose("worker-1-ab-2", n.Proposal("f", "", source=1)),
    m.Propose("worker-1-ab-3", n.Proposal("undo", "", reverts=3, forced=True)),
    m.Request("pull", ("request-1",), ("dense/bias", [[0, 3]])),
    m.Withdraw("withdraw-1", "fix"),
    m.Request("audit", ("request-1",)),
    m.At(8, 7, standing=True),
    *(m.Answer(number, answer) for number in (5, m.ReportId("save", 4, 2)) for answer in ANSWERS),
    m.Rest(4, 7, ("sync", 0, "dense/bias")),
    m.Stop(8),
    m.Stop(8, at_step=15),
    m.Meet(8, 9),
    *(m.Do(9, order, of) for order in ORDERS for of in (None, (0,))),
    m.Release(8),
    *(m.Resume((4, 5), outcome) for outcome in (None, REFUSAL, Outcome(n.Stage.VERIFIED, REPORT))),
    *(m.Tell("fix", ("a", "b"), stage, 7, RECEIPT, "the trial of 2", ended=True) for stage in n.Stage),
    Note('{"rank": 1}'),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message: Any) -> None:
    text = encode([3, message])
    assert decode(text) == [3, message]
    assert text.isascii()
    assert "\n" not in text


def test_a_measure_that_is_not_a_number_arrives_as_such() -> None:
    mean, steps = decode(encode((math.nan, 3)))
    assert math.isnan(mean)
    assert steps == 3


def test_text_that_is_not_valid_unicode_is_escaped() -> None:
    refusal = m.Refusal("no file \udcff", (1,), {"problem": "\ud800"})
    received = decode(encode([3, m.Answer(m.ReportId("save", 4), refusal), m.Resume((4,), {0: "\udcff"})]))
    escaped = m.Refusal("no file \\udcff", (1,), {"problem": "\\ud800"})
    assert received == [3, m.Answer(m.ReportId("save", 4), escaped), m.Resume((4,), {0: "\\udcff"})]


def test_every_kind_of_message_is_among_those() -> None:
    kinds = {*get_args(m.ToCoordinator), *get_args(m.ToWorkers), Note}
    assert {type(message) for message in MESSAGES} == kinds


def test_every_order_of_every_operation_is_among_those() -> None:
    modules = [
        importlib.import_module(f"{operations.__name__}.{module.name}")
        for module in pkgutil.iter_modules(operations.__path__)
    ]
    defined = {one for module in modules for one in vars(module).values() if isinstance(one, type)}
    orders = {one for one in defined if issubclass(one, m.Order) and one is not m.Order}
    assert {type(order) for order in ORDERS} == orders


@pytest.mark.parametrize(
    "value", [object(), np.float32(1.0), m.Request], ids=lambda value: type(value).__name__
)
def test_what_no_message_may_have_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="Received: "):
        encode(m.Answer(1, value))


def packed(value: Any) -> str:
    return base64.b64encode(msgspec.msgpack.encode(value)).decode("ascii")


def test_only_records_are_created() -> None:
    assert decode(packed({"type": "Popen", "args": "ls"})) == {"type": "Popen", "args": "ls"}


@pytest.mark.parametrize(
    "text",
    [
        packed({"type": "Stop"}),
        packed({"type": "Stop", "meeting": "1"}),
        packed({"type": "Tell", "id": "fix", "tickets": [], "stage": "somewhere"}),
        packed({"type": "Stop", "meeting": 1})[:-4],
        "not base64",
    ],
)
def test_what_is_no_message_is_not_read(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode(text)
