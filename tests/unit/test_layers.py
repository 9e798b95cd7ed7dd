"""Layers import only from below, as docs/architecture.md draws them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import replicast

LAYERS = [
    {"errors", "config", "faults", "processes", "silence", "strictjson"},
    {"digest", "edits", "schema", "mapping", "blocks", "finite"},
    {"files", "tensorfiles", "parts"},
    {"update", "state", "trial", "distances", "agreement", "audit", "guard"},
    {"core"},
    {"groups", "fence", "validate", "storage", "inbox", "runfiles", "auditfiles", "checkpoint"},
    {"coordination"},
    {"transport", "lifetime", "turns"},
    {"strategy"},
    {"runtime", "supervisor"},
    {"testing"},
    {"replicas"},
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
