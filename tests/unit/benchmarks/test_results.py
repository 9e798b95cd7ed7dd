"""The results file, what two runs have in common, and the page that is made of a run."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from benchmarks import document, report
from benchmarks.results import Comparison, Result, Row, Run, slope


def run_of(**medians: float) -> Run:
    rows = tuple(Row(name, (middle, None, middle), role="peer") for name, middle in medians.items())
    return Run("2026-01-01", "make bench", {"cores": "2"}, {"torch": "1"}, [Result("step", "A", "ms", rows)])


def compared(before: Run, after: Run) -> tuple[bool, str]:
    out = io.StringIO()
    return report.compare(before, after, out), out.getvalue()


def test_a_results_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = run_of(a=1.0, b=2.0)
    ratio = Comparison("a / b", (0.5, 0.6), "at most", 1.0)
    growth = Result(
        "growth", "G", "ms", (Row("x", (None,), "broken", "ours", "x", 8),), (ratio,), ("n",), "MB"
    )
    run.results.append(growth)
    run.write(tmp_path / "a" / "run.json")
    assert Run.read(tmp_path / "a" / "run.json") == run


def test_two_runs_with_the_same_order_are_the_same_however_fast_the_machine() -> None:
    same, said = compared(run_of(a=1.0, b=2.0), run_of(a=3.0, b=6.1))
    assert same
    assert "step: the same order" in said
    assert "a: 1.0 → 3.0 (+200%)" in said


def test_another_order_is_told_with_the_contestants_that_changed_places() -> None:
    same, said = compared(run_of(a=1.0, b=2.0, c=9.0), run_of(a=2.0, b=1.0, c=9.0))
    assert not same
    assert "a was faster than b, and now is slower" in said


def test_contestants_within_15_per_cent_of_each_other_may_change_places() -> None:
    same, said = compared(run_of(a=1.0, b=1.1), run_of(a=1.1, b=1.05))
    assert same
    assert said == "step: the same order\n"


@pytest.mark.parametrize(("exponent", "expected"), [(1.0, 1.0), (0.0, 0.0), (2.0, 2.0)])
def test_a_slope_is_the_power_of_the_growth(exponent: float, expected: float) -> None:
    points = [(at, 3 * at**exponent) for at in (1.0, 10.0, 100.0)]
    assert slope(points) == pytest.approx(expected)


def test_the_generated_part_of_a_page_is_replaced_and_nothing_else() -> None:
    page = f"before\n{document.BEGIN} from old.json -->\nold\n{document.END}\nafter\n"
    new = document.replaced(page, "benchmarks/results/new.json", "\nnew\n")
    assert new == (
        f"before\n{document.BEGIN} from benchmarks/results/new.json -->\n\nnew\n{document.END}\nafter\n"
    )
    assert document.generated(new) == "\nnew\n"
    assert document.source(new) == document.REPOSITORY / "benchmarks" / "results" / "new.json"


def test_the_figures_in_docs_performance_are_those_of_its_results_file() -> None:
    page = document.PAGE.read_text()
    run = Run.read(document.source(page))
    assert document.generated(page) == document.section(run), "run: make bench, or --document FILE"


def test_the_figures_in_the_readme_are_those_of_docs_performance() -> None:
    """Its table: time of a step by torch DDP's, of `fit` on arrays and of a loop."""
    page, readme = document.PAGE.read_text(), (document.REPOSITORY / "README.md").read_text()
    shown = re.findall(r"^\| (\S+) M \| (\S+) \| (\S+) \|$", readme, re.MULTILINE)
    assert len(shown) == 3
    for parameters, fit, loop in shown:
        section = page.partition(f"({parameters}M parameters)")[2].partition("\n### ")[0]
        assert f"replicast fit / torch DDP, both on arrays: {fit} (" in section
        assert f"replicast loop / torch DDP, both on a constant batch: {loop} (" in section


def test_every_colour_of_a_picture_has_its_counterpart_for_a_dark_theme() -> None:
    for path in document.PICTURES.glob("*.svg"):
        drawing, style = path.read_text(), path.read_text().split("</style>")[0]
        assert "@media (prefers-color-scheme: dark)" in style
        for used in set(re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", drawing)):
            assert f'[style*="{used}"]' in style, f"{path.name}: {used}"


def test_every_picture_of_docs_performance_is_there() -> None:
    run = Run.read(document.source(document.PAGE.read_text()))
    names = {f"{result.name}.{ending}" for result in run.results for ending in ("svg", "png")}
    assert {path.name for path in document.PICTURES.iterdir()} == names
