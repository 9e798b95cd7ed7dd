"""The core has no I/O: it imports only data types, arithmetic and itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import replicast

PACKAGE = Path(replicast.__file__).parent
PURE = {
    *("__future__", "abc", "bisect", "collections", "contextlib", "dataclasses", "enum", "itertools", "math"),
    *("base64", "hashlib", "json", "msgspec", "typing"),
}
"""No threads, locks, clocks, files, sockets, subprocesses, numpy or TensorFlow among them."""
BELOW_CORE = {
    f"replicast.{one.replace('/', '.')}": PACKAGE / f"{one}.py"
    for one in ("codec", "update/audit_report", "update/trial")
}


def imports_of(path: Path) -> set[str]:
    """All modules that a file imports, wherever in it: in functions and for type checking too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = str(node.module)
            found |= {f"{module}.{alias.name}" for alias in node.names if is_module(f"{module}.{alias.name}")}
            found.add(module)
    return found


def is_module(name: str) -> bool:
    path = PACKAGE.parent / Path(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def name_of(path: Path) -> str:
    root = PACKAGE.parent if path.is_relative_to(PACKAGE) else Path(__file__).parents[3]
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


CORE = sorted((PACKAGE / "core").rglob("*.py"))
SIMULATION = sorted((Path(__file__).parents[2] / "simulator").rglob("*.py"))


@pytest.mark.parametrize("path", [*CORE, *BELOW_CORE.values()], ids=name_of)
def test_a_file_of_the_core_imports_only_the_core_and_what_is_pure(path: Path) -> None:
    others = {
        name
        for name in imports_of(path)
        if name.split(".")[0] not in PURE and not name.startswith("replicast.core") and name not in BELOW_CORE
    }
    assert not others


@pytest.mark.parametrize("path", SIMULATION, ids=name_of)
def test_the_simulation_has_no_threads_no_files_and_no_clock(path: Path) -> None:
    allowed = PURE | {"heapq", "random"}
    if path.name == "__main__.py":
        allowed |= {"argparse", "sys", "time"}  # it measures how fast it is
    if path.name == "world.py":
        allowed |= {"gc"}
    others = {name for name in imports_of(path) if name.split(".")[0] not in allowed | {"replicast", "tests"}}
    assert not others
