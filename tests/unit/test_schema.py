import json

import pytest

from replicast.codec import fields_of
from replicast.errors import UpdateRefused
from replicast.update.schema import Schema, Variable


def variable(name: str, *slots: tuple[str, float]) -> Variable:
    return Variable(name, (2,), "float32", "trainable", slots)


NAMES = ("model/dense/kernel", "model/dense/bias", "model/dense_1/bias", "model/embedding/embeddings", "bias")
HINTS = {"optimizer/learning_rate": "the learning rate is computed by a schedule"}
SCHEMA = Schema([variable(name) for name in NAMES], HINTS)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("model/dense/kernel", "model/dense/kernel"),
        ("dense/kernel", "model/dense/kernel"),
        ("kernel", "model/dense/kernel"),
        ("dense/bias", "model/dense/bias"),
        ("embeddings", "model/embedding/embeddings"),
        ("bias", "bias"),
    ],
)
def test_a_full_name_or_a_unique_suffix_is_found(asked: str, found: str) -> None:
    assert SCHEMA.resolve(asked).name == found


def test_an_ambiguous_suffix_is_refused_with_all_matches() -> None:
    schema = Schema([variable("a/bias"), variable("b/bias")])
    with pytest.raises(UpdateRefused, match="matches 2 variables") as raised:
        schema.resolve("bias")
    assert raised.value.expected == "one of a/bias, b/bias"


@pytest.mark.parametrize("asked", ["dense/kernal", "kernle", "model/dense/kernels"])
def test_an_unknown_name_is_refused_with_similar_names(asked: str) -> None:
    with pytest.raises(UpdateRefused) as raised:
        SCHEMA.resolve(asked)
    assert raised.value.variable == asked
    assert raised.value.expected is not None
    assert "model/dense/kernel" in raised.value.expected


@pytest.mark.parametrize("asked", ["", "/", "ernel", "nse/kernel", "model", "model/dense/kernel/"])
def test_a_part_of_a_name_that_is_not_a_suffix_is_refused(asked: str) -> None:
    with pytest.raises(UpdateRefused):
        SCHEMA.resolve(asked)


def test_at_most_five_similar_names_are_listed() -> None:
    schema = Schema([variable(f"layer_{n}/kernel") for n in range(50)])
    with pytest.raises(UpdateRefused) as raised:
        schema.resolve("layer/kernel")
    assert raised.value.expected is not None
    assert raised.value.expected.count("kernel") == 5


@pytest.mark.parametrize("asked", ["optimizer/learning_rate", "learning_rate"])
def test_a_name_with_a_hint_is_refused_with_the_hint(asked: str) -> None:
    with pytest.raises(UpdateRefused, match="computed by a schedule"):
        SCHEMA.resolve(asked)


def test_names_are_unique_and_slots_exist() -> None:
    with pytest.raises(ValueError, match="Received twice: a"):
        Schema([variable("a"), variable("a")])
    with pytest.raises(ValueError, match="Received: m"):
        Schema([variable("a", ("m", 0.0))])


def test_a_schema_survives_json() -> None:
    schema = Schema([variable("a", ("m", 0.1)), variable("m")], {"x": "y"})
    copy = Schema.from_json(json.loads(json.dumps(schema.to_json())))
    assert list(copy) == list(schema)
    assert copy.to_json() == schema.to_json()
    assert copy.digest() == schema.digest()
    assert len(copy) == 2
    assert "a" in copy
    assert "b" not in copy


def test_the_digest_tells_order_shape_dtype_and_slots_apart() -> None:
    schemas = [
        Schema([variable("a"), variable("b")]),
        Schema([variable("b"), variable("a")]),
        Schema([variable("a"), variable("b", ("a", 0.0))]),
        Schema([variable("a"), Variable("b", (3,), "float32", "trainable")]),
        Schema([variable("a"), Variable("b", (2,), "float16", "trainable")]),
        Schema([variable("a"), Variable("b", (2,), "float32", "optimizer")]),
    ]
    assert len({schema.digest() for schema in schemas}) == len(schemas)


@pytest.mark.parametrize(
    "fields",
    [
        *({}, {"variables": {}}, {"variables": [3]}, {"variables": [{}]}, {"variables": [], "hints": []}),
        *(
            {"variables": [fields_of(variable("a")) | wrong]}
            for wrong in ({"dtype": "string"}, {"shape": [-1]}, {"kind": "other"}, {"slots": [3]})
        ),
    ],
)
def test_json_that_is_not_a_schema_is_a_value_error(fields: dict) -> None:
    with pytest.raises(ValueError, match="Received"):
        Schema.from_json(fields)
