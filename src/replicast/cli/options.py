"""What several commands share: RUN, --json, --timeout, and the options of an update with what they make."""

from __future__ import annotations

import contextlib
import inspect
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import click
import msgspec

from replicast.client import connect
from replicast.client.directory import this_user
from replicast.client.run import OPERATIONS, Parameter, rows_of
from replicast.errors import NotFound, printable
from replicast.files import below
from replicast.update.edits import EditKind
from replicast.update.schema import Schema
from replicast.update.tensorfiles import HDF5, read_bytes, read_tensor_bytes
from replicast.update.update import Update, joined, update_in

_Command = TypeVar("_Command", bound=Callable[..., Any])
_ORDER = "replicast.order"
_NOT_ASKED = ("update", "trial", "max_bytes", "author")  # Made from other options, or for programs.
_METAVARS = {
    "which": "NUMBER|ID",
    "update_id": "ID",
    "rows": "1,5,10:20",
    "worker": "[WORKER]",
    "lines": "N",
    "attempt": "N",
    "timeout": "SECS",
    "last": "N",
    "at_step": "N",
    "note": "TEXT",
}
_FROM_FILES = {
    "--add": "Add each tensor to its variable.",
    "--assign": "Replace variables by tensors.",
    "--blend": "Move variables towards tensors, by --weight.",
    "--add-rows": "Add to rows: NAME and NAME.indices.",
    "--assign-rows": "Replace rows: NAME and NAME.indices.",
    "--add-low-rank": "Add the product of NAME.a and NAME.b.",
    "--update": "All edits of a saved Update.",
}


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """What a function makes of the text; what it raises is a usage error."""

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str | Path) else value
        except (ValueError, NotFound) as error:
            self.fail(printable(error), param, ctx)


def _file(text: str) -> tuple[Path, str | None]:
    """A file, and the name of the array in a .npy file where it is given: NAME=FILE."""
    name, _, rest = text.rpartition("=")
    named = bool(name and rest) and not Path(text).exists()
    path = _PLAIN.convert(rest if named else text, None, None)
    return path, name if named else None


def _table(text: str) -> dict[str, str]:
    """Names by patterns: one, or those of a JSON file."""
    if Path(text).is_file():
        return msgspec.json.decode(bytes(read_bytes(Path(text), max_bytes=2**24)), type=dict[str, str])
    module, _, name = text.partition("=")
    if not (module and name):
        raise ValueError(f"Expected MODULE=NAME or an existing JSON file. Received: {text}")
    return {module: name}


_FILE = Parsed("file", _file)
_NAMES = [*(name[2:].replace("-", "_") for name in _FROM_FILES), "adapter", "scale", "set"]
_PLAIN = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_MODULES = "The variables of an adapter's modules: JSON, or a pattern as layers.{n}.q=block_{n}/q/kernel."


def _option(name: str, text: str, **more: Any) -> click.Option:
    return click.Option([name], help=text, **more)


_EDIT_OPTIONS = [
    *(_option(*named, type=_FILE, multiple=True, metavar="FILE") for named in _FROM_FILES.items()),
    _option("--adapter", "Add a LoRA adapter as PEFT saves it.", type=_FOLDER, multiple=True, metavar="DIR"),
    _option("--names", _MODULES, type=Parsed("names", _table), multiple=True, metavar="FILE|MODULE=NAME"),
    _option("--weight", "For --blend: 1 assigns.", type=float, metavar="W"),
    _option("--scale", "Multiply variables by one number each.", multiple=True, metavar="FILE|NAME=FACTOR"),
    _option(
        "--set", "Assign a number to a scalar, as the learning rate.", multiple=True, metavar="NAME=NUMBER"
    ),
    _option("--reset-slots", "Also reset the optimizer's moments of these variables.", is_flag=True),
    _option("--allow-nonfinite", "Accept NaN and infinity.", is_flag=True),
    _option("--dry-run", "Only check it, and show what it would do.", is_flag=True),
    _option("--note", "Why. Readers of the journal see it.", metavar="TEXT"),
    _option("--author", "Who. [default: user@host]", metavar="TEXT"),
]


RUN = Parsed("run", connect)  # A run directory, or the address of a served run.


