"""docs/reference.md has everything that users can call, and the tutorial's script is an example."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import click

import mkdocs_reference
import replicast
from replicast.cli import main
from replicast.client.run import OPERATIONS, Run

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "reference.md").read_text()
# Modules: their classes are listed.
MODULES = {"__version__", "callbacks", "optimizers"}


def documented() -> set[str]:
    return {one.rpartition(".")[2] for one in re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE)}


def test_the_reference_has_every_public_name_of_the_package() -> None:
    errors = {name for name in replicast.__all__ if hasattr(replicast.errors, name)}
    assert "errors" in documented(), "the tree of errors"
    assert set(replicast.__all__) - errors - MODULES - documented() == set()


def test_the_reference_has_every_class_that_an_operation_returns() -> None:
    def classes(annotation: Any) -> set[str]:
        own = (
            {annotation.__name__}
            if str(getattr(annotation, "__module__", "")).startswith("replicast")
            else set()
        )
        return own.union(*map(classes, get_args(annotation)))

    returned = {name for row in OPERATIONS for name in classes(get_type_hints(getattr(Run, row))["return"])}
    assert {"UpdateView", "Overview", "Metrics"} <= returned
    assert returned - documented() == set()


def test_the_built_reference_has_every_command_with_its_options_and_every_operation_of_the_table() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference.md"))
    built = mkdocs_reference.on_page_markdown(REFERENCE, page)
    for name, command in mkdocs_reference.commands(main, "replicast"):
        section = built.partition(f"### `{name}`\n")[2].partition("\n### ")[0]
        for option in command.params:
            if isinstance(option, click.Option):
                assert max(option.opts, key=len) in section, (name, option.opts)
    for row in OPERATIONS.values():
        assert f"### `{row.method} /api/runs/{{run}}{row.path}`" in built


def test_the_script_of_the_tutorial_is_the_first_example() -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    assert script in (DOCS.parent / "examples" / "first.py").read_text()
