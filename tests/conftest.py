"""The pools of workers that the tests share. Each starts when the first test uses it."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool import Pool

POOLS = ("plain", "pool1", "pool2", "pool3", "mirrored", "stock2x2", "stock2x3")
STARTED = Path(__file__).with_name("started")
"""What every process that a test starts reads first."""


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test() -> Iterator[None]:
    """A thread that is left behind, and is no daemon, would keep pytest from ever exiting."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in left:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in left), f"threads left behind: {left}"


def _shared_pool(size: int, factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(size, factory.mktemp(f"pool{size}")) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A job of one: a single process without `TF_CONFIG`."""
    yield from _shared_pool(1, tmp_path_factory)


@pytest.fixture(scope="session")
def pool2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two workers."""
    yield from _shared_pool(2, tmp_path_factory)


@pytest.fixture(scope="session")
def pool3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Three workers."""
    yield from _shared_pool(3, tmp_path_factory)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One process with plain Keras and no strategy: what tests/scripts compare with."""
    with Pool(1, tmp_path_factory.mktemp("plain"), strategy=False) as pool:
        yield pool


@pytest.fixture(scope="session")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One process with a `MirroredStrategy` of two devices."""
    with Pool(1, tmp_path_factory.mktemp("mirrored"), strategy=2) as pool:
        yield pool


@pytest.fixture(scope="session")
def stock2x2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two workers with two devices each, on TensorFlow's `MultiWorkerMirroredStrategy`."""
    with Pool(2, tmp_path_factory.mktemp("stock2x2"), strategy=2) as pool:
        yield pool


@pytest.fixture(scope="session")
def stock2x3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """The same with three devices each."""
    with Pool(2, tmp_path_factory.mktemp("stock2x3"), strategy=3) as pool:
        yield pool


@pytest.fixture
def strategy() -> None:
    """For a test that is a script: see `tests/pool/scripts.py`. Its workers have the strategy."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a script on its pools."""
    mark = pyfuncitem.get_closest_marker("script")
    if mark is None:
        return None
    check, *pools = mark.args
    given = [pyfuncitem.funcargs[name] for name in [*inspect.signature(pyfuncitem.obj).parameters][1:]]
    check(*map(pyfuncitem._request.getfixturevalue, pools), pyfuncitem.obj, *given)
    return True


def pytest_configure(config: pytest.Config) -> None:
    """Makes collecting tests, and every start of a process by a test, cheaper; and lets Ctrl-C through.

    A shell ignores Ctrl-C for what runs behind it: the jobs that tests start shall not.
    """
    config.addinivalue_line("markers", "script(check, *pools): a test that runs on the workers of pools")
    config.addinivalue_line("markers", "ends_its_pool: a test after which the processes of its pool are gone")
    gc.disable()  # until all is imported
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(STARTED), *filter(None, paths)]))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the tests of one pool one after the other, and what takes longest first.

    `make test` has several processes for the tests, and none can use another's pools: so the tests of a pool
    go to one of them, and all others file by file. Pools and jobs of real workers come first: at the end,
    many short files fill the time until the last process is done.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=_place)


def pytest_collection_finish() -> None:
    """What is imported stays: collecting garbage need not look through TensorFlow's objects again."""
    gc.freeze()
    gc.enable()


def _pools(item: pytest.Item) -> list[str]:
    return [name for name in getattr(item, "fixturenames", ()) if name in POOLS]


def _group(item: pytest.Item) -> str:
    pools = _pools(item)
    if not pools:  # also where a test asks for one by `request.getfixturevalue`, which starts another
        return str(item.path)
    if set(pools) & {"mirrored", "stock2x2", "stock2x3"}:
        return "stock"
    return "pool2" if "pool3" in pools or pools == ["pool2"] else "pools"  # so that both take as long


def _place(item: pytest.Item) -> tuple[int, ...]:
    """That of its group; in a group, larger pools come later, so that each starts when it is first needed.

    What ends the processes of its pool comes last: otherwise they would be started once more.
    """
    groups = {"pools": 0, "pool2": 0, "stock": 1}
    folders = {"hosts": 2, "faults": 2, "workers": 3, "page": 3, "simulation": 4}
    place = groups.get(_group(item), folders.get(item.path.parent.name, 5))
    ends = item.get_closest_marker("ends_its_pool") is not None
    return place, ends, *(name in _pools(item) for name in ("pool3", "pool2", "pool1"))


def pytest_unconfigure() -> None:
    """Ends pytest with a failure although a test left a thread behind: Python would wait for it for ever."""
    left = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    if left:
        sys.stderr.write(f"threads left behind: {left}\n")
        sys.stderr.flush()
        os._exit(1)
    gc.freeze()
