"""`replicast stop`: ends a running job with a checkpoint."""

from __future__ import annotations

import click

from replicast.cli import Failed, texts
from replicast.cli.arguments import run_argument, timeout_option
from replicast.client import Run
from replicast.errors import NoAnswer

NO_ANSWER = 3


@click.command()
@run_argument
@timeout_option
def stop(run: Run, timeout: float) -> None:
    """Stop a running job with a checkpoint, as SIGTERM does.

    All workers save at one of the next steps and exit; the launcher does not start them again. The next start
    goes on from there. A job that is not inside a training loop stops when it is.

    \b
    Examples:
      replicast stop runs/first
      replicast stop runs/first --timeout 60

    Exit code: 0 when the state is saved and the job stops; 1 when it stops and the state could not be saved,
    or the request cannot be written; 2 when the command is wrong; 3 when the job is not running or does not
    answer.
    """
    try:
        step = run.stop(timeout)
    except NoAnswer as error:
        raise Failed(texts.printable(error), NO_ANSWER) from error
    click.echo(f"stopped at step {step}: the state is saved")
