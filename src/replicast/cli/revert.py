"""`replicast revert`: undoes a committed update by a new one."""

from __future__ import annotations

import shlex
import sys

import click

from replicast.cli import texts
from replicast.cli.arguments import run_argument, timeout_option
from replicast.cli.push import follow
from replicast.cli.tables import make_console
from replicast.cli.update_tables import print_examination
from replicast.client import Pushed, Run


@click.command()
@run_argument
@click.argument("which", metavar="NUMBER|ID")
@click.option("--note", default="", metavar="TEXT", help="Why. [default: which update it reverts]")
@click.option("--dry-run", is_flag=True, help="Only say what it would do.")
@click.option(
    "--force", is_flag=True, help="Also when it is reverted already, or later updates overwrite it."
)
@click.option("--next-start", is_flag=True, help="Also when the job is not running: for its next start.")
@click.option("--wait", is_flag=True, help="Follow it until every worker has applied it and is verified.")
@timeout_option
def revert(
    run: Run,
    which: str,
    note: str,
    dry_run: bool,
    force: bool,
    next_start: bool,
    wait: bool,
    timeout: float,
) -> None:
    """Undo a committed update of a running job, on every worker.

    The job makes a new update, which every worker applies at the same step, or none. What was added is
    subtracted and what was scaled is divided: training since then stays. What was assigned or blended, and
    optimizer slots that were reset, go back to exactly what they were before the update: training since then
    is lost for these values. A revert can be reverted like any update.

    It is refused when later updates have changed the same variables so that it would discard them, or would
    subtract from other values than it was added to; --force reverts it all the same.

    \b
    Examples:
      replicast revert runs/first 12 --dry-run
      replicast revert runs/first 12 --note "loss went up" --wait

    Exit code: 0 when it is in the inbox, with --wait when it is verified on all workers; 1 when it is refused
    or there is no such update; 2 when the command is wrong; 3 when --timeout has passed; 130 after Ctrl-C.
    """
    found = run.revert(which, note, dry_run, force, next_start)
    if not isinstance(found, Pushed):
        print_examination(found)
        for line in found.notes:
            click.echo(texts.one_line(line))
        sys.exit(1 if found.problems else 0)
    click.echo(f"pushed {found.id}, which reverts update {texts.printable(which)}")
    if found.warning:
        click.echo(texts.printable_lines(found.warning), err=True)
    if wait:
        sys.exit(follow(found, timeout, make_console()))
    where = shlex.quote(run.where)
    click.echo(f"Follow it: replicast status {where}, or replicast show {where} {found.id}")
