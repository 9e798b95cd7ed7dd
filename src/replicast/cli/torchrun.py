"""Options and values of `torchrun` that `replicast run` does not have: refused, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from replicast.config import JOB_SECRET
from replicast.errors import ClusterError, LaunchRefused

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])
_REFUSED = {
    "--rdzv-backend": (
        "the launchers have one way to meet",
        "Leave it out; --rdzv-endpoint HOST:PORT says where they do",
    ),
    "--rdzv-id": (
        "a job is known by the address at which its launchers meet",
        f"Leave it out; give each job its own --rdzv-endpoint HOST:PORT, and its own secret in {JOB_SECRET}",
    ),
    "--standalone": (
        "a job runs on this machine alone unless --hosts or --nnodes is given",
        "Leave it out",
    ),
}
_FLAGS = ("--standalone",)


def worker_count(text: str) -> int:
    """The number of workers; `torchrun` also takes "gpu", "cpu" and "auto"."""
    try:
        return int(text)
    except ValueError:
        raise ClusterError(
            "-n must be a number",
            remedy="Give the number of workers, for example -n 2; nvidia-smi -L lists the GPUs",
            received=text,
        ) from None


def refuses_torchrun_options(command: _Decorated) -> _Decorated:
    """Adds the refused options to a command. They are not in its help."""
    for name in _REFUSED:
        option = click.option(
            name,
            is_flag=name in _FLAGS,
            hidden=True,
            expose_value=False,
            is_eager=True,  # Before click misses PROGRAM.
            callback=_refuse,
        )
        command = option(command)
    return command


def _refuse(context: click.Context, option: click.Parameter, value: str | bool | None) -> None:
    if value is None or value is False:
        return
    name = option.opts[0]
    why, remedy = _REFUSED[name]
    raise LaunchRefused(f"{name} is an option of torchrun that replicast does not have: {why}", remedy=remedy)
