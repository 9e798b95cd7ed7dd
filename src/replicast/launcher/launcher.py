"""Runs a job on this host, from top to bottom: one attempt after another, until it is over.

    lock the run directory → is another host's job alive in it? → catch signals → [other hosts]
        ┌→ begin: which attempt → reserve ports → start the workers → wait until all have exited ─┐
        └──────────────── a restart is left ←── decide, say who failed, note it in states.jsonl ←─┘→ exit code

On one host the decision is `order_after`; on several, the launchers decide together (`Peers`). The
launcher stays light and quick: it imports neither TensorFlow nor numpy before the workers have been started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from replicast.config import JOB_SECRET, SECRETS, TAKE_OVER, shared_memory_directory, without
from replicast.errors import ClusterError, LaunchRefused, printable
from replicast.files import RunDir, RunPath, below, make_durably
from replicast.launcher.failure import (
    ONE_HOST,
    GroupEnd,
    Hosts,
    LaunchOrder,
    Phase,
    WorkerExit,
    duration,
    end_of,
    order_after,
    reason,
    report,
    restart_line,
    short_path,
    signal_name,
)
from replicast.launcher.group import EndTimeouts, Group
from replicast.launcher.hosts_leader import HostTimeouts
from replicast.launcher.hosts_link import Part, Peers, make_peers
from replicast.launcher.interruptions import Interruptions
from replicast.launcher.plan import (
    JobPlan,
    bootstrapped,
    hold_ports,
    log_path,
    plan_workers,
    this_machine,
    warnings,
)
from replicast.launcher.screen import Screen, make_screen, without_colours
from replicast.strictjson import is_integer

if TYPE_CHECKING:
    from replicast.storage.run_files import WorkerNote

RUNS = Path("runs")
_PAGE_START_SECS = 15.0
_PAGE_END_SECS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    run_dir: Path | None  # None: the first launcher of several hosts gives its name.
    log_dir: RunPath | None  # None: in the run directory
    tee: frozenset[int]
    max_restarts: int = 0
    timeouts: EndTimeouts = field(default_factory=EndTimeouts)
    secret: bytes = b""
    host_timeouts: HostTimeouts = field(default_factory=HostTimeouts)
    page: tuple[str, int] | None = None  # the address of `--serve`

    def logs(self, run_dir: RunDir) -> RunPath:
        return below(run_dir) / "logs" if self.log_dir is None else self.log_dir


def supervise(job: JobPlan, settings: Settings, environ: Mapping[str, str]) -> int:
    """Runs a job to its end and reports on standard error. Only in the main thread."""
    of_page, environ = environ, without(environ, *SECRETS)  # No worker needs them.
    run_dir, peers = settings.run_dir, None
    with contextlib.ExitStack() as stack:

        def use(directory: Path) -> None:
            stack.enter_context(locked(directory, job.ranks[0]))
            if settings.page is not None:
                page = page_beside(settings.page, directory, settings.logs(directory), of_page)
                print(f"replicast: {stack.enter_context(page)}", file=sys.stderr, flush=True)

        if run_dir is not None:
            use(run_dir)
            # Before signals are caught: Ctrl-C ends the wait.
            environ = _wait_for_other_hosts_job(job, run_dir, environ)
        interruptions = stack.enter_context(Interruptions())
        screen = make_screen(sys.stdout, sys.stderr, tee=settings.tee, environ=environ)
        stack.enter_context(contextlib.closing(screen))
        if job.endpoint is not None:
            part = Part(
                job=job,
                endpoint=job.endpoint,
                secret=settings.secret,
                timeouts=settings.host_timeouts,
                max_restarts=settings.max_restarts,
                next_attempt=None if run_dir is None else next_attempt(settings.logs(run_dir), job.ranks),
                run_name="" if run_dir is None else run_dir.name,
            )
            peers = stack.enter_context(make_peers(part, screen, interruptions))
        if run_dir is None:
            if peers is None:
                raise ValueError("Only the launchers of other hosts have a run directory to learn")
            order = peers.ask_run_name()
            if order.phase is Phase.OVER:
                report(order, None, peers.hosts, screen)
                return order.code
            run_dir = make_run_dir(RUNS / Path(order.run_name).name)
            use(run_dir)
            peers.ready(next_attempt(settings.logs(run_dir), job.ranks))
        for line in warnings(job, settings.secret, environ):
            screen.tell(f"replicast: warning: {line}")
        supervision = _Supervision(
            job, settings, run_dir, settings.logs(run_dir), environ, screen, interruptions, peers
        )
        return supervision.run()


def _wait_for_other_hosts_job(job: JobPlan, run_dir: RunDir, environ: Mapping[str, str]) -> dict[str, str]:
    """Waits until no job of another host runs in the directory; one of this host would hold the lock.

    Returns the environment of the workers: their first one need not watch again what was watched here.
    """
    allowed = ""
    if 0 in job.ranks and (below(run_dir) / "groups").is_dir():
        from replicast.storage.run_files import check_free  # Imports numpy: not for a new run.

        any_job = environ.get(TAKE_OVER, "")
        allowed = check_free(run_dir, any_job, tell=lambda line: print(f"replicast: {line}", file=sys.stderr))
    return {**without(environ, TAKE_OVER), **({TAKE_OVER: allowed} if allowed else {})}


@dataclass(slots=True)
class _Supervision:
    job: JobPlan
    settings: Settings
    run_dir: Path
    log_dir: RunPath
    environ: Mapping[str, str]
    screen: Screen
    interruptions: Interruptions
    peers: Peers | None
    began: float = field(default_factory=time.monotonic)
    has_started: bool = False

    @property
    def hosts(self) -> Hosts:
        return ONE_HOST if self.peers is None else self.peers.hosts

    def run(self) -> int:
        attempt = next_attempt(self.log_dir, self.job.ranks)
        order = LaunchOrder(phase=Phase.RUN, attempt=attempt, max_restarts=self.settings.max_restarts)
        while True:
            if self.peers is not None:
                order = self.peers.begin()
            attempt, end = order.attempt, None
            if order.phase is not Phase.OVER:
                end = self._run_attempt(order)
                if self.peers is not None:
                    order = self.peers.decide(end)
                else:
                    left = bool(end.left_behind)
                    order = order_after(order, end.first_failure, end.interrupted_by, left_behind=left)
                if any(ended.code for ended in end.exits):  # Killed workers leave their shared memory.
                    from replicast.transport.shared import remove_leftovers

                    with contextlib.suppress(ClusterError):  # the directory may be gone
                        remove_leftovers(shared_memory_directory(self.environ))
            if order.phase is Phase.OVER:
                self._finish(attempt, order, end)
                return order.code
            report(order, end, self.hosts, self.screen)
            why = "" if order.failure is None else reason(order.failure, self.hosts)
            self._note("restarting", order.attempt, order.failure, why)
            self.screen.tell(restart_line(order, self.hosts))

    def _run_attempt(self, order: LaunchOrder) -> GroupEnd:
        job = replace(self.job, hosts=order.hosts) if order.hosts else self.job
        attempt_dir = make_attempt_dir(self.log_dir, order.attempt)
        fixed = job.fixed_ports
        with hold_ports([0] * job.workers if fixed is None else fixed) as ports:
            plans = plan_workers(
                job,
                ports=ports.numbers,
                attempt=order.attempt,
                run_dir=self.run_dir,
                log_dir=self.log_dir,
                machine=this_machine(self.environ),
                environ=self.environ,
            )
            start = f"logs in {short_path(attempt_dir)}; starting, which takes some seconds"
            self.screen.tell(f"replicast: {_who(job)}, attempt {order.attempt}, {start}")
            group = Group(
                plans,
                screen=self.screen,
                tee=self.settings.tee,
                timeouts=self.settings.timeouts,
                interruptions=self.interruptions,
                peers=self.peers,
            )
            return group.run(self.environ, lambda: self._started(order))

    def _started(self, order: LaunchOrder) -> None:
        """The workers were started: this loads numpy, for which they need not wait."""
        if not self.has_started:
            self._note("starting", order.attempt)
        self.has_started = True

    def _finish(self, attempt: int, order: LaunchOrder, end: GroupEnd | None) -> None:
        """Says how the job ended, and notes it; `end` is None if nothing ran."""
        failure = order.failure
        was_told_to = failure is not None and failure.was_told_to
        by, at_step = _stopped_by(self.run_dir, attempt) if was_told_to else ("", 0)
        report(order, end, self.hosts, self.screen, f"stopped by {by} at step {at_step}" if by else "")
        notes = [] if end is None else _notes(self.run_dir, attempt)
        step = max((note.step for note in notes), default=None)  # None without notes: a job without Replicas
        if order.code == 0:
            if end is not None and self.settings.tee:
                restarts = order.restarts
                after = f" after {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
                facts = [_who(self.job), *([] if step is None else [f"step {step}"])]
                facts.append(duration(time.monotonic() - self.began))
                logs = short_path(self.log_dir / f"attempt-{attempt}")
                self.screen.tell(f"replicast: finished{after}: {', '.join(facts)}, logs in {logs}")
            self._note("finished", attempt, step=step)
        elif order.signal is not None:
            self._note("stopped", attempt, why=signal_name(order.signal), step=step)
        elif failure is not None and was_told_to:
            self._note("stopped", attempt, why=by or f"SIGTERM to worker {failure.worker}", step=step)
        else:
            why = "workers could not be killed" if failure is None else reason(failure, self.hosts)
            self._note("failed", attempt, failure, why, step)

    def _note(
        self,
        state: str,
        attempt: int,
        failure: WorkerExit | None = None,
        why: str = "",
        step: int | None = None,
    ) -> None:
        """Writes the state of the job. The launcher of worker 0 does; those of other hosts write nothing."""
        if 0 not in self.job.ranks:
            return
        from replicast.storage import run_files  # Imports numpy: not at start-up.

        worker, lines = None, tuple[str, ...]()
        if failure is not None:
            worker = failure.host * self.job.workers if failure.worker is None else failure.worker
            lines = tuple(map(without_colours, failure.lines))
        change = run_files.Change(
            run_files.JobState(state),
            attempt,
            workers=self.job.world_size,
            step=step,
            worker=worker,
            reason=why,
            last_lines=lines,
        )
        try:
            run_files.write_change(self.run_dir, change)
        except OSError as error:
            self.screen.tell(f"replicast: the state of the job cannot be written ({error.strerror})")


def _who(job: JobPlan) -> str:
    if job.workers == job.world_size:
        return f"{job.workers} worker{'s' if job.workers > 1 else ''}"
    ranks = ", ".join(str(rank) for rank in job.ranks)
    return f"worker{'s' if job.workers > 1 else ''} {ranks} of {job.world_size}"


# What the workers have left in the run directory only adds to what the launcher says: what cannot be read
# there must change neither the exit code nor how the job ends.


def _notes(run_dir: RunDir, attempt: int) -> list[WorkerNote]:
    from replicast.storage.run_files import read_worker_notes  # Imports numpy: not at start-up.

    with contextlib.suppress(OSError):
        return [note for note in read_worker_notes(run_dir) if note.attempt == attempt]
    return []


def _stopped_by(run_dir: RunDir, attempt: int) -> tuple[str, int]:
    """Who has asked the job to stop, and at which step it did; empty if nobody has."""
    from replicast.storage.inbox import stopped_by  # Imports numpy: not at start-up.

    with contextlib.suppress(OSError):
        if told := stopped_by(run_dir, attempt):
            return told.author, told.done_at
    return "", 0


# --- The run directory: its default name, its lock and the logs ---------------------------------------------


def make_run_dir(path: Path) -> Path:
    with _created(path, "--run-dir"):
        path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def make_attempt_dir(log_dir: RunPath, attempt: int) -> RunPath:
    """Creates the directory of one attempt's logs, if it is writable."""
    path = log_dir / f"attempt-{attempt}"
    with _created(path, "--log-dir"):
        make_durably(path)
        with path.entered() as directory:
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=directory):
                raise LaunchRefused(
                    f"{path} is not writable", remedy="Choose another directory with --log-dir"
                )
    return path


