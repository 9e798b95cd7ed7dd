"""Draws a table: bars, dots on a logarithmic axis where the figures are far apart, lines for growth.

An SVG follows the reader's light or dark theme; a PNG is light. Both have their own background.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from benchmarks.report import short
from benchmarks.results import Result, Role, Row, line, series_of

INK, PAPER, FAINT = "#1f2328", "#fdfdfe", "#d0d7de"
COLORS: dict[Role, str] = {"ours": "#0969da", "peer": "#bc4c00", "floor": "#1a7f37", "part": "#6e7781"}
LINES = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#6e7781")
DARK = {
    INK: "#e6edf3",
    PAPER: "#0d1117",
    FAINT: "#3d444d",
    "#0969da": "#58a6ff",
    "#bc4c00": "#f0883e",
    "#1a7f37": "#3fb950",
    "#6e7781": "#9198a1",
    "#8250df": "#bc8cff",
}
"""The same colours for readers with a dark theme."""
NAMES: dict[Role, str] = {"ours": "replicast", "peer": "peer", "floor": "floor", "part": "for orientation"}
FAR_APART = 15.0
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "replicast",  # the same figures give the same bytes
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
}


def draw(result: Result, directory: Path) -> list[Path]:
    """Writes NAME.svg and NAME.png of a table."""
    with mpl.rc_context(STYLE):
        figure = _growth(result) if result.axis else _bars(result)
        paths = [directory / f"{result.name}.{ending}" for ending in ("svg", "png")]
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150, metadata={"Software": None})
    paths[0].write_text(themed(paths[0].read_text(), result.title))
    return paths


def themed(svg: str, title: str) -> str:
    """Adds the colours for a dark theme, and a title for those who do not see the picture."""
    rules = "".join(
        f'[style*="{name}: {light}"]{{{name}:{dark}!important}}'
        for light, dark in DARK.items()
        for name in ("fill", "stroke")
    )
    words = title.replace("&", "&amp;").replace("<", "&lt;")
    style = f"<title>{words}</title>\n<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    return re.sub(r"(<svg [^>]*>)", lambda found: f"{found[1]}\n{style}", svg, count=1)


def _canvas(result: Result, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(8.4, height), layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(result.title, fontsize=11, fontweight="bold", x=0.01, ha="left", wrap=True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


def _bars(result: Result) -> Figure:
    rows = [row for row in result.rows if row.measured()]
    if not any(row.topic for row in rows):
        rows.sort(key=lambda row: row.median() or 0.0)
    rows.reverse()  # the first one on top
    figure, axes = _canvas(result, 1.3 + 0.36 * len(rows))
    medians = [row.median() or 0.0 for row in rows]
    is_wide = bool(medians) and max(medians) > FAR_APART * max(1e-9, min(medians))
    if is_wide:
        axes.set_xscale("log")
        axes.set_xlim(min(medians) / 1.6, max(max(row.measured()) for row in rows) * 2.2)
    for place, row in enumerate(rows):
        _bar(axes, place, row, is_wide)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(
        f"{result.unit}; line: lowest to highest{', logarithmic' if is_wide else ''}", x=1.0, ha="right"
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(axis="x", linewidth=0.6)
    _explain(axes, rows)
    return figure


def _bar(axes: Any, place: int, row: Row, is_wide: bool) -> None:
    middle, figures, color = row.median() or 0.0, row.measured(), COLORS[row.role]
    if is_wide:
        axes.plot([middle], [place], "o", color=color, markersize=8)
    else:
        axes.barh(place, middle, height=0.62, color=color)
    axes.plot([min(figures), max(figures)], [place, place], color=INK, linewidth=1.2)
    axes.annotate(
        short(middle),
        (max(figures), place),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontweight="bold" if row.role == "ours" else "normal",
    )


def _explain(axes: Any, rows: list[Row]) -> None:
    """A legend of the roles that are there."""
    roles = [role for role in NAMES if any(row.role == role for row in rows)]
    for role in roles:
        axes.plot([], [], "s", color=COLORS[role], label=NAMES[role])
    if len(roles) > 1:
        axes.figure.legend(loc="outside lower right", ncols=len(roles), frameon=False, fontsize=9)
    axes.margins(x=0.1)


def _growth(result: Result) -> Figure:
    figure, axes = _canvas(result, 4.6)
    axes.set(xscale="log", yscale="log", xlabel=result.axis, ylabel=result.unit)
    slopes = result.slopes()
    for name, color in zip(series_of(result.rows), LINES, strict=False):
        points = line(result.rows, name)
        if len(points) < 2:
            continue
        across, up = zip(*points, strict=True)
        axes.plot(across, up, "o-", color=color, label=f"{name}: slope {slopes[name]:.2f}")
        fitted = _fitted(points, slopes[name])
        axes.plot(across, fitted, "--", color=color, linewidth=0.9)
        axes.annotate(
            short(up[-1]), (across[-1], up[-1]), xytext=(6, 0), textcoords="offset points", va="center"
        )
    places = sorted({row.at for row in result.rows if row.at is not None})
    axes.set_xticks(places, [f"{place:,g}" for place in places], minor=False)
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(linewidth=0.6)
    axes.legend(frameon=False, title="dashed: the fitted slope", alignment="left", fontsize=9)
    return figure


def _fitted(points: list[tuple[float, float]], exponent: float) -> list[float]:
    """The straight line of that slope through the middle of the points, both axes being logarithmic."""
    product = 1.0
    for across, up in points:
        product *= (up / across**exponent) ** (1 / len(points))
    return [product * across**exponent for across, _ in points]
