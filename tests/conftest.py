"""The pools of workers that the tests share. Each starts when the first test uses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pool


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the tests of one pool one after the other, those without a pool first."""
    items.sort(key=lambda item: [f"pool{size}" in getattr(item, "fixturenames", ()) for size in (3, 2, 1)])
