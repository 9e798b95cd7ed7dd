from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from replicast.cli import main
from replicast.cli.launch import (
    Verdict,
    check_backend,
    check_cluster,
    check_machine,
    check_package,
    check_shared_memory,
)
from replicast.launcher.plan import Machine

GOOD, NOTE, BROKEN = Verdict.GOOD, Verdict.NOTE, Verdict.BROKEN


TWO = {"tensorflow": "2.21.0", "tensorflow-cpu": "2.21.0"}


@pytest.mark.parametrize(
    ("subject", "versions", "remedy"),
    [
        ("TensorFlow", {"tensorflow": "2.20.0"}, ""),
        ("TensorFlow", {"tensorflow-cpu": "2.21.1"}, ""),
        ("TensorFlow", {}, "pip install 'replicast[cpu]'"),
        ("TensorFlow", {"tensorflow-cpu": "2.22.0rc0"}, ""),
        ("TensorFlow", {"tensorflow": "2.19.1"}, "pip install 'tensorflow>=2.20,<2.23'"),
        ("TensorFlow", {"tensorflow-cpu": "2.23.0rc0"}, "pip install 'tensorflow-cpu>=2.20,<2.23'"),
        ("TensorFlow", {"tensorflow": "odd"}, "pip install 'tensorflow>=2.20,<2.23'"),
        ("TensorFlow", TWO, "pip uninstall -y tensorflow tensorflow-cpu"),
        ("Keras", {"keras": "3.12.0"}, ""),
        ("Keras", {"keras": "4.0"}, ""),
        ("Keras", {"keras-nightly": "3.16.0.dev2026102704"}, ""),
        ("Keras", {"keras": "3.11.3"}, "pip install 'keras>=3.12'"),
        ("Keras", {"keras": "2.15.0"}, "pip install 'keras>=3.12'"),
        ("Keras", {}, "pip install 'keras>=3.12'"),
        ("Keras", {"keras": "3.15.1", "keras-nightly": "3.16.0.dev2026102704"}, "pip uninstall -y keras"),
    ],
)
def test_packages(subject: str, versions: dict[str, str], remedy: str) -> None:
    def version_of(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError
        return versions[name]

    check = check_package(subject, version_of)
    assert check.verdict is (BROKEN if remedy else GOOD)
    assert check.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("variable", "written", "verdict"),
    [
        (None, None, GOOD),
        ("tensorflow", '{"backend": "jax"}', GOOD),
        ("jax", None, BROKEN),
        (None, '{"backend": "torch"}', BROKEN),
        (None, '{"backend": "tensorflow"}', GOOD),
        (None, "not JSON", GOOD),
        (None, "[]", GOOD),
    ],
)
def test_the_backend_of_keras(
    variable: str | None, written: str | None, verdict: Verdict, tmp_path: Path
) -> None:
    if written is not None:
        (tmp_path / "keras.json").write_text(written)
    environ = {"KERAS_HOME": str(tmp_path)}
    if variable is not None:
        environ["KERAS_BACKEND"] = variable
    check = check_backend(environ)
    assert check.verdict is verdict
    assert ("KERAS_BACKEND=tensorflow" in check.remedy) == (verdict is BROKEN)


def test_a_broken_tf_config_is_found() -> None:
    check = check_cluster({"TF_CONFIG": "{"})
    assert check.verdict is BROKEN
    assert "TF_CONFIG is not valid" in check.found


def test_shared_memory(tmp_path: Path) -> None:
    for name, free_mib, verdict in ((".", 4096, GOOD), (".", 64, NOTE), ("missing", 0, BROKEN)):
        free_bytes = free_mib * 2**20
        assert check_shared_memory(tmp_path / name, lambda _, free=free_bytes: free).verdict is verdict


@pytest.mark.parametrize(
    ("machine", "verdict", "found"),
    [
        (Machine(8, ("0", "1")), GOOD, "-n 2 gives each worker one GPU"),
        (Machine(4), GOOD, "up to -n 4"),
        (Machine(1), NOTE, "share one core"),
    ],
)
def test_cores_and_gpus(machine: Machine, verdict: Verdict, found: str) -> None:
    check = check_machine(machine)
    assert check.verdict is verdict
    assert found in check.found


def test_the_command_ends_with_1_and_the_way_out_when_something_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TF_CONFIG", "{")
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "✗  TF_CONFIG" in result.output
    assert "unset TF_CONFIG" in result.output
    assert result.output.endswith("Fix first: TF_CONFIG.\n")
