"""Runs one script in plain Keras and on workers, and compares what they return.

A script is a module-level function of a strategy. It uses `strategy.scope()`, `strategy.rank` and
`strategy.size` and otherwise nothing that plain Keras does not have. It returns nested dicts and lists of
numbers and arrays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all, state
from tests.pool.scripts import Script, script
from tests.pool.worker import start_afresh


class PlainKeras:
    """What a script gets instead of a strategy when it runs in plain Keras."""

    rank = 0
    size = 1

    @staticmethod
    def scope() -> contextlib.AbstractContextManager[None]:
        """No scope at all."""
        return contextlib.nullcontext()


def in_plain_keras(_: None, script: Script, *args: Any, eagerly: bool = False) -> Any:
    """Runs on a worker of the pool `plain`, which has no strategy.

    Tracing takes most of the time. Without graphs, the numbers are the same but for rounding and, as Keras
    knows the size of every batch then, but for the logs of losses that are sums.
    """
    start_afresh()
    tf.config.run_functions_eagerly(eagerly)
    return script(PlainKeras(), *args)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What replicast warns of."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    ear = Ear(logging.WARNING)
    logging.getLogger("replicast").addHandler(ear)
    try:
        yield said
    finally:
        logging.getLogger("replicast").removeHandler(ear)


def weights(model: keras.Model) -> dict[str, np.ndarray]:
    """The weights and the optimizer's variables of a model, for a script to return.

    By number and last part of the path: where Keras builds an optimizer decides what is in front of that.
    """
    values = state(model).items()
    return {f"{number} {path.rpartition('/')[2]}": value for number, (path, value) in enumerate(values)}


def in_plain_keras_and_on(
    workers: Pool,
    plain: Pool,
    script: Script,
    *args: Any,
    eagerly: bool = False,
    on_workers: Script | None = None,
) -> tuple[Any, list[Any]]:
    """What a script returns in plain Keras, and on the workers it or another one."""
    __tracebackhide__ = True
    in_one_process = plain.begin(in_plain_keras, script, *args, eagerly=eagerly)
    try:
        results = workers.run(on_workers or script, *args)
    finally:
        (expected,) = in_one_process()
    return expected, results


def assert_same_as_plain_keras(
    workers: Pool, plain: Pool, script: Script, *args: Any, rtol: float = 1e-4, atol: float = 1e-6
) -> Any:
    """Asserts that a script returns the same bits on all workers, and the numbers of plain Keras."""
    __tracebackhide__ = True
    expected, results = in_plain_keras_and_on(workers, plain, script, *args)
    assert_equal_on_all(results)
    assert_close(results[0], expected, rtol=rtol, atol=atol)
    return results[0]


def same_as_plain_keras(pool: str) -> Callable[[Script], Script]:
    """Marks a test that is a script: see `tests/pool/scripts.py` and `assert_same_as_plain_keras`."""
    return script(assert_same_as_plain_keras, pool, "plain")


def assert_close(found: Any, expected: Any, *, rtol: float, atol: float, name: str = "the result") -> None:
    """Asserts that two nested results have the same structure, and numbers within the tolerance."""
    __tracebackhide__ = True
    if isinstance(expected, Mapping):
        assert list(found) == list(expected), f"{name}: {sorted(found.keys() ^ expected.keys())}"
        for key, value in expected.items():
            assert_close(found[key], value, rtol=rtol, atol=atol, name=f"{name} > {key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), name
        for place, value in enumerate(expected):
            assert_close(found[place], value, rtol=rtol, atol=atol, name=f"{name} > {place}")
    elif isinstance(expected, np.ndarray | np.generic | float):
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol, err_msg=name)
    else:
        assert found == expected, name


# Which files a process writes.

_watched: dict[str, set[str]] = {}


def files_opened_to_write(directory: Path) -> set[str]:
    """From now on, the files below `directory` that this process writes; a part of one has its name."""
    if not _watched:
        sys.addaudithook(_note)
    return _watched.setdefault(str(directory), set())


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not isinstance(arguments[0], str):
        return
    path, mode, flags = arguments
    writes = any(letter in mode for letter in "wax+") if mode else bool(flags & (os.O_WRONLY | os.O_RDWR))
    for directory, files in _watched.items():
        if writes and path.startswith(directory):
            files.add(re.sub(r"\.part-\d+-", "", path[len(directory) + 1 :]))
