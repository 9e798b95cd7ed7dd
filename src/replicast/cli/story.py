"""`replicast demo`: three jobs of two real workers, and the commands that show what became of their replicas.

`demo/train.py` is the training script, to read and to copy. What the demo says is checked by the commands
that it shows: each compares the bits, and must end with the expected exit code.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.padding import Padding

import replicast.demo
from replicast.cli import Failed
from replicast.client import connect, is_run
from replicast.config import SECRETS, without
from replicast.errors import LaunchRefused
from replicast.launcher import bootstrap
from replicast.launcher.launcher import make_run_dir

TRAIN = Path(replicast.demo.__file__).with_name("train.py")
CHANGE_STEP, PUSH_STEP, KILL_STEP = 100, 250, 300  # train.py saves at step 200 and 400, and ends at 600.
JOB_SECS, COMMAND_SECS = 180.0, 60.0
STOP_SECS = 45.0  # Longer than `replicast run` waits for its workers to exit.
LOOK_SECS = 0.05
_WIDEST = 96  # Longer lines are hard to read, however wide the terminal.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",  # Workers on one GPU would compete for its memory.
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


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


class Story:
    def __init__(self, directory: Path, console: Console) -> None:
        self._directory = directory
        self._console = console
        self._say = console.print

    def play(self) -> None:
        """Runs all parts. Leaves no processes behind."""
        began = time.monotonic()
        shutil.copyfile(TRAIN, self._directory / "train.py")
        with self._console.status("two workers are training", spinner="line"):
            self.one_worker_assigns()
            self.every_replica_follows()
            self.a_worker_is_killed()
        took, where = f"{time.monotonic() - began:.0f} s", self._directory
        self._say(f"\nAll of this happened, in {took}. train.py and its runs: {where}", soft_wrap=True)
        needed = "" if importlib.util.find_spec("starlette") else "pip install 'replicast[page]', then "
        self._say(f"To see them in a browser: {needed}replicast serve {where}", soft_wrap=True)

    def one_worker_assigns(self) -> None:
        self._begin("Part 1: one worker assigns, as people do today")
        self._say(
            "Two workers train one model of handwritten digits. Each holds a replica of all weights, and the "
            f"replicas must stay equal. At step {CHANGE_STEP} worker 1 runs kernel.assign_add(0.05):"
        )
        with self._job("assign", "--assign --epochs 20"):
            pass
        self._say(
            f"No error, exit code 0, but since step {CHANGE_STEP} the replicas differ. More training does "
            "not help: it synchronises gradients, never weights. An audit at the end of train.py found it:"
        )
        self._run("replicast audit assign", exit_code=1)

    def every_replica_follows(self) -> None:
        self._begin("Part 2: the same change through replicast, and one from outside of the job")
        self._say(
            f"The same training, but for step {CHANGE_STEP} worker 1 calls replicas.propose(update). "
            f"Another process, which is no worker, pushes a change for step {PUSH_STEP}:"
        )
        with self._job("undisturbed") as wait_until:
            self._push("undisturbed", wait_until, " --wait")
        self._say("Every worker has reported the same digest after each update, and the last audit agrees:")
        self._run("replicast log undisturbed")
        self._run("replicast audit undisturbed --last 1")

    def a_worker_is_killed(self) -> None:
        self._begin("Part 3: a worker is killed")
        self._say(f"Part 2 again. At step {KILL_STEP} worker 1 is killed:")
        with self._job("killed", options="--max-restarts 1 ") as wait_until:
            self._push("killed", wait_until)
            # Known before, so that the kill comes at once: the next checkpoint is only 100 steps away.
            run, log = connect(self._directory / "killed"), "killed/logs/attempt-0/worker-1.log"
            wait_until(lambda: len(run.status().workers) == 2)
            process = run.status().workers[1].pid
            wait_until(lambda: f"step {KILL_STEP}\n" in (self._directory / log).read_text(errors="replace"))
            self._print_command(f"kill -9 {process}")
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                raise Failed(f"Process {process} ended before it could be killed") from None
        self._say(
            "The launcher ended worker 0 too and started both again. The new processes restored the last "
            "checkpoint and trained on; the journal applied the updates after it again, each at its step. "
            "The crash lost nothing: the job ended with the bits of part 2."
        )
        self._run("replicast checkpoint diff undisturbed killed")

    @contextlib.contextmanager
    def _job(
        self, run: str, arguments: str = "", options: str = ""
    ) -> Iterator[Callable[[Callable[[], bool]], None]]:
        """A job of train.py, until it has ended; yields a function that waits for what it does before."""
        command = f"replicast run -n 2 {options}--run-dir {run} train.py {arguments}".rstrip()
        self._print_command(command)
        deadline, output = time.monotonic() + JOB_SECS, self._directory / "run.log"
        with output.open("wb") as file:
            process = subprocess.Popen(
                # With bootstrap.py, the launcher ends with us.
                [sys.executable, bootstrap.__file__, str(os.getpid()), *_argv(command)],
                cwd=self._directory,
                env={**without(os.environ, "TF_CONFIG", *SECRETS), **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for us, and we stop the job.
            )

        def wait_until(happens: Callable[[], bool]) -> None:
            while not happens():
                code = process.poll()
                if code is not None or time.monotonic() > deadline:
                    state = f"still running after {JOB_SECS:.0f} s" if code is None else f"exit code {code}"
                    said = output.read_text(encoding="utf-8", errors="replace")
                    raise Failed(f"`{command}` did not do what the demo shows: {state}. Its output:\n{said}")
                time.sleep(LOOK_SECS)

        try:
            yield wait_until
            wait_until(lambda: process.poll() == 0)
        finally:
            process.send_signal(signal.SIGINT)  # Not if it has ended.
            try:
                process.wait(STOP_SECS)
            except subprocess.TimeoutExpired:
                process.kill()  # Its workers end with it.
                process.wait()

    def _push(self, run: str, wait_until: Callable[[Callable[[], bool]], None], more: str = "") -> None:
        # From then on a push is accepted: seconds before the workers take their first step.
        wait_until(lambda: is_run(self._directory / run))
        self._run(f"replicast push {run} --scale hidden/kernel=0.9 --at-step {PUSH_STEP}{more}")

    def _run(self, command: str, exit_code: int = 0) -> None:
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
        if done.returncode != exit_code:
            received = f"{done.returncode}:\n{done.stdout}"
            raise Failed(f"`{command}` should end with {exit_code}. Received: {received}")
        self._say(Padding(done.stdout.rstrip(), (0, 0, 0, 3)))

    def _begin(self, title: str) -> None:
        self._say(f"\n{title}", style="bold cyan")

    def _print_command(self, command: str) -> None:
        self._say(f"   $ {command}", style="bold")


def _argv(command: str) -> list[str]:
    # -P: a file of the current directory must not take the place of a module.
    return [sys.executable, "-P", "-m", "replicast", *shlex.split(command)[1:]]
