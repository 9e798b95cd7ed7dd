"""`replicast report`: a run in one HTML file, for auditors."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from replicast.cli import Failed, texts
from replicast.cli.arguments import run_argument
from replicast.client import Run
from replicast.client.directory import DirectoryRun
from replicast.client.report import report as make_report
from replicast.storage.claims import read_chain


@click.command()
@run_argument
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True
)
def report(run: Run, output: Path) -> None:
    """Write a report on a run into one HTML file.

    Updates with authors, notes, steps and the digests of every worker and attempt; checkpoints, restarts,
    audits and the loss curve. Each record of the journal contains the hash of the one before it: a change to
    an old record shows, and the report says so. The file has no scripts and loads nothing.

    \b
    Examples:
      replicast report runs/first -o report.html

    Exit code: 0; 1 when a record of the journal is not what was written; 2 when the command is wrong.
    """
    if not isinstance(run, DirectoryRun):
        raise Failed("A report reads the files of a run: give its directory, on the machine that has it.", 2)
    output.write_text(make_report(run), encoding="utf-8")
    chain = read_chain(run.path)
    click.echo(f"{texts.printable(output)}: {texts.counted(chain.length, 'record')} of the journal")
    for problem in chain.problems:
        click.echo(texts.printable(problem), err=True)
    sys.exit(1 if chain.problems else 0)
