"""Files of other tools as updates: .npy, .npz, .weights.h5 and LoRA adapters, and what is refused of them."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from replicast.errors import FileDamaged, UpdateRefused
from replicast.update.edits import Variable, apply_edit
from replicast.update.schema import Schema, planned
from replicast.update.tensorfiles import tensors_in
from replicast.update.update import Update
from tests.unit.played_job import BIAS, invoke, output_of, pushed

KERNEL = np.arange(12, dtype=np.float32).reshape(4, 3)
SCHEMA = Schema(
    [
        Variable("model/block_0/query/kernel", (4, 6), "float32", "trainable"),
        Variable("model/block_1/query/kernel", (4, 6), "float32", "trainable"),
        Variable("model/heads/kernel", (4, 2, 3), "float32", "trainable"),
        Variable("model/table/embeddings", (5, 2), "bfloat16", "trainable"),
    ]
)


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def npz(compressed: bool = False, **arrays: Any) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **arrays)
    return file.getvalue()


def read(content: bytes, source: str = "some/bias.npy", **options: Any) -> dict[str, np.ndarray]:
    return dict(tensors_in(memoryview(content), source, max_tensors=100, **options).tensors)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<f2", "<i8", "|u1", "|b1"])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)])
def test_an_npy_file_has_the_values_that_numpy_wrote(shape: tuple[int, ...], dtype: str, order: Any) -> None:
    array = np.asarray(np.arange(np.prod(shape)).reshape(shape).astype(dtype), order=order)
    (found,) = read(npy(array)).values()
    assert found.shape == shape
    assert found.dtype.isnative
    assert found.tolist() == array.tolist()
    assert list(read(npy(array))) == ["bias"]
    assert list(read(npy(array), name="dense/bias")) == ["dense/bias"]


@pytest.mark.parametrize("compressed", [False, True])
def test_an_npz_file_has_its_arrays_by_name(compressed: bool) -> None:
    found = read(npz(compressed, **{"dense/bias": BIAS, "dense/kernel": KERNEL}))
    assert {name: one.tolist() for name, one in found.items()} == {
        "dense/bias": BIAS.tolist(),
        "dense/kernel": KERNEL.tolist(),
    }


class Opened:
    """What a pickle of it would do is seen by a file that it makes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return self.path.touch, ()


