"""`replicast doctor`: a table of what works and what does not, with how to fix it."""

from __future__ import annotations

import os
import sys

import click

from replicast.supervisor.checks import Check, Verdict, all_checks, check_two_workers

_STYLES = {Verdict.GOOD: "green", Verdict.NOTE: "yellow", Verdict.BROKEN: "red"}


@click.command()
@click.option("--deep", is_flag=True, help="Also start two tiny workers that sum a number; takes seconds.")
def doctor(deep: bool) -> None:
    """Check this machine, and say how to fix what is wrong.

    \b
    Examples:
      replicast doctor
      replicast doctor --deep

    Exit code: 0 when nothing is broken, 1 when something must be fixed first.
    """  # noqa: D301 - click wants a real backspace
    checks = all_checks(os.environ)
    if deep:
        checks.append(_try_two_workers())
    _print_table(checks)
    broken = [check.subject for check in checks if check.verdict is Verdict.BROKEN]
    if broken:
        click.echo(f"To be fixed first: {', '.join(broken)}.")
        sys.exit(1)
    click.echo("All is well." if deep else "All is well. `replicast doctor --deep` tries two real workers.")


def _try_two_workers() -> Check:
    """Shows that something is going on: TensorFlow takes its time to start."""
    from replicast.cli.tables import is_live, make_console

    console, doing = make_console(stderr=True), "Two workers are starting"
    if is_live(console):
        with console.status(doing) as status:
            return check_two_workers(waiting=lambda secs: status.update(f"{doing}: {secs:.0f} s"))

    def say(secs: float) -> None:
        if round(secs) % 10 == 0:
            click.echo(f"{doing}: {secs:.0f} s", err=True)

    return check_two_workers(waiting=say)


def _print_table(checks: list[Check]) -> None:
    from rich.text import Text

    from replicast.cli.tables import make_console, make_table

    table = make_table("", "what", "found", "how to fix")
    for check in checks:
        table.add_row(
            Text(check.verdict.value, style=_STYLES[check.verdict]), check.subject, check.found, check.remedy
        )
    make_console().print(table)
