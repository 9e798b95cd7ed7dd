"""`replicast demo`: checks that it can be run, then hands over to the story."""

from __future__ import annotations

import importlib.util
import signal
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import click

from replicast.errors import LaunchRefused
from replicast.launcher import make_run_dir

_NEEDED = {"tensorflow": "TensorFlow", "keras": "Keras", "sklearn": "scikit-learn"}
_INSTALL = "pip install 'replicast[cpu,demo]' (no GPU) or 'replicast[tensorflow,demo]'"
_INSTALL_DATA = "pip install 'replicast[demo]'"


@click.command()
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the demo makes a directory for its runs. [default: among the temporary files]",
)
def demo(run_dir: Path | None) -> None:
    """See it work, in under a minute.

    Two real workers on this machine train one model. One of them changes a weight, the usual way and through
    replicast; a process outside of the job changes another; a worker is killed. The screen shows what becomes
    of the replicas.

    \b
    Examples:
      replicast demo
      replicast demo --run-dir runs/demo

    Exit code: 0 when everything that was shown really happened; 1 when not; 130 after Ctrl-C; 2 when nothing
    was started.
    """
    check_installed()
    from replicast.demo.job import DemoFailed
    from replicast.demo.story import make_console, play

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Stops the workers, as Ctrl-C does.
    try:
        play(_made(run_dir), make_console())
    except DemoFailed as failure:
        click.echo(f"Failed: {failure}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("Stopped.")
        sys.exit(128 + signal.SIGINT)


def check_installed() -> None:
    """Refuses to begin where something is missing that the demo needs."""
    missing = [name for module, name in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise LaunchRefused(
            f"The demo needs {' and '.join(missing)}, not installed for {sys.executable}",
            remedy=_INSTALL_DATA if missing == ["scikit-learn"] else _INSTALL,
        )


def _made(run_dir: Path | None) -> Path:
    """A new directory: the runs of a demo before are not to be continued."""
    parent = None if run_dir is None else make_run_dir(run_dir, program="demo", now=datetime.now())
    return Path(tempfile.mkdtemp(prefix="replicast-demo-", dir=parent))
