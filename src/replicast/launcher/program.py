"""The program that workers run: found before anything starts."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from replicast.errors import LaunchRefused

_PYTHON = re.compile(r"python[0-9.]*t?")


def check_script(script: str) -> None:
    """Finds the script before anything starts, so that N workers need not fail to find it."""
    if _PYTHON.fullmatch(Path(script).name) and not Path(script).is_dir():
        raise LaunchRefused(
            f"{script!r} is Python itself, which replicast run starts",
            remedy="Give the script alone: replicast run --workers 2 train.py",
        )
    if not Path(script).exists():
        raise LaunchRefused(
            f"There is no script {script!r} in {Path.cwd()}",
            remedy="Check the path, or give -m to run a module by its name",
        )


def check_module(module: str) -> None:
    """Finds the module as `python -m` would."""
    spec = find_module(module)
    if spec is None:
        raise LaunchRefused(
            f"There is no module {module!r} for {sys.executable}",
            remedy="Check its name, install it, or start from the directory that contains it",
        )
    if spec.submodule_search_locations is not None and find_module(f"{module}.__main__") is None:
        raise LaunchRefused(
            f"{module!r} is a package without a __main__ module", remedy="Name the module in it to run"
        )


def find_module(module: str) -> ModuleSpec | None:
    """Finds a module by its dotted name without importing its packages."""
    name, *rest = module.split(".")
    spec = _find_top(name)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def _find_top(name: str) -> ModuleSpec | None:
    if not name:
        return None
    here = PathFinder.find_spec(name, [str(Path.cwd())])  # `python -m` looks in the current directory first.
    if here is not None and here.origin is not None:
        return here
    try:
        return importlib.util.find_spec(name) or here
    except ValueError:  # A module of this process without a spec, such as __main__.
        return None
