"""What a process outside of the job does in an act: started, shown, waited for, stopped."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from replicast.demo import act_two
from replicast.demo.act_two import PUSHED
from replicast.demo.errands import Errand, start
from tests.unit.demo.played import ACT_THREE_AS_CLAIMED, AS_CLAIMED, Errands, Screen, play


def test_an_errand_can_be_a_command_of_the_shell(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as victim:
        running = start(Errand("", ("-9", str(victim.pid)), tmp_path, program="kill"), 80)
        assert running.exit_code(60.0) == 0
        assert victim.wait(60.0) == -signal.SIGKILL
    assert running.output() == ""


def test_an_errand_is_shown_as_typed_and_with_all_that_it_printed(tmp_path: Path, errands: Errands) -> None:
    screen = Screen()
    audience = play(tmp_path, AS_CLAIMED, screen)
    assert [errand.program for errand in errands.started] == ["replicast", "kill"]
    assert f"   $ {errands.started[0].command}\n   the receipt [of the errand]\n" in screen.text
    assert audience.problems == []
    assert errands.stopped == 0


def test_an_errand_that_fails_is_a_problem(tmp_path: Path, errands: Errands) -> None:
    errands.code = 3
    screen = Screen()
    problems = play(tmp_path, AS_CLAIMED, screen).problems
    assert problems == [f"`{errand.command}` ended with exit code 3" for errand in errands.started]
    assert "the receipt [of the errand]" in screen.text


def test_an_errand_that_does_not_end_is_stopped_when_the_workers_have_ended(
    tmp_path: Path, errands: Errands
) -> None:
    errands.code = None
    audience = play(tmp_path, AS_CLAIMED, Screen())
    assert errands.stopped == 1
    assert audience.missing == [PUSHED, act_two.CONTINUED, *ACT_THREE_AS_CLAIMED]


def test_an_errand_is_a_process_whose_output_and_exit_code_are_kept(tmp_path: Path) -> None:
    running = start(Errand("", ("no-such-command",), tmp_path), 80)
    assert running.exit_code(60.0) == 2
    assert "No such command 'no-such-command'" in running.output()
    running.stop()


def test_an_errand_that_is_stopped_has_ended(tmp_path: Path) -> None:
    running = start(Errand("", ("run", "-n", "1", str(_script_that_waits(tmp_path))), tmp_path), 80)
    assert running.exit_code() is None
    running.stop()
    assert running.exit_code() is not None


def _script_that_waits(directory: Path) -> Path:
    script = directory / "waits.py"
    script.write_text("import threading; threading.Event().wait()")
    return script
