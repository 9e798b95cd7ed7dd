"""The tests that docs/promises.md and SECURITY.md name exist, and so do the files of the architecture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
TESTS = {name for text in SOURCES.values() for name in re.findall(r"def (test_\w+)", text)}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", ["docs/promises.md", "SECURITY.md"])
def test_what_a_promise_names_as_its_test_exists(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    named = re.findall(r"`([^`]+)`", text)
    files = {name.split("::")[0] for name in named if name.startswith("tests/")}
    tests = {name for name in named if re.fullmatch(r"test_\w+", name)}
    targets = {name.removeprefix("make ").split()[0] for name in named if name.startswith("make ")}
    assert files, "the page names test files"
    assert {name for name in files if not (ROOT / name).exists()} == set()
    assert tests - TESTS == set()
    assert targets - TARGETS == set()


@pytest.mark.parametrize("page", ["architecture.md", "decisions.md"])
def test_every_file_that_the_architecture_names_exists(page: str) -> None:
    named = set(re.findall(r"`([a-z_/]+\.py)`", (ROOT / "docs" / page).read_text()))
    assert len(named) > 10, "the page names files"
    assert {
        name for name in named if not any((ROOT / base / name).exists() for base in (".", "src/replicast"))
    } == set()
