"""`replicast bench` without its workers: options, room, figures, table and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from replicast.cli import Failed, bench, main, story
from replicast.cli.bench import (
    Figure,
    Plan,
    check_room,
    combine,
    parse,
    parse_size,
    ratio_to_floor,
    size_text,
)
from replicast.demo import FLOOR, MEASURES
from replicast.errors import LaunchRefused
from replicast.launcher.group import EndTimeouts

Progress = Callable[[int, int, str], None]
TWO_ROUNDS = [Figure(name, (0.01 * place, 0.02 * place)) for place, name in enumerate(MEASURES, 1)]


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["bench", *arguments])
    return result.exit_code, result.stdout if result.exit_code == 0 else result.output


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans for which the command asks; it is told the same figures each time."""
    asked: list[Plan] = []

    def measure(wanted: Plan, progress: Progress) -> list[Figure]:
        asked.append(wanted)
        progress(1, 2, "round 1")
        return TWO_ROUNDS

    monkeypatch.setattr(bench, "measure", measure)
    return asked


@pytest.mark.parametrize(
    ("text", "nbytes"), [("100MB", 10**8), ("1.5 gb", 1_500_000_000), ("500kb", 500_000), ("10KB", 10_000)]
)
def test_a_size_has_its_unit(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert parse_size(size_text(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["100", "MB", "-1MB", "1KB", "0MB", "1TB", "nan MB", ""])
def test_what_is_no_size_is_a_usage_error_that_says_how_to_write_one(text: str) -> None:
    code, said = invoke("--size", text)
    assert code == 2
    assert "Invalid value for '--size'" in said
    assert "such as 500KB, 100MB or 1GB" in said or "at least 10KB" in said


@pytest.mark.parametrize("arguments", [["--workers", "0"], ["--rounds", "0"], ["--workers", "two"]])
def test_what_cannot_be_measured_is_a_usage_error(arguments: list[str]) -> None:
    code, said = invoke(*arguments)
    assert code == 2
    assert "Invalid value" in said
    assert arguments[0] in said


def test_a_machine_without_room_is_told_how_much_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "available_memory", lambda: 10**9)
    with pytest.raises(LaunchRefused, match=r"about 12 GB of memory; 1 GB are available.*smaller --size"):
        check_room(Plan(2, 10**9, 5), tmp_path)
    check_room(Plan(2, 10**6, 5), tmp_path)


def test_a_missing_tensorflow_is_refused_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, said = invoke()
    assert code == 2
    assert "The workers need TensorFlow and Keras" in said
    assert "pip install 'replicast[cpu]'" in said


def line(name: str, number: int, secs: float) -> str:
    return json.dumps({"name": name, "round": number, "secs": secs})


def test_the_slowest_worker_counts_and_the_round_to_warm_up_does_not() -> None:
    workers = [
        parse(
            "".join(
                line(name, number, secs * (number + 2)) + "\n" for name in MEASURES for number in (-1, 0, 1)
            )
        )
        for secs in (1.0, 2.0)
    ]
    assert combine(workers, rounds=2) == [Figure(name, (4.0, 6.0)) for name in MEASURES]


def test_a_worker_that_has_not_measured_everything_is_an_error() -> None:
    with pytest.raises(ValueError, match="has not measured"):
        combine([parse(line("copy", 0, 1.0) + "\n")], rounds=1)


def test_a_line_that_is_still_being_written_does_not_count() -> None:
    whole = line("copy", 0, 1.0)
    assert parse(f"{whole}\n{whole[:9]}") == {("copy", 0): 1.0}


def test_a_ratio_is_taken_within_a_round() -> None:
    floor, other = Figure(FLOOR, (1.0, 10.0, 100.0)), Figure("audit", (2.0, 20.0, 200.0))
    assert ratio_to_floor(other, [floor, other]) == 2.0


def test_json_has_every_figure_with_its_rate_and_goes_to_standard_output_alone(played: list[Plan]) -> None:
    code, said = invoke("--size", "1MB", "--rounds", "2", "--json")
    data = json.loads(said)
    assert (code, data["workers"], data["bytes"], data["rounds"]) == (0, 2, 10**6, 2)
    copy, reduced, *_ = data["figures"]
    assert copy["secs"] == [0.01, 0.02]
    assert copy["bytes_per_sec"] == pytest.approx(10**6 / 0.015)
    assert reduced["ratio_to_copy"] == pytest.approx(2.0)
    assert [one["name"] for one in data["figures"]] == list(MEASURES)


def test_the_table_has_a_line_for_every_measure(played: list[Plan]) -> None:
    code, said = invoke("--workers", "3", "--size", "1MB", "--rounds", "2")
    assert code == 0
    assert played == [Plan(3, 10**6, 2)]
    assert said.startswith("3 workers, a state of 1 MB each, 2 rounds")
    assert all(text in said for text in MEASURES.values())
    assert "15.0" in said  # ms of a copy


def test_without_a_terminal_each_round_is_a_line_on_standard_error(played: list[Plan]) -> None:
    result = CliRunner().invoke(main, ["bench", "--workers", "1", "--rounds", "1"])
    assert result.stderr == "round 1\n"
    assert result.stdout.startswith("1 worker, a state of 100 MB each, 1 round,")


def test_ctrl_c_ends_it_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(wanted: Plan, progress: Progress) -> list[Figure]:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", measure)
    assert invoke() == (130, "Stopped.\n")


def test_a_job_that_cannot_start_is_told_and_leaves_no_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Failed, match=r"The job ended with exit code 1\. Output of the launcher:"):
        bench.measure(Plan(1, 10**4, 1), lambda *_: None)
    assert list(tmp_path.iterdir()) == []


def test_bench_and_demo_give_the_launcher_the_time_that_it_gives_its_workers() -> None:
    launcher = EndTimeouts()
    assert launcher.stop_secs + launcher.kill_secs < story.STOP_SECS
