"""Plays the acts on real workers, and says in the end whether all of it really happened."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from replicast.demo.acts import WORKERS, Act, total_steps
from replicast.demo.audience import Audience
from replicast.demo.screen import print_heading, print_text, progress_bar
from replicast.supervisor import Job, Settings, Timeouts, supervise
from replicast.supervisor.interruptions import STOP_SIGNALS

QUIET = {
    "CUDA_VISIBLE_DEVICES": "-1",  # Two workers on one GPU would fight for its memory.
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
RESTARTS = 1
"""As many as workers will be killed: one that fails by itself leaves none for that, and the demo fails."""
_STOPPED = tuple(128 + signum for signum in STOP_SIGNALS)
_TIMEOUTS = Timeouts(settle_secs=3.0, settle_killed_secs=0.3, stop_secs=3.0, stop_failed_secs=1.0)


def run_demo(acts: Sequence[Act], run_dir: Path, console: Console, environ: Mapping[str, str]) -> int:
    """Plays all acts. Only in the main thread.

    Args:
        acts: What to play.
        run_dir: An absolute directory that exists, for logs and notes.
        console: The screen.
        environ: The environment of the workers, to which the demo adds its own settings.

    Returns:
        0 when everything that the acts claim really happened, 1 when not; 130 after Ctrl-C.
    """
    began = time.monotonic()
    print_heading("replicast demo: two workers, one model", console)
    print_text(
        "Two processes on this machine train one model of handwritten digits together. Each holds all of the "
        "weights, its [bold]replica[/], and the replicas must stay equal.\n",
        console,
    )
    notes_dir = Path(tempfile.mkdtemp(prefix="demo-", dir=run_dir))
    with (
        progress_bar(total_steps(acts), "starting two workers", console) as bar,
        Audience(acts, notes_dir, bar, console) as audience,
        contextlib.redirect_stderr(io.StringIO()) as launcher_says,
    ):
        code = supervise(_job(notes_dir), _settings(run_dir), {**environ, **QUIET})
    said = launcher_says.getvalue()
    if code in _STOPPED:
        console.print(said.splitlines()[-1], markup=False)
        return code
    if code != 0:
        sys.stderr.write(said)
        audience.problems.append(f"the workers ended with exit code {code}")
    else:
        audience.problems += [f"the moment {moment!r} never came" for moment in audience.missing]
    _close(audience, time.monotonic() - began, run_dir, console)
    return 1 if audience.problems else 0


def _job(notes_dir: Path) -> Job:
    # -P: a file of the current directory must not take the place of a module.
    return Job(
        argv=(sys.executable, "-P", "-m", "replicast.demo.worker", str(notes_dir)),
        workers=WORKERS,
    )


def _settings(run_dir: Path) -> Settings:
    return Settings(
        run_dir=run_dir,
        log_dir=run_dir / "logs",
        tee=frozenset(),
        max_restarts=RESTARTS,
        timeouts=_TIMEOUTS,
    )


def _close(audience: Audience, took_secs: float, run_dir: Path, console: Console) -> None:
    for problem in audience.problems:
        console.print(f"Not as it should be: {problem}.", style="bold red", markup=False)
    console.print(f"{took_secs:.0f} s. The workers' logs and notes: {run_dir}", style="dim", markup=False)
