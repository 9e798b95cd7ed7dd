"""Makes two parts of docs/reference.md while the site is built: the command line and the HTTP interface.

They come from click's commands and the table in client/run.py, so they cannot be out of date. In the page,
`<!-- command line -->` and `<!-- HTTP -->` say where they go. The Python part is made by mkdocstrings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import click

from replicast.cli import main
from replicast.page.app import ROWS
from replicast.page.openapi import description

PAGE = "reference.md"
# Parameters of a request that no operation of Python and no option of a command has.
_ONLY_HTTP = {
    "dry_run": "Only check it, and say what it would do.",
    "format": "Numbers, or a file, which may be larger.",
    "operation": "What to do with the tensors of a plain file; without it, the file is a saved update.",
    "trial_max_increase": "How much worse it may get: 0.05 is 5 %.",
    "value": "The learning rate.",
    "variable": "Its name, where there are several.",
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    if page.file.src_uri != PAGE:
        return markdown
    for marker, made in (("command line", command_line), ("HTTP", http)):
        before, found, after = markdown.partition(f"<!-- {marker} -->")
        if not found:
            raise ValueError(f"{PAGE} has no place for the {marker}")
        markdown = before + made() + after
    return markdown


def command_line() -> str:
    """Every command with its help and its options."""
    return "\n".join(
        line for name, command in commands(main, "replicast") for line in _command(name, command)
    )


def http() -> str:
    """Every request: what it does, and its parameters."""
    lines = []
    for path, methods in description(ROWS)["paths"].items():
        for method, one in methods.items():
            lines += [
                f"### `{method.upper()} {path}` {{: #http-{one['operationId']} }}",
                "",
                f"{one['summary']}.",
            ]
            lines[-1] = lines[-1].replace("..", ".")
            if one["security"] == [{"token": []}]:
                lines[-1] += " Needs the token."
            lines += ["", *_parameters(one, _helps(one["operationId"])), ""]
    return "\n".join(lines)


def commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """All commands below a group, with their full names."""
    context = click.Context(group)
    for part in group.list_commands(context):
        command = group.get_command(context, part)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {part}")
        else:
            yield f"{name} {part}", command


def _command(name: str, command: click.Command) -> list[str]:
    context = click.Context(command, info_name=name, show_default=True)
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"### `{name}`", "", "```", f"{name} {usage}", "```", ""]
    for part in re.split(r"\n\s*\n", (command.help or "").replace("\f", "")):
        if "\b" in part:  # Examples: click leaves their lines as they are, and so does this page.
            rows = [row for row in part.replace("\b", "").splitlines() if row.strip()]
            lines += [
                "```",
                *(row.strip() for row in rows if not row.strip().endswith("xamples:")),
                "```",
                "",
            ]
        elif part.strip():
            lines += [_text(" ".join(part.split())), ""]
    given = [one for one in command.get_params(context) if isinstance(one, click.Option)]
    options = [record for one in given if (record := one.get_help_record(context))]
    rows = [
        f"| `{_cell(option)}` | {_text(_cell(text))} |" for option, text in options if "--help" not in option
    ]
    return [*lines, "| option | |", "| --- | --- |", *rows, ""] if rows else lines


def _helps(operation_id: str) -> dict[str, str]:
    """What is known of the parameters of a request: from its row, else from the options of `push`."""
    push = main.get_command(click.Context(main), "push")
    assert push is not None
    told = {one.name or "": one.help or "" for one in push.params if isinstance(one, click.Option)}
    rows = [row for row in ROWS if row.name == operation_id]
    return (
        told
        | _ONLY_HTTP
        | {one.name: one.help for row in rows for one in row.parameters.values() if one.help}
    )


def _parameters(operation: dict[str, Any], helps: dict[str, str]) -> list[str]:
    """The rows of a table of parameters; those of a body as well."""
    found = [
        (one["name"], one["in"], one["schema"], helps.get(one["name"], ""))
        for one in operation.get("parameters", [])
        if one["name"] != "run"
    ]
    content = operation.get("requestBody", {}).get("content", {})
    if "application/octet-stream" in content:
        found.append(("the body", "body", {}, "The file"))
    for name, schema in content.get("application/json", {}).get("schema", {}).get("properties", {}).items():
        found.append((name, "body", schema, helps.get(name, "")))
    if not found:
        return []
    rows = [
        f"| `{name}` | {place} | {_kind(schema)} | {_text(text)} |" for name, place, schema, text in found
    ]
    return ["| parameter | in | value | |", "| --- | --- | --- | --- |", *rows]


def _kind(schema: dict[str, Any]) -> str:
    """What a parameter may be, in a few words."""
    kinds = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    one = kinds[0] if kinds else schema
    said = ", ".join(f"`{choice}`" for choice in one.get("enum", ()) if choice is not None) or one.get(
        "type", ""
    )
    low, high = one.get("minimum"), one.get("maximum")
    if low is not None and high is not None and abs(high) < 2**31:
        said += f", {low:,} to {high:,}"
    elif low is not None:
        said += f", at least {low:,}"
    if schema.get("default") not in (None, "", False):
        said += f"; {schema['default']}"
    return said


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _text(text: str) -> str:
    """Text of a command as Markdown: what looks like markup is not."""
    return re.sub(r"(?<!`)([<*_\[])", r"\\\1", text)
