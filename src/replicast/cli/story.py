"""`replicast demo`: three parts. Each runs commands, shows what they print, and checks what the workers have.

`demo/train.py` is the training script, to read and to copy. It prints digests of the weights of its worker:
the demo fails unless they are as it says, whatever the commands print.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import click
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import replicast.demo
from replicast.cli import Failed
from replicast.client import connect, is_run
from replicast.config import SECRETS, without
from replicast.errors import LaunchRefused
from replicast.launcher import bootstrap
from replicast.launcher.launcher import make_run_dir

TRAIN = Path(replicast.demo.__file__).with_name("train.py")
WORKERS = 2
CHANGE_STEP, LAST_STEP = 100, 600  # As in train.py: when worker 1 changes a weight, and where training ends.
PUSH_STEP, KILL_STEP = 300, 400
CHANGED = "hidden/kernel"
JOB_SECS, COMMAND_SECS = 180.0, 60.0
STOP_SECS = 45.0  # Longer than `replicast run` waits for its workers to exit.
LOOK_SECS = 0.05
_WIDEST = 96  # Longer lines are hard to read, however wide the terminal.
_REPORT = re.compile(r"^step (\d+), weights ([0-9a-f]{64})$", re.MULTILINE)
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",  # Workers on one GPU would compete for its memory.
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

Reports = Sequence[Mapping[int, str]]  # For each worker the digests of its weights, by step.
Weights = Mapping[int, Sequence[str]]  # For each reported step the digests of the weights, by worker.


@click.command()
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the demo makes a directory for its runs. [default: among the temporary files]",
)
def demo(run_dir: Path | None) -> None:
    """See it work, in under a minute.

    Two real workers on this machine train one model. One of them changes a weight, the usual way and through
    replicast; a process outside of the job changes another; a worker is killed. The screen shows what becomes
    of the replicas.

    \b
    Examples:
      replicast demo
      replicast demo --run-dir runs/demo

    Exit code: 0 when everything that was shown really happened; 1 when not; 2 when nothing was started.
    """
    needed = {"tensorflow": "TensorFlow", "keras": "Keras", "sklearn": "scikit-learn"}
    missing = [name for module, name in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        install = "pip install 'replicast[cpu,demo]' (no GPU) or 'replicast[tensorflow,demo]'"
        raise LaunchRefused(
            f"The demo needs {' and '.join(missing)}, not installed for {sys.executable}",
            remedy="pip install 'replicast[demo]'" if missing == ["scikit-learn"] else install,
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Stops the workers, as Ctrl-C does.
    parent = None if run_dir is None else make_run_dir(run_dir)
    # In a new directory: the runs of an earlier demo must not be continued.
    directory = Path(tempfile.mkdtemp(prefix="replicast-demo-", dir=parent))
    Story(directory, Console(width=min(Console().width, _WIDEST), highlight=False, markup=False)).play()


class DemoJob:
    """A `replicast run …` of train.py. On exit it is stopped, if it still runs."""

    def __init__(self, directory: Path, run: str, command: str) -> None:
        self._logs, self._output = directory / run / "logs", directory / "run.log"
        self._command, self._deadline = command, time.monotonic() + JOB_SECS
        with self._output.open("wb") as file:
            self._process = subprocess.Popen(
                # With bootstrap.py, the launcher ends with us.
                [sys.executable, bootstrap.__file__, str(os.getpid()), *_argv(command)],
                cwd=directory,
                env={**without(os.environ, "TF_CONFIG", *SECRETS), **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for us, and we stop the job.
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # Its workers end with it.
            self._process.wait()

    def reports(self, attempt: int = 0) -> Reports:
        """What each worker has printed in an attempt: the digest of its weights, by step."""
        found = []
        for rank in range(WORKERS):
            log = self._logs / f"attempt-{attempt}" / f"worker-{rank}.log"
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            found.append({int(step): weights for step, weights in _REPORT.findall(text)})
        return found

    def wait_until(self, happens: Callable[[], bool], claim: str) -> None:
        """Waits for something that the job does while it runs."""
        while not happens():
            code = self._process.poll()
            if code is not None or time.monotonic() > self._deadline:
                state = f"still running after {JOB_SECS:.0f} s" if code is None else f"exit code {code}"
                said = self._output.read_text(encoding="utf-8", errors="replace")
                raise Failed(f"{claim}. Received: {state}. Output of `{self._command}`:\n{said}")
            time.sleep(LOOK_SECS)

    def finish(self) -> None:
        self.wait_until(lambda: self._process.poll() == 0, "The job should end with exit code 0")


def _argv(command: str) -> list[str]:
    # -P: a file of the current directory must not take the place of a module.
    return [sys.executable, "-P", "-m", "replicast", *shlex.split(command)[1:]]


class Story:
    """The parts, each run in the same directory."""

    def __init__(self, directory: Path, console: Console) -> None:
        self._directory = directory
        self._console = console
        self._say = console.print

    def play(self, train: Path = TRAIN) -> None:
        """Runs all parts. Leaves no processes behind."""
        began = time.monotonic()
        shutil.copyfile(train, self._directory / "train.py")
        with self._console.status("two workers are training", spinner="line"):
            self.a_worker_is_killed(self.every_replica_follows(self.one_worker_assigns()))
        took, where = f"{time.monotonic() - began:.0f} s", self._directory
        self._say(f"\nAll of this happened, in {took}. train.py and its runs: {where}", soft_wrap=True)
        needed = "" if importlib.util.find_spec("starlette") else "pip install 'replicast[page]', then "
        self._say(f"To see them in a browser: {needed}replicast serve {where}", soft_wrap=True)

    def one_worker_assigns(self) -> Weights:
        """Part 1: the usual way. Returns the resulting weights."""
        self._begin(
            "Part 1: one worker assigns, as people do today",
            "Two workers train one model of handwritten digits. Each holds a replica of all weights, "
            "and the replicas must stay equal: the table has digests of all their bits. "
            f"At step {CHANGE_STEP} worker 1 runs kernel.assign_add(0.05):",
        )
        with self._start("assign", "--assign --epochs 20") as job:
            job.finish()
        weights = weights_by_step(job.reports(), last=2 * CHANGE_STEP)
        self._print_digests({f"step {step}": digests for step, digests in weights.items()})
        for step, digests in weights.items():
            wanted = "be equal" if step < CHANGE_STEP else "differ"
            holds = all_equal(digests) == (step < CHANGE_STEP)
            require(holds, f"The replicas should {wanted} at step {step}", digests)
        self._say(
            f"No error, exit code 0, but since step {CHANGE_STEP} the replicas differ. More training does "
            "not help: it synchronises gradients, never weights. An audit at the end of train.py found it:"
        )
        self._run("replicast audit assign", exit_code=1)
        return weights

    def every_replica_follows(self, assigned: Weights) -> Weights:
        """Part 2: through replicast, from a worker and from outside. Returns the resulting weights."""
        self._begin(
            "Part 2: the same change through replicast, and one from outside of the job",
            f"The same training, but for step {CHANGE_STEP} worker 1 calls replicas.propose(update). "
            f"Another process, which is no worker, pushes a change for step {PUSH_STEP}:",
        )
        with self._start("undisturbed") as job:
            self._push(job, "undisturbed", " --wait")
            job.finish()
        weights = weights_by_step(job.reports(), last=LAST_STEP)
        steps = (CHANGE_STEP - 50, CHANGE_STEP, PUSH_STEP, LAST_STEP)
        self._print_digests({f"step {step}": weights[step] for step in steps})
        for step, digests in weights.items():
            require(all_equal(digests), f"The replicas should be equal at step {step}", digests)
        same = weights[CHANGE_STEP] == [assigned[CHANGE_STEP][1]] * WORKERS
        claim = f"At step {CHANGE_STEP} all replicas should be as worker 1's alone was in part 1"
        require(same, claim, weights[CHANGE_STEP])
        self._say(
            f"At step {CHANGE_STEP} both replicas have, bit for bit, the weights that worker 1 alone had in "
            f"part 1, and they were equal each of the {len(weights)} times that the workers reported."
        )
        self._run("replicast log undisturbed")
        self._run("replicast audit undisturbed --last 1")
        return weights

    def a_worker_is_killed(self, undisturbed: Weights) -> None:
        """Part 3: the training of part 2 again, with a crash."""
        self._begin("Part 3: a worker is killed", f"Part 2 again. At step {KILL_STEP} worker 1 is killed:")
        with self._start("killed", options="--max-restarts 1 ") as job:
            self._push(job, "killed")
            # Known before, so that the kill comes at once: the next checkpoint is only 50 steps away.
            run = connect(self._directory / "killed")
            job.wait_until(lambda: len(run.status().workers) == WORKERS, "Both workers should write notes")
            process = run.status().workers[1].pid
            job.wait_until(
                lambda: all(KILL_STEP in reported for reported in job.reports()),
                f"All workers should report step {KILL_STEP}",
            )
            self._print_command(f"kill -9 {process}")
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                raise Failed(f"Process {process} ended before it could be killed") from None
            job.finish()
        first, again = job.reports(), job.reports(attempt=1)
        begun = [next(iter(reported), None) for reported in again]
        restored = begun[0] if begun[0] and len(set(begun)) == 1 else 0
        require(bool(restored), "After the restart all workers should begin with one checkpoint", begun)
        # Of a step that was repeated after the restart, the later digests count.
        weights = weights_by_step([{**old, **new} for old, new in zip(first, again, strict=True)], LAST_STEP)
        self._print_digests(
            {
                f"restored, step {restored}": weights[restored],
                f"recovered, step {LAST_STEP}": weights[LAST_STEP],
                f"part 2, step {LAST_STEP}": undisturbed[LAST_STEP],
            }
        )
        same = weights[LAST_STEP] == undisturbed[LAST_STEP]
        require(same, "The killed job should end with the weights of part 2", weights[LAST_STEP])
        self._say(
            "The launcher ended worker 0 too and started both again. The new processes restored the "
            f"checkpoint of step {restored} and trained on; the journal applied the updates after it again, "
            "each at its step. The job ended with the bits of part 2: the crash lost nothing."
        )

    def _start(self, run: str, arguments: str = "", options: str = "") -> DemoJob:
        command = f"replicast run -n 2 {options}--run-dir {run} train.py {arguments}".rstrip()
        self._print_command(command)
        return DemoJob(self._directory, run, command)

    def _push(self, job: DemoJob, run: str, more: str = "") -> None:
        # From then on a push is accepted: seconds before the workers take their first step.
        job.wait_until(lambda: is_run(self._directory / run), "The job should start")
        self._run(f"replicast push {run} --scale {CHANGED}=0.9 --at-step {PUSH_STEP}{more}")

    def _run(self, command: str, exit_code: int = 0) -> None:
        """Runs a command and shows what it prints."""
        self._print_command(command)
        try:
            done = subprocess.run(
                _argv(command),
                cwd=self._directory,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=COMMAND_SECS,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"`{command}` has not ended after {COMMAND_SECS:.0f} s") from None
        said = f"{done.returncode}:\n{done.stdout}"
        require(done.returncode == exit_code, f"`{command}` should end with {exit_code}", said)
        self._say(Padding(done.stdout.rstrip(), (0, 0, 0, 3)))

    def _begin(self, title: str, text: str) -> None:
        self._say(f"\n{title}", style="bold cyan")
        self._say(text)

    def _print_command(self, command: str) -> None:
        self._say(f"   $ {command}", style="bold")

    def _print_digests(self, rows: Mapping[str, Sequence[str]]) -> None:
        table = Table("weights at", "worker 0", "worker 1", "equal?", box=box.SIMPLE_HEAD, show_edge=False)
        for moment, digests in rows.items():
            equal = all_equal(digests)
            cells = [*(digest[:8] for digest in digests), "yes" if equal else "NO"]
            table.add_row(moment, *(Text(cell, style="green" if equal else "bold red") for cell in cells))
        self._say(Padding(table, (1, 0)))


def require(holds: bool, claim: str, received: object) -> None:
    if not holds:
        raise Failed(f"{claim}. Received: {received}")


def all_equal(digests: Iterable[str]) -> bool:
    return len(set(digests)) == 1


def weights_by_step(reports: Reports, last: int) -> Weights:
    steps = sorted(set().union(*reports))
    for step in (*steps, last):
        reported = [rank for rank in range(WORKERS) if step in reports[rank]]
        require(len(reported) == WORKERS, f"All workers should report step {step}", reported)
    return {step: [reported[step] for reported in reports] for step in steps}
