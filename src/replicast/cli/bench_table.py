"""The figures of `replicast bench` as a table."""

from __future__ import annotations

from replicast.bench.figures import FLOOR, Figure, ratio_to_floor
from replicast.bench.plan import MEASURES, Plan
from replicast.cli.tables import make_console, make_table

_NUMBERS = ("ms", "lowest", "highest", "GB/s", "× copy")


def print_figures(plan: Plan, figures: list[Figure]) -> None:
    """Prints one line per measure: the slowest worker's median and range, its rate, and copies in memory."""
    table = make_table("", *_NUMBERS, right=_NUMBERS, whole=("", *_NUMBERS))
    for figure in figures:
        times = figure.median(), min(figure.secs), max(figure.secs)
        rate = plan.nbytes / figure.median() / 1e9
        by_copy = "" if figure.name == FLOOR else f"{ratio_to_floor(figure, figures):.1f}"
        table.add_row(MEASURES[figure.name], *(_milliseconds(secs) for secs in times), f"{rate:.2g}", by_copy)
    make_console().print(table)


def _milliseconds(secs: float) -> str:
    return f"{secs * 1000:.1f}" if secs < 1 else f"{secs * 1000:,.0f}"
