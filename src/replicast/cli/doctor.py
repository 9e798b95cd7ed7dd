"""`replicast doctor`: a table of what works and what does not, with how to fix it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from replicast.launcher.checks import Check, Verdict, all_checks, check_two_workers
from replicast.launcher.plan import DEFAULT_PORT, JobPlan, place_on_hosts, read_secret

_STYLES = {Verdict.GOOD: "green", Verdict.NOTE: "yellow", Verdict.BROKEN: "red"}


@click.command(context_settings={"show_default": True})
@click.option("--deep", is_flag=True, help="Also start two tiny workers that sum a number; takes seconds.")
@click.option(
    "--hosts", metavar="H1,H2", help="Can these machines run a job? Start it on each at the same time."
)
@click.option(
    "--node-rank", type=int, metavar="I", help="With --hosts: the index of this machine. [default: found]"
)
@click.option(
    "--port", default=DEFAULT_PORT, metavar="P", help="With --hosts: the first worker's port on each."
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="With --hosts: a run directory that all should see.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=60.0,
    metavar="SECS",
    help="With --hosts: how long to wait for the other machines.",
)
@click.option(
    "--secret-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --hosts: as for replicast run.",
)
def doctor(
    deep: bool,
    hosts: str | None,
    node_rank: int | None,
    port: int,
    run_dir: Path | None,
    timeout: float,
    secret_file: Path | None,
) -> None:
    """Check this machine, or the machines of a job, and say how to fix what is wrong.

    With --hosts, start the same command on each machine at the same time, as you would start `replicast run`.
    They meet at the first one, and each prints the same table: names, ports, clocks, versions, shared memory,
    and who sees the run directory. A machine that does not join is named.

    \b
    Examples:
      replicast doctor
      replicast doctor --deep
      replicast doctor --hosts gpu1,gpu2 --run-dir /shared/first            (the same on gpu1 and gpu2)
      for h in gpu1 gpu2; do ssh $h replicast doctor --hosts gpu1,gpu2 & done; wait

    Exit code: 0 when nothing is broken, 1 when something must be fixed first, 2 when the command is wrong or
    the first machine does not answer.
    """
    if hosts is None:
        checks = all_checks(os.environ)
    else:
        from replicast.launcher.hosts_doctor import Visit

        visit = Visit(
            job=place_on_hosts(JobPlan(argv=(), port=port), hosts=hosts, node_rank=node_rank),
            secret=read_secret(os.environ, secret_file),
            timeout_secs=timeout,
            run_dir=run_dir.absolute() if run_dir is not None else None,
            report=lambda line: click.echo(f"replicast: {line}", err=True),
        )
        checks = visit.checks(os.environ)
    if deep:
        checks.append(_try_two_workers())
    _print_table(checks)
    broken = [check.subject for check in checks if check.verdict is Verdict.BROKEN]
    if broken:
        click.echo(f"Fix first: {', '.join(broken)}.")
        sys.exit(1)
    try_deep = "" if deep else " `replicast doctor --deep` tries two real workers."
    click.echo(f"All is well.{try_deep}" if hosts is None else "These hosts can run a job together.")


def _try_two_workers() -> Check:
    """Shows that something is going on: TensorFlow takes its time to start."""
    from replicast.cli.texts import is_live, make_console

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

    from replicast.cli.texts import make_console, make_table

    rows = [
        (Text(one.verdict.value, style=_STYLES[one.verdict]), one.subject, one.found, one.remedy)
        for one in checks
    ]
    make_console().print(make_table("", "what", "found", "how to fix", rows=rows))
