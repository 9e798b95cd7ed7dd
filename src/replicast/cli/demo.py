"""`replicast demo`: checks that it can be played, then hands over to the runner."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import click

from replicast.errors import LaunchRefused
from replicast.supervisor import make_run_dir

_NEEDED = {"tensorflow": "TensorFlow", "keras": "Keras", "sklearn": "scikit-learn"}
_INSTALL = "pip install 'replicast[cpu,demo]' (no GPU) or 'replicast[tensorflow,demo]'"
_INSTALL_DATA = "pip install 'replicast[demo]'"


@click.command()
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where logs and notes go; made if it is not there. [default: a new temporary directory]",
)
def demo(run_dir: Path | None) -> None:
    """See it work, in under a minute.

    Two real workers on this machine train one model, and the screen shows what becomes of their replicas when
    one of them changes a weight.

    \b
    Examples:
      replicast demo
      replicast demo --run-dir runs/demo

    Exit code: 0 when everything that was shown really happened; 1 when not; 130 after Ctrl-C; 2 when nothing
    was started.
    """  # noqa: D301 - click wants a real backspace
    check_installed()
    try:
        sys.exit(_play(_made(run_dir)))
    except KeyboardInterrupt:  # Before or after the workers ran; while they do, the supervisor takes it.
        click.echo("Stopped.")
        sys.exit(128 + signal.SIGINT)


def check_installed() -> None:
    """Refuses to begin where something is missing that the demo needs.

    Raises:
        LaunchRefused: Says what is missing, and how to install it.
    """
    missing = [name for module, name in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise LaunchRefused(
            f"The demo needs {' and '.join(missing)}, not installed for {sys.executable}",
            remedy=_INSTALL_DATA if missing == ["scikit-learn"] else _INSTALL,
        )


def _made(run_dir: Path | None) -> Path:
    chosen = Path(tempfile.mkdtemp(prefix="replicast-demo-")) if run_dir is None else run_dir
    return make_run_dir(chosen, program="demo", now=datetime.now())


def _play(run_dir: Path) -> int:
    from replicast.demo.acts import programme
    from replicast.demo.runner import run_demo
    from replicast.demo.screen import make_console

    return run_demo(programme(), run_dir, make_console(), os.environ)
