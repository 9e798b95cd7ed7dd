"""`replicast push`: reads what is to be changed, checks it against the run, and hands it to the job."""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replicast.cli.rundirs import run_argument, timeout_option

if TYPE_CHECKING:
    from replicast.trial import Trial

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OPERATIONS = (
    "add",
    "assign",
    "scale",
    "blend",
    "add_rows",
    "assign_rows",
    "add_low_rank",
    "saved",
    "numbers",
)
ORDER = "replicast.push.order"
_COMMAND_LINE = click.core.ParameterSource.COMMANDLINE


class InOrder(click.Command):
    """A command that knows the order in which its options were given, also that of different ones."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses once more, for the order alone: click itself groups the values of each option."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta[ORDER] = [parameter.name for parameter in order if parameter.name in OPERATIONS]
        return super().parse_args(ctx, args)


@click.command(cls=InOrder)
@run_argument
@click.option("--add", type=_FILE, multiple=True, metavar="FILE", help="Add each tensor to its variable.")
@click.option("--assign", type=_FILE, multiple=True, metavar="FILE", help="Replace variables by tensors.")
@click.option(
    "--scale",
    multiple=True,
    metavar="FILE|NAME=FACTOR",
    help="Multiply variables by one number each.",
)
@click.option(
    "--blend", type=_FILE, multiple=True, metavar="FILE", help="Move variables towards tensors, by --weight."
)
@click.option("--weight", type=float, metavar="W", help="For --blend: 0 changes nothing, 1 is to assign.")
@click.option(
    "--add-rows", type=_FILE, multiple=True, metavar="FILE", help="Add to rows: NAME and NAME.indices."
)
@click.option(
    "--assign-rows", type=_FILE, multiple=True, metavar="FILE", help="Replace rows: NAME and NAME.indices."
)
@click.option(
    "--add-low-rank", type=_FILE, multiple=True, metavar="FILE", help="Add the product of NAME.a and NAME.b."
)
@click.option(
    "--update", "saved", type=_FILE, multiple=True, metavar="FILE", help="All edits of a saved Update."
)
@click.option(
    "--set",
    "numbers",
    multiple=True,
    metavar="NAME=NUMBER",
    help="Assign one number to a variable without dimensions, such as the learning rate.",
)
@click.option("--note", metavar="TEXT", help="Why, for whoever reads the journal.")
@click.option("--author", metavar="TEXT", help="Who. [default: user@host]")
@click.option("--id", "update_id", metavar="ID", help="Makes pushing it twice a no-op. [default: random]")
@click.option(
    "--at-step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Apply it at this step. [default: as soon as possible]",
)
@click.option(
    "--trial-steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep it only if it proves itself in N steps; else every replica goes back.",
)
@click.option("--trial-metric", default="loss", metavar="NAME", show_default=True, help="Judge it by this.")
@click.option(
    "--max-increase",
    type=float,
    default=0.0,
    metavar="PART",
    show_default=True,
    help="By how much the metric may get worse: 0.05 is 5 %.",
)
@click.option(
    "--trial-mode",
    type=click.Choice(["min", "max"]),
    default="min",
    show_default=True,
    help="Whether smaller or larger is better.",
)
@click.option("--reset-slots", is_flag=True, help="Also reset the optimizer's moments of what is touched.")
@click.option("--allow-nonfinite", is_flag=True, help="Accept NaN and infinity.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only check it against RUN, and show what it would do. A guard of the job is not known here.",
)
@click.option("--wait", is_flag=True, help="Follow it until every worker has applied it and is verified.")
@timeout_option("--wait")
@click.pass_context
def push(context: click.Context, /, run: Path, **options: Any) -> None:
    """Change the weights of a running job, on every worker.

    The change is checked against the variables of RUN, put into its inbox, and applied by all workers at the
    same step, or by none. Several operations make one update, in the order in which they are given. FILE is a
    safetensors file whose tensors are named like variables; the end of a name will do if only one variable
    has it. A guard that the job has is the job's to ask: it may still refuse. TensorFlow is not needed here.

    \b
    Examples:
      replicast push runs/first --set optimizer/learning_rate=0.0005 --wait
      replicast push runs/first --add delta.safetensors --note "fix drifted bias"
      replicast push runs/first --scale dense/kernel=0.5 --reset-slots --at-step 2000
      replicast push runs/first --blend average.safetensors --weight 0.1 --dry-run
      replicast push runs/first --add delta.safetensors --trial-steps 50 --max-increase 0.05 --wait

    Exit code: 0 when it is in the inbox, with --wait when it is verified on all workers; 1 when it is refused
    or has failed; 2 when the command is wrong; 3 when --timeout has passed; 4 when its trial has ended with
    the state of before; 130 after Ctrl-C.
    """  # noqa: D301 - click wants a real backspace
    check_usage(options, given(context))
    operations = in_order(context.meta[ORDER], options)
    from replicast.cli.pushing import Wish, carry_out

    wish = Wish(
        run=run,
        operations=tuple(operations),
        weight=options["weight"],
        note=options["note"],
        author=options["author"],
        id=options["update_id"],
        at_step=options["at_step"],
        reset_slots=options["reset_slots"],
        allow_nonfinite=options["allow_nonfinite"],
        wait_secs=options["timeout"] if options["wait"] else None,
        trial=_trial(options),
    )
    try:
        code = carry_out(wish, dry_run=options["dry_run"])
    except KeyboardInterrupt:  # While it waits, Ctrl-C is taken there.
        click.echo("Stopped. Nothing was pushed.", err=True)
        code = 128 + signal.SIGINT
    sys.exit(code)


def _trial(options: dict[str, Any]) -> Trial | None:
    from replicast.trial import Trial

    if options["trial_steps"] is None:
        return None
    try:
        return Trial(
            options["trial_steps"], options["trial_metric"], options["max_increase"], options["trial_mode"]
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def named_number(option: str, text: str) -> tuple[str, float | int | bool]:
    """The two sides of NAME=NUMBER.

    Raises:
        click.BadParameter: It is something else.
    """
    name, _, number = text.rpartition("=")
    value = _number(number.strip())
    if not name.strip() or value is None:
        expected = "NAME=FACTOR, or a file that is there" if option == "--scale" else "NAME=NUMBER"
        raise click.BadParameter(f"{option} expects {expected}. Received: {text}")
    return name.strip(), value


def _number(text: str) -> float | int | bool | None:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def given(context: click.Context) -> set[str]:
    """The options that are on the command line, also those that say what is the default."""
    return {name for name in context.params if context.get_parameter_source(name) is _COMMAND_LINE}


def check_usage(options: dict[str, Any], given: Collection[str] = ()) -> None:
    """Refuses a command that asks for nothing, for a weight without a blend, or how to judge no trial."""
    if not any(options[name] for name in OPERATIONS):
        raise click.UsageError(
            "Say what to change: --set NAME=NUMBER, --add FILE, or another operation of --help."
        )
    if bool(options["blend"]) != (options["weight"] is not None):
        raise click.UsageError("--blend and --weight belong together: one needs the other.")
    about_trial = {"trial_metric", "max_increase", "trial_mode"}
    if options.get("trial_steps") is None and about_trial.intersection(given):
        raise click.UsageError("--trial-metric, --max-increase and --trial-mode are for --trial-steps N.")


def in_order(order: list[str], options: dict[str, Any]) -> list[tuple[str, Any]]:
    """Each operation with its value, as they stand on the command line."""
    values = {name: iter(options[name]) for name in OPERATIONS}
    operations: list[tuple[str, Any]] = []
    for name in order:
        value = next(values[name])
        if name == "numbers":
            operations.append(("assign", named_number("--set", value)))
        elif name == "scale" and not Path(value).is_file():
            operations.append(("scale", named_number("--scale", value)))
        else:
            operations.append((name, Path(value)))
    return operations
