"""`replicast doctor`: a table of what is well and what is not, with how to fix it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from replicast.cli.checks import Check, Verdict, all_checks

_PROBE = "replicast.cli.probe"  # by its name: as a script, its neighbours would hide modules of Python's
_DEEP_SECS = 120.0
_END_SECS = 30.0
_STYLES = {Verdict.GOOD: "green", Verdict.NOTE: "yellow", Verdict.BROKEN: "red"}


@click.command()
@click.option("--deep", is_flag=True, help="Also start two tiny workers that sum a number; takes seconds.")
def doctor(deep: bool) -> None:
    """Check this machine, and say how to fix what is wrong.

    \b
    Examples:
      replicast doctor
      replicast doctor --deep

    Exit code: 0 when all is well, 1 when something must be fixed first.
    """  # noqa: D301 - click wants a real backspace
    checks = all_checks(os.environ)
    if deep:
        checks.append(check_two_workers())
    _print_table(checks)
    broken = [check for check in checks if check.verdict is Verdict.BROKEN]
    if broken:
        click.echo(f"To be fixed first: {', '.join(check.subject for check in broken)}.")
        sys.exit(1)
    click.echo("All is well." if deep else "All is well. `replicast doctor --deep` tries two real workers.")


def check_two_workers(deadline_secs: float = _DEEP_SECS) -> Check:
    """Starts two real workers that sum a number; blocks for at most the deadline and the end of a group."""
    subject = "Two workers"
    with tempfile.TemporaryDirectory(prefix="replicast-doctor-") as run_dir:
        code, messages = _run_probe(Path(run_dir), deadline_secs)
    if code is None:
        return Check(
            subject,
            Verdict.BROKEN,
            f"no sum after {deadline_secs:.0f} s",
            "Look for a firewall on the loopback, or a machine that is overloaded",
        )
    if code != 0:
        return Check(subject, Verdict.BROKEN, "the all-reduce failed", messages.strip())
    return Check(subject, Verdict.GOOD, "an all-reduce over two local workers is right")


def _run_probe(run_dir: Path, deadline_secs: float) -> tuple[int | None, str]:
    """Runs the probe on two workers; the exit code is None when the deadline passed."""
    command = [
        sys.executable,
        "-m",
        "replicast.cli",
        "run",
        "-n",
        "2",
        "--run-dir",
        str(run_dir),
        "-m",
        _PROBE,
    ]
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    with subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as launcher:
        try:
            _, messages = launcher.communicate(timeout=deadline_secs)
            return launcher.returncode, messages
        except subprocess.TimeoutExpired:
            launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.communicate(timeout=_END_SECS)
            return None, ""
        finally:
            launcher.kill()  # Nothing to do when it has ended; else its workers go with it.


def _print_table(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found", "how to fix"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        mark = Text(check.verdict.value, style=_STYLES[check.verdict])
        table.add_row(mark, check.subject, Text(check.found), Text(check.remedy))
    Console().print(table)