def asks(
    *operations: str, make: Callable[..., Any] = click.command, **settings: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """Makes a command with RUN, and the parameters of operations with the limits and help of the table."""
    rows = [OPERATIONS[name] for name in operations]
    found = {one.name: one for row in rows for one in row.parameters.values() if one.name not in _NOT_ASKED}
    options = [_parameter(one) for one in found.values()]
    if any(row.proposes for row in rows):
        wait = "Wait until it is verified on all workers, or its trial is decided."
        timeout = OPERATIONS["stop"].parameters["timeout"]
        options += [click.option("--wait", is_flag=True, help=wait), _parameter(timeout)]

    def add(command: Callable[..., Any]) -> click.Command:
        for option in reversed(options):
            command = option(command)
        made: click.Command = make(**settings)(click.argument("run", type=RUN)(command))
        return made

    return add


def _parameter(one: Parameter) -> Callable[[_Command], _Command]:
    metavar, kind, required = _METAVARS.get(one.name), None, one.default is inspect.Parameter.empty
    for annotated in (one.kind, *get_args(one.kind)):
        if get_origin(annotated) is Annotated and get_args(annotated)[0] in (int, float):
            # A number that is not too small; what is too large, the job refuses.
            base, limits = get_args(annotated)
            kind = (click.IntRange if base is int else click.FloatRange)(min=limits.ge)
    if required or one.name == "worker":
        default = None if required else one.default
        return click.argument(one.name, type=kind, metavar=metavar, required=required, default=default)
    names = [f"--{one.name.replace('_', '-')}", *(["-n"] if one.name == "last" else [])]
    if one.kind is bool:
        return click.option(*names, is_flag=True, help=one.help)
    return click.option(
        *names,
        type=Parsed("rows", rows_of) if one.name == "rows" else kind,
        default=one.default,
        metavar=metavar,
        show_default=isinstance(one.default, int | float),
        help=one.help,
    )


PATH = click.Path(path_type=Path)


def json_option(text: str) -> Callable[[_Command], _Command]:
    return click.option("--json", "as_json", is_flag=True, help=text)


def directory_of(path: Path) -> Path:
    """The path, if it is a run directory or has checkpoints; else a usage error that names those near it."""
    if str(path).startswith(("http:", "https:")):
        raise click.UsageError("Checkpoints are files: give the run directory, on a machine that has it.")
    if not (below(path) / "checkpoints").is_dir():
        RUN.convert(path, None, None)
    return path


class EditCommand(click.Command):
    """A command with the options of an update, which knows in which order they were given."""

    def __init__(self, name: str | None, *, params: list[click.Parameter], **more: Any) -> None:
        super().__init__(name, params=[*_EDIT_OPTIONS, *params], **more)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Parsed once more, for the order alone: click itself groups the values of each option.
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta[_ORDER] = [parameter.name for parameter in order if parameter.name in _NAMES]
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing:  # The shell asks for completions: the line is not finished.
            return rest
        if not ctx.meta[_ORDER]:
            what = "Say what to change: --set NAME=NUMBER, --add FILE, or another operation."
            raise click.UsageError(what, ctx)
        if ctx.params["names"] and not ctx.params["adapter"]:
            raise click.UsageError("--names is for the modules of --adapter.", ctx)
        if bool(ctx.params["blend"]) != (ctx.params["weight"] is not None):
            raise click.UsageError("--blend and --weight must be given together.", ctx)
        return rest


def update_of(context: click.Context, options: dict[str, Any], schema: Callable[[], Schema]) -> Update:
    """One update of all operations, in the order of the command line."""
    values = {name: iter(options[name]) for name in _NAMES}
    parts = [_part(name, next(values[name]), options, schema) for name in context.meta[_ORDER]]
    return joined(
        parts,
        this_user(),
        id=options.get("id"),
        author=options["author"],
        note=options["note"],
        reset_slots=options["reset_slots"],
        allow_nonfinite=options["allow_nonfinite"],
    )


def _part(name: str, value: Any, options: dict[str, Any], schema: Callable[[], Schema]) -> Update:
    """What one option adds. A random id, and no author: nothing but its edits counts."""
    if name == "set":
        return Update().assign(*_named_number("--set", value, "NAME=NUMBER"))
    if name == "adapter":
        return Update.from_adapter(value, schema(), names=dict(ChainMap(*options["names"])))
    if name == "scale":
        if not Path(value).is_file():
            return Update().scale(*_named_number("--scale", value, "NAME=FACTOR or an existing file"))
        value = Path(value), None
    path, array_name = value
    content = read_tensor_bytes(path, other_formats=True)
    operation = None if name == "update" else EditKind(name)
    weight = options["weight"] if name == "blend" else None
    known = schema() if bytes(content[: len(HDF5)]) == HDF5 else None
    return update_in(content, str(path), operation, weight, name=array_name, schema=known)


def _named_number(option: str, text: str, expected: str) -> tuple[str, Any]:
    name, _, number = (part.strip() for part in text.rpartition("="))
    if name and number.lower() in ("true", "false"):
        return name, number.lower() == "true"
    for kind in (int, float) if name else ():
        with contextlib.suppress(ValueError):
            return name, kind(number)
    raise click.BadParameter(f"{option} expects {expected}. Received: {text}")
