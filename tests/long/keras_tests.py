"""Keras' own tests in the scope of our strategy: `python -m tests.long.keras_tests`, or `make test-keras`.

Runs them twice, in plain Keras and in the scope of a job of one worker, and lists what differs. Each known
difference has its reason in `KNOWN`; any other one fails. The tests come from the installed Keras, or from
its source distribution if the installed one has none; nothing of them is kept here.

This module is also the plugin with which pytest runs them.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import types
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

FILES = (
    "trainers/trainer_test.py",
    "optimizers/optimizer_test.py",
    "optimizers/optimizer_sparse_test.py",
    "optimizers/loss_scale_optimizer_test.py",
    "callbacks/*_test.py",
)
KNOWN = {
    "optimizer_sparse_test::test_sparse_gradients_*": "It looks for the variable object of the model among "
    "those that are assigned. In a scope, an optimizer assigns this worker's variable behind it. The numbers "
    "are the same: test_sparse_correctness_*",
    "swap_ema_weights_test::test_swap_ema_weights_with_tf_distribute": "It creates a MirroredStrategy, and "
    "TensorFlow refuses a strategy inside the scope of another one",
}
"""By test, with wildcards: why it passes in plain Keras and not in our scope."""

IN_SCOPE = "REPLICAST_KERAS_TESTS_IN_SCOPE"
REPOSITORY = Path(__file__).parents[2]


def pytest_configure() -> None:
    """What Keras' tests import from outside of Keras, on every backend."""
    import keras  # noqa: F401 - before jax seems to be here: Keras looks for it

    conftest = types.ModuleType("conftest")
    conftest.skip_if_backend = _skip_if_backend  # type: ignore[attr-defined]
    sys.modules["conftest"] = conftest
    if find_spec("jax") is None:
        sys.modules["jax"] = types.ModuleType("jax")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: Any) -> None:
    """Runs a test in the scope; not its `setUp`, which clears the graph that holds the scope."""
    if os.environ.get(IN_SCOPE) != "1":
        return
    test = item.obj

    @functools.wraps(test)
    def in_scope(*args: Any, **kwargs: Any) -> Any:
        with _strategy().scope():
            return test(*args, **kwargs)

    item.obj = in_scope


@functools.cache
def _strategy() -> Any:
    import replicast

    return replicast.Strategy()


def _skip_if_backend(backend: str, reason: str) -> Any:
    return pytest.mark.skipif(backend == "tensorflow", reason=reason)


def main() -> int:
    """Runs the tests and lists what differs; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="keras-tests-") as made:
        directory = Path(made)
        files = _copied(directory)
        runs = {way: _started(directory, files, way) for way in ("plain", "scope")}
        for way, run in runs.items():
            if run.wait() > 1:  # pytest has failed, not a test
                sys.exit((directory / f"{way}.log").read_text(errors="replace")[-4000:])
        plain, scope = (_outcomes(directory / f"{way}.xml") for way in runs)
    print(f"Keras {version('keras')}: {_counted(plain)} in plain Keras, {_counted(scope)} in the scope")
    unknown, seen = [], set()
    for test, outcome in sorted(plain.items()):
        other = scope.get(test, ("missing", ""))
        if other[0] == outcome[0]:
            continue
        known = next((pattern for pattern in KNOWN if fnmatch.fnmatch(test, pattern)), None)
        seen.add(known)
        print(f"\n{test}: {outcome[0]} in plain Keras, {other[0]} in the scope")
        print(f"  {other[1]}\n  known: {KNOWN[known]}" if known else f"  {other[1]}\n  NOT KNOWN")
        unknown += [] if known else [test]
    for pattern in KNOWN.keys() - seen:
        print(f"\n{pattern} no longer differs: remove it from the table")
    print(f"\n{len(unknown)} differences that are not known" if unknown else "\nAll differences are known")
    return 1 if unknown or not plain else 0


def _copied(directory: Path) -> list[str]:
    """Copies the tests into a directory; they import Keras as it is installed."""
    spec = find_spec("keras")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "src"
    if not list(source.glob("trainers/*_test.py")):
        source = _downloaded(directory / "download")
    tests = sorted(path for pattern in FILES for path in source.glob(pattern))
    return [str(shutil.copy(path, directory)) for path in tests]


def _downloaded(directory: Path) -> Path:
    print("The installed Keras has no tests: downloading its source distribution")
    directory.mkdir()
    package = f"keras=={version('keras')}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-binary", ":all:", "--no-deps"]
    subprocess.run([*command, package], cwd=directory, check=True, timeout=600)
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(directory, filter="data")
    return next(directory.glob("keras-*/keras/src"))


def _started(directory: Path, files: list[str], way: str) -> subprocess.Popen[bytes]:
    # One process of xdist: a test that ends it counts as failed, and the next one starts another.
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(directory), "-n", "1"]
    options = ["--import-mode=importlib", "--tb=short", "--junitxml", str(directory / f"{way}.xml")]
    unused = ("warnings", "cacheprovider", "schemathesis")
    plugins = ["-p", "tests.long.keras_tests", *(word for name in unused for word in ("-p", f"no:{name}"))]
    with (directory / f"{way}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, *options, *plugins, *files],
            cwd=directory,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "KERAS_BACKEND": "tensorflow",
                "TF_CPP_MIN_LOG_LEVEL": "3",
                IN_SCOPE: "1" if way == "scope" else "0",
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _outcomes(report: Path) -> dict[str, tuple[str, str]]:
    """By `file::test`: passed, failed or skipped, and the first line of the reason."""
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").split(".")[-2]
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        name = "passed" if problem is None else "skipped" if problem.tag == "skipped" else "failed"
        message = "" if problem is None else problem.get("message", "").partition("\n")[0][:200]
        outcomes[f"{file}::{case.get('name')}"] = (name, message)
    return outcomes


def _counted(outcomes: dict[str, tuple[str, str]]) -> str:
    names = [name for name, _ in outcomes.values()]
    return ", ".join(f"{names.count(name)} {name}" for name in ("passed", "failed", "skipped"))


if __name__ == "__main__":
    sys.exit(main())