@contextlib.contextmanager
def _created(path: object, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LaunchRefused(
            f"{path} cannot be created ({error.strerror})", remedy=f"Choose another directory with {option}"
        ) from None


def next_attempt(log_dir: RunPath, ranks: Sequence[int]) -> int:
    """The first attempt for which none of these workers has a log yet.

    On a file system shared by several hosts, each host's launcher counts its own workers only.
    """
    attempt = 0
    while any(log_path(log_dir, attempt, rank).exists() for rank in ranks):
        attempt += 1
    return attempt


@contextlib.contextmanager
def locked(run_dir: RunDir, first_rank: int) -> Iterator[None]:
    """Locks the run directory against a second launcher. The file says which process of which host has it."""
    with contextlib.ExitStack() as stack:
        try:
            lock = (below(run_dir) / f"launcher-{first_rank}.lock").open(os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.write(lock, f"{os.getpid()} on {socket.gethostname()}\n".encode())
        except BlockingIOError:
            holder = printable(os.pread(lock, 400, 0).decode(errors="replace").strip())
            process = f" (process {holder})" if holder else ""
            raise LaunchRefused(
                f"Another `replicast run`{process} is using {run_dir}",
                remedy="Wait for it to finish, stop it, or choose another --run-dir",
            ) from None
        except OSError as error:
            received = "" if error.filename is None else f". Received: {error.filename}"
            raise LaunchRefused(
                f"{run_dir} cannot be used as a run directory ({error.strerror}){received}",
                remedy="Make it writable, free space on its disk, or choose another directory with --run-dir",
            ) from error
        yield


# --- The page beside a job: `replicast serve` as a child. It ends with the launcher, and does no harm ------


def parse_page_address(text: str) -> tuple[str, int]:
    """The address in `--serve [HOST:]PORT`."""
    host, _, port = text.rpartition(":")
    if not is_integer(port, 0, 65535):
        raise LaunchRefused(f"--serve expects [HOST:]PORT. Received: {text}", remedy="For example: 8080")
    return host.strip("[]") if host else "127.0.0.1", int(port)


@contextlib.contextmanager
def page_beside(
    address: tuple[str, int], run_dir: RunDir, log_dir: RunPath, environ: Mapping[str, str]
) -> Iterator[str]:
    """Serves the page of a run as long as the context lasts; yields what to say of it.

    Waits until it is served, at most `_PAGE_START_SECS`, so that the address stands above all output of the
    job.
    """
    log = log_dir / "serve.log"
    options = ["--host", address[0], "--port", str(address[1])]
    try:
        make_durably(log_dir)
        with os.fdopen(log.open(os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as errors:
            process = subprocess.Popen(
                bootstrapped([sys.executable, "-m", "replicast", "serve", str(run_dir), *options]),
                env=without(environ, JOB_SECRET),  # The token is for it.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors.fileno(),
                start_new_session=True,  # Ctrl-C is for the launcher, which ends it last.
            )
    except OSError as error:
        yield f"the page is not served ({error.strerror})"
        return
    output = cast(IO[bytes], process.stdout)
    try:
        if not select.select([output], [], [], _PAGE_START_SECS)[0]:
            yield f"the page is still starting; see {log}"
        elif line := output.readline().decode(errors="replace").strip():
            yield line[0].lower() + line[1:]
        else:
            said = printable(next((line for line in reversed(end_of(log)) if line.strip()), f"see {log}"))
            yield f"the page is not served: {said.strip()}"
    finally:
        process.terminate()
        try:
            process.wait(_PAGE_END_SECS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output.close()
