"""Layers import only from below, as docs/architecture.md draws them."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

import pytest

import replicast

LAYERS = [
    {
        "codec",
        "errors",
        "config",
        "faults",
        "processes",
        "files",
        "connections",
        "mapped_memory",
    },
    {"update"},
    {"core"},
    {"storage"},
    {"coordination", "rendezvous", "port_filter"},
    {"transport", "lifetime"},
    {"allreduce"},
    {"training", "optimizers"},
    {"launcher", "client"},
    {"replicas", "callbacks"},
    {"page"},
    {"__main__", "cli", "demo"},
]
"""From the bottom to the top. What shares a layer may know each other."""
PACKAGE = Path(replicast.__file__).parent


def layer_of(name: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if name in layer)


def imported_by(path: Path) -> set[str]:
    """The modules of the package that a file imports when it is loaded, or to be checked."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "replicast":
            names |= {alias.name for alias in node.names if (PACKAGE / f"{alias.name}.py").exists()}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("replicast."):
            names.add(str(node.module).split(".")[1])
    return names


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_its_own_layer_and_those_below(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    above = {name for name in imported_by(path) if layer_of(name) > layer_of(own)}
    assert not above


def test_every_module_has_its_layer() -> None:
    modules = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert modules == set().union(*LAYERS)


def test_no_two_files_import_each_other_for_type_checking_neither() -> None:
    names = {name_of(path): path for path in PACKAGE.rglob("*.py")}
    graph = {name: modules_in(path, names) - {name} for name, path in names.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"a cycle: {' → '.join((*way, name))}"
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_in(path: Path, names: Collection[str]) -> set[str]:
    """The files of the package that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in names:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in names else str(node.module))
    return found