def test_objects_are_refused_and_never_unpickled(tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    hostile = np.array([Opened(fired)], dtype=object)
    for content in (npy(hostile), npz(x=hostile), npz(x=BIAS, y=hostile)):
        with pytest.raises(FileDamaged, match="floats, integers or bools"):
            read(content)
    with pytest.raises(FileDamaged):
        read(pickle.dumps(Opened(fired)))
    assert not fired.exists()


def with_header(text: str, data: bytes = b"") -> bytes:
    header = text.encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + data


@pytest.mark.parametrize(
    ("said", "content"),
    [
        ("size given", with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }")),
        ("size given", with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", b"1234567")),
        ("of numbers", with_header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (0,), }")),
        ("of numbers", with_header("{'descr': '<V2', 'fortran_order': False, 'shape': (0,), }")),
        ("another dtype", with_header("{'descr': '<c8', 'fortran_order': False, 'shape': (0,), }")),
        ("dtype is unknown", with_header("{'descr': '<q9', 'fortran_order': False, 'shape': (0,), }")),
        ("of numbers", with_header("__import__('os').abort()")),
        ("header of 2147483648 bytes", b"\x93NUMPY\2\0" + struct.pack("<I", 2**31)),
        ("of numbers", npy(np.zeros((), "M8[s]"))),
        ("size given", npy(BIAS)[:-1]),
        ("not a valid .npz", npz(x=BIAS)[:-30]),
        ("too many arrays", npz(**{f"x{number}": BIAS for number in range(101)})),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_or_hostile_array_is_refused(said: str, content: bytes) -> None:
    with pytest.raises(FileDamaged, match=said):
        read(content)


def zipped(*entries: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive, pytest.warns() if len(entries) > 1 else io.BytesIO():
        for name, content in entries:
            archive.writestr(name, content)
    return file.getvalue()


@pytest.mark.parametrize(
    ("said", "content"),
    [
        ("as numpy.savez writes them", zipped(("weights.txt", b"x"))),
        ("each name once", zipped(("x.npy", npy(BIAS)), ("x.npy", npy(BIAS)))),
        ("compression", zipped(("x.npy", npy(BIAS)), method=zipfile.ZIP_LZMA)),
        ("at most 1000000 bytes. Received: 83887", npz(True, x=np.zeros(2**20))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_archive_that_numpy_has_not_written_or_that_unpacks_to_too_much_is_refused(
    said: str, content: bytes
) -> None:
    with pytest.raises(FileDamaged, match=said):
        read(content, max_bytes=10**6)


WHOLE = npz(True, x=BIAS, y=KERNEL)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_an_archive_with_changed_bytes_is_read_or_refused(changes: list[tuple[int, int]]) -> None:
    content = bytearray(WHOLE)
    for place, value in changes:
        content[place] = value
    try:
        found = read(b"PK\3\4" + bytes(content[4:]))
    except FileDamaged:
        return
    assert sum(one.nbytes for one in found.values()) <= 200


def h5(path: Path, fill: Any) -> bytes:
    with h5py.File(path, "w") as file:
        fill(file)
    return path.read_bytes()


def keras_weights(file: Any) -> None:
    """As `save_weights` of Keras 3 writes a compiled functional model with two Dense layers."""
    file.create_group("vars").attrs["name"] = "functional"
    for group, name in (("layers/dense", "first"), ("layers/dense_1", "second")):
        made = file.create_group(f"{group}/vars")
        made.attrs["name"] = name
        made["0"], made["1"] = KERNEL + len(name), BIAS + len(name)
    made = file.create_group("optimizer/vars")
    made.attrs["name"] = "adam"
    made["0"] = np.int64(7)


FIRST_SECOND = Schema(
    Variable(f"{layer}/{name}", shape, "float32", "trainable")
    for layer in ("first", "second")
    for name, shape in (("kernel", (4, 3)), ("bias", (3,)))
)


def test_weights_of_keras_are_found_by_their_layers_and_order(tmp_path: Path) -> None:
    path = tmp_path / "all.weights.h5"
    h5(path, keras_weights)
    update = Update.from_tensors(path, "assign", schema=FIRST_SECOND)
    values = {edit.variable: edit.arrays["value"] for edit in planned(update, FIRST_SECOND).edits}
    assert sorted(values) == ["first/bias", "first/kernel", "second/bias", "second/kernel"], "no optimizer"
    assert values["first/kernel"].tolist() == (KERNEL + 5).tolist()
    assert values["second/bias"].tolist() == (BIAS + 6).tolist()
    with pytest.raises(FileDamaged, match=r"names depend on the model.*schema=run.schema\(\)"):
        Update.from_tensors(path, "assign")
    with pytest.raises(
        FileDamaged, match=r"4 of 4 of its variables are not in the model.*functional/first, v"
    ):
        Update.from_tensors(path, "assign", schema=SCHEMA)


def test_a_plain_h5_file_has_its_datasets_by_path(tmp_path: Path) -> None:
    content = h5(
        tmp_path / "x", lambda file: file.create_dataset("dense/bias", data=BIAS, compression="gzip")
    )
    assert read(content)["dense/bias"].tolist() == BIAS.tolist()


def virtual(file: Any) -> None:
    layout = h5py.VirtualLayout((3,), "f4")
    layout[:] = h5py.VirtualSource("/etc/hostname", "x", (3,))
    file.create_virtual_dataset("x", layout)


def circle(file: Any) -> None:
    file["a/b/c"] = BIAS
    file["a/b/again"] = file["a"]


@pytest.mark.parametrize(
    ("fill", "said"),
    [
        (lambda file: file.update({"x": h5py.ExternalLink("/etc/hostname", "/x")}), "is a link"),
        (lambda file: file.update({"x": h5py.SoftLink("/y")}), "is a link"),
        (virtual, "virtual"),
        (
            lambda file: file.create_dataset("x", (4,), "f4", external=[("/etc/hostname", 0, 16)]),
            "another file",
        ),
        (lambda file: file.create_dataset("x", (2**20,), "f4"), "not all in the file"),
        (
            lambda file: file.create_dataset("x", (2**33,), "f8", chunks=(2**10,), compression="gzip"),
            "at most",
        ),
        (lambda file: file.create_dataset("x", (2,), "f4", chunks=(2**20,), maxshape=(None,)), "chunks"),
        (lambda file: file.create_dataset("x", (9,), "f4", chunks=(9,), compression="lzf"), "filter"),
        (lambda file: file.create_dataset("x", data="text"), "dtype"),
        (lambda file: file.create_dataset("x", data=h5py.Empty("f4")), "empty"),
        (circle, "too many groups"),
    ],
)
def test_an_h5_file_that_points_elsewhere_or_claims_too_much_is_refused(
    tmp_path: Path, fill: Any, said: str
) -> None:
    with pytest.raises(FileDamaged, match=said):
        read(h5(tmp_path / "x", fill))
    with pytest.raises(FileDamaged, match="not a valid HDF5 file"):
        read(b"\x89HDF\r\n" + b"\0" * 100)


def adapter(folder: Path, modules: dict[str, tuple[int, int]], dtype: Any = np.float32, **config: Any) -> Any:
    """A folder as PEFT's `save_pretrained` writes it: rank 2, alpha 8. Modules have inputs and outputs."""
    folder.mkdir(exist_ok=True)
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    random = np.random.default_rng(0)
    factors = {}
    for name, (inputs, outputs) in modules.items():
        kind = "lora_embedding_" if "embed" in name else "lora_"
        end = "" if "embed" in name else ".weight"
        for letter, shape in (("A", (2, inputs)), ("B", (outputs, 2))):
            key = f"base_model.model.{name}.{kind}{letter}{end}"
            factors[key] = random.normal(size=shape).astype(dtype)
    safetensors.numpy.save_file(factors, folder / "adapter_model.safetensors")
    return {key.removeprefix("base_model.model."): value for key, value in factors.items()}


Q = "model.layers.{n}.self_attn.q_proj"
NAMES = {"layers.{n}.self_attn.{part}_proj": "block_{n}/{part}/kernel", "self_attn.q": "query"}


@pytest.mark.parametrize(("rslora", "scale"), [(False, 8 / 2), (True, 8 / 2**0.5)])
def test_an_adapter_adds_the_scaled_product_of_its_factors(
    tmp_path: Path, rslora: bool, scale: float
) -> None:
    factors = adapter(tmp_path, {Q.format(n=0): (4, 6), Q.format(n=1): (4, 6)}, use_rslora=rslora)
    names = {"layers.{n}.self_attn.q_proj": "block_{n}/query/kernel"}
    update = planned(Update.from_adapter(tmp_path, SCHEMA, names=names, note="tuned"), SCHEMA)
    assert {edit.operation for edit in update.edits} == {"add_low_rank"}
    assert update.note == "tuned"
    for edit in update.edits:
        module = Q.format(n=edit.variable[len("model/block_")])
        a, b = (factors[f"{module}.lora_{letter}.weight"].astype(np.float64) for letter in "AB")
        before = np.ones((4, 6), np.float32)
        np.testing.assert_allclose(apply_edit(edit, before), 1 + (b @ a).T * scale, rtol=1e-5, atol=1e-5)


def test_an_adapter_of_attention_and_of_a_table_fits_their_shapes_and_dtypes(tmp_path: Path) -> None:
    modules = {"model.heads": (4, 6), "model.embed_tokens": (5, 2)}
    factors = adapter(tmp_path, modules, np.float16, alpha_pattern={"heads": 2})
    update = planned(
        Update.from_adapter(tmp_path, SCHEMA, names={"embed_tokens": "table/embeddings"}), SCHEMA
    )
    made = {edit.variable: edit for edit in update.edits}
    a, b = (factors[f"model.heads.lora_{letter}.weight"].astype(np.float64) for letter in "AB")
    expected = (b @ a).T.reshape(4, 2, 3)
    np.testing.assert_allclose(made["model/heads/kernel"].arrays["value"], expected, rtol=1e-5, atol=1e-6)
    assert made["model/table/embeddings"].arrays["a"].dtype.name == "bfloat16"
    assert made["model/table/embeddings"].arrays["a"].shape == (5, 2)


def test_modules_that_are_not_variables_are_named(tmp_path: Path) -> None:
    adapter(tmp_path, {"model.heads": (4, 6), "model.other": (4, 6), "deep.down": (4, 6)})
    with pytest.raises(
        UpdateRefused, match=r"2 of 3 modules.*: (deep.down, model.other|model.other, deep.down)"
    ):
        Update.from_adapter(tmp_path, SCHEMA)
    with pytest.raises(UpdateRefused, match="no variable with this name"):
        Update.from_adapter(tmp_path, SCHEMA, names={"other": "block_7/query/kernel"})
    with pytest.raises(UpdateRefused, match=r"Two modules.*heads"):
        Update.from_adapter(tmp_path, SCHEMA, names={"{any}": "heads/kernel"})
    with pytest.raises(UpdateRefused, match="pattern that is not valid"):
        Update.from_adapter(tmp_path, SCHEMA, names={"{a}.{a}": "heads/kernel"})
    adapter(tmp_path, {"heads": (6, 4)})
    with pytest.raises(UpdateRefused, match="do not match the variable"):
        planned(Update.from_adapter(tmp_path, SCHEMA), SCHEMA)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "Expected: LORA. Received: IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"r": "8"}, "not the configuration of a LoRA adapter"),
        ({"lora_alpha": 0}, "not the configuration of a LoRA adapter"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern has an expression"),
    ],
)
def test_another_kind_of_adapter_is_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    adapter(tmp_path, {"heads": (4, 6)}, **config)
    with pytest.raises(FileDamaged, match=said):
        Update.from_adapter(tmp_path, SCHEMA)


def test_an_adapter_with_more_than_factors_or_without_some_is_refused(tmp_path: Path) -> None:
    factors = adapter(tmp_path, {"heads": (4, 6)})
    path = tmp_path / "adapter_model.safetensors"
    for more in ("base_model.model.classifier.weight", "heads.lora_B.bias", "heads.lora_magnitude_vector"):
        safetensors.numpy.save_file({**factors, more: KERNEL}, path)
        with pytest.raises(FileDamaged, match=f"not factors of LoRA.*{more}"):
            Update.from_adapter(tmp_path, SCHEMA)
    del factors["heads.lora_B.weight"]
    safetensors.numpy.save_file(factors, path)
    with pytest.raises(FileDamaged, match="heads has no lora_B"):
        Update.from_adapter(tmp_path, SCHEMA)
    path.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(FileDamaged, match="is a pickle, which is not read"):
        Update.from_adapter(tmp_path, SCHEMA)


def test_push_takes_the_files_and_folders_of_other_tools(run: Path, tmp_path: Path) -> None:
    adapter(tmp_path / "lora", {"top.proj": (4, 3)})
    Path("names.json").write_text('{"proj": "dense/kernel"}')
    np.savez("both.npz", **{"dense/bias": BIAS, "dense/kernel": KERNEL})
    np.save("some.npy", BIAS)
    h5(Path("dense.h5"), lambda file: file.create_dataset("dense/bias", data=BIAS))
    words = (
        "--add",
        "both.npz",
        "--assign",
        "dense/bias=some.npy",
        "--add",
        "dense.h5",
        "--blend",
        "both.npz",
    )
    output_of(
        0, "push", run, *words, "--weight", 0.5, "--adapter", tmp_path / "lora", "--names", "names.json"
    )
    assert [f"{edit.operation} {edit.variable}" for edit in pushed(run)[0].edits] == [
        "add dense/bias", "add dense/kernel", "assign dense/bias", "add dense/bias",
        "blend dense/bias", "blend dense/kernel", "add_low_rank model/dense/kernel",
    ]  # fmt: skip
    assert "dense/bias 3 float32" in " ".join(output_of(0, "inspect", "both.npz").split())


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--add", "dense/bias=missing.npy"), 2, "does not exist"),
        (("--add", "dense/bias=both.npz"), 1, "has names of its own"),
        (("--adapter", "both.npz"), 2, "is a file"),
        (("--adapter", "."), 1, "adapter_config.json cannot be read"),
        (("--set", "learning_rate=1", "--names", "a=b"), 2, "--names is for the modules of --adapter"),
        (("--adapter", ".", "--names", "a"), 2, "MODULE=NAME"),
        (("--update", "both.npz"), 1, "ZIP archive"),
    ],
)
def test_push_says_what_is_wrong_with_them(run: Path, words: tuple[str, ...], code: int, said: str) -> None:
    np.savez("both.npz", **{"dense/bias": BIAS})
    result = invoke("push", run, *words)
    assert result.exit_code == code, result.output
    assert said in " ".join(result.output.split())
