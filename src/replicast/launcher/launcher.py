"""Runs a job on this host, from top to bottom: one attempt after another, until it is over.

    lock the run directory → is another host's job alive in it? → catch signals → [other hosts]
        ┌→ begin: which attempt → reserve ports → start the workers → wait until all have exited ─┐
        └──────────────── a restart is left ←── decide, say who failed, note it in states.jsonl ←─┘→ exit code

On one host the decision is `order_after`; on several, the launchers decide together (`Peers`). The
launcher stays light and quick: it imports neither TensorFlow nor numpy before the workers have been started.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import math
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, cast

from replicast import config
from replicast.codec import is_integer
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
    first_cause,
    order_after,
    reason,
    report,
    restart_line,
    short_path,
    signal_name,
    with_details,
)
from replicast.launcher.hosts_link import Peers, make_peers
from replicast.launcher.plan import (
    JobPlan,
    WorkerPlan,
    bootstrapped,
    hold_ports,
    log_path,
    plan_workers,
    this_machine,
    warnings,
)
from replicast.launcher.screen import (
    LOG_LEVEL,
    STOP_SIGNALS,
    Interruptions,
    Output,
    Screen,
    make_screen,
)
from replicast.processes import is_frozen

RUNS = Path("runs")
_PAGE_START_SECS = 15.0
_PAGE_END_SECS = 5.0
_POLL_SECS = 1.0  # How often the group looks for frozen workers.
_END_SECS = 10.0
_MAX_DELAY_SECS = 5.0  # A longer delay between two looks means that the launcher itself was stopped.


def supervise(job: JobPlan, environ: Mapping[str, str]) -> int:
    """Runs a job to its end and reports on standard error. Only in the main thread."""
    of_page, environ = environ, config.without(environ, *config.SECRETS)  # No worker needs them.
    run_dir, peers = job.run_dir, None
    with contextlib.ExitStack() as stack:

        def use(directory: Path) -> None:
            stack.enter_context(locked(directory, job.ranks[0]))
            if job.page is not None:
                page = page_beside(job.page, directory, job.logs(directory), of_page)
                print(f"replicast: {stack.enter_context(page)}", file=sys.stderr, flush=True)

        if run_dir is not None:
            use(run_dir)
            allowed = ""
            if 0 in job.ranks and (below(run_dir) / "groups").is_dir():
                from replicast.storage.run_files import check_free  # Imports numpy: not for a new run.

                # Waits until no job of another host runs in the directory; one of this host would hold the
                # lock. Before signals are caught: Ctrl-C ends the wait.
                tell = partial(print, "replicast:", file=sys.stderr)
                allowed = check_free(run_dir, environ.get(config.TAKE_OVER, ""), tell=tell)
            # The first worker need not watch again what was watched here.
            seen = {config.TAKE_OVER: allowed} if allowed else {}
            environ = config.without(environ, config.TAKE_OVER) | seen
        interruptions = stack.enter_context(Interruptions())
        screen = make_screen(sys.stdout, sys.stderr, tee=job.tee, environ=environ)
        stack.enter_context(contextlib.closing(screen))
        if job.nodes > 1:
            peers = stack.enter_context(make_peers(job, screen, interruptions))
        if run_dir is None:
            if peers is None:
                raise ValueError("Only the launchers of other hosts have a run directory to learn")
            order = peers.ask_run_name()
            if order.phase is Phase.OVER:
                report(order, None, peers.hosts, screen)
                return order.code
            run_dir = make_run_dir(RUNS / Path(order.run_name).name)
            use(run_dir)
        attempt = next_attempt(job.logs(run_dir), job.ranks)
        if peers is not None:
            peers.ready(attempt)
        for line in warnings(job, environ):
            screen.tell(f"replicast: warning: {line}")
        return _Supervision(job, run_dir, environ, screen, interruptions, peers).run(attempt)


@dataclass(slots=True)
class _Supervision:
    job: JobPlan
    run_dir: Path
    environ: Mapping[str, str]
    screen: Screen
    interruptions: Interruptions
    peers: Peers | None
    began: float = field(default_factory=time.monotonic)
    has_started: bool = False

    @property
    def hosts(self) -> Hosts:
        return ONE_HOST if self.peers is None else self.peers.hosts

    def run(self, attempt: int) -> int:
        order = LaunchOrder(phase=Phase.RUN, attempt=attempt, max_restarts=self.job.max_restarts)
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
                    order = order_after(order, first_cause(end.exits), end.interrupted_by, left_behind=left)
                if any(ended.code for ended in end.exits):  # Killed workers leave their shared memory.
                    from replicast.transport.shared import remove_leftovers

                    with contextlib.suppress(ClusterError):  # the directory may be gone
                        remove_leftovers(config.shared_memory_directory(self.environ))
            if order.phase is Phase.OVER:
                self._finish(attempt, order, end)
                return order.code
            report(order, end, self.hosts, self.screen)
            self._note("restarting", order.attempt, order.failure)
            self.screen.tell(restart_line(order, self.hosts))

    def _run_attempt(self, order: LaunchOrder) -> GroupEnd:
        job = replace(self.job, hosts=order.hosts) if order.hosts else self.job
        attempt_dir = make_attempt_dir(job.logs(self.run_dir), order.attempt)
        fixed = job.fixed_ports
        with hold_ports([0] * job.workers if fixed is None else fixed) as ports:
            plans = plan_workers(
                job,
                ports=ports.numbers,
                attempt=order.attempt,
                run_dir=self.run_dir,
                machine=this_machine(self.environ),
                environ=self.environ,
            )
            start = f"logs in {short_path(attempt_dir)}; starting, which takes some seconds"
            self.screen.tell(f"replicast: {_who(job)}, attempt {order.attempt}, {start}")
            group = Group(plans, self.job, self.screen, self.interruptions, self.peers)
            return group.run(self.environ, lambda: self._started(order))

    def _started(self, order: LaunchOrder) -> None:
        """The workers were started: this loads numpy, for which they need not wait."""
        if not self.has_started:
            self._note("starting", order.attempt)
        self.has_started = True

    def _finish(self, attempt: int, order: LaunchOrder, end: GroupEnd | None) -> None:
        """`end` is None if nothing ran."""
        from replicast.storage import claims, inbox, run_files  # Import numpy: not at start-up.

        failure, by, at_step, step = order.failure, "", 0, None
        was_told_to = failure is not None and failure.was_told_to
        # What the workers have left in the run directory only adds to what is said: if it cannot be read, the
        # job ends as it would, with the same exit code.
        with contextlib.suppress(OSError):
            if was_told_to and (told := inbox.stopped_by(self.run_dir, attempt)):
                by, at_step = told.author, told.done_at
        report(order, end, self.hosts, self.screen, f"stopped by {by} at step {at_step}" if by else "")
        with contextlib.suppress(OSError):
            notes = [] if end is None else run_files.read_worker_notes(self.run_dir)
            # None in a job without Replicas.
            step = max((note.step for note in notes if note.attempt == attempt), default=None)
        if order.code == 0:
            if end is not None and self.job.tee:
                restarts = order.restarts
                after = f" after {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
                facts = [_who(self.job), *([] if step is None else [f"step {step}"])]
                facts.append(duration(time.monotonic() - self.began))
                logs = short_path(self.job.logs(self.run_dir) / f"attempt-{attempt}")
                self.screen.tell(f"replicast: finished{after}: {', '.join(facts)}, logs in {logs}")
            self._note("finished", attempt, step=step)
        elif order.signal is not None:
            self._note("stopped", attempt, why=signal_name(order.signal), step=step)
        elif failure is not None and was_told_to:
            self._note("stopped", attempt, why=by or f"SIGTERM to worker {failure.worker}", step=step)
        elif failure is not None and failure.is_refusal and not claims.group_numbers(self.run_dir):
            with contextlib.suppress(OSError):  # No job was ever here: the list of runs has no failed one.
                (below(self.run_dir) / run_files.FILE).unlink()
        else:
            self._note("failed", attempt, failure, "workers could not be killed", step)

    def _note(
        self,
        state: str,
        attempt: int,
        failure: WorkerExit | None = None,
        why: str = "",
        step: int | None = None,
    ) -> None:
        """Writes the state of the job; only the launcher of worker 0 does. `why`: without a failure."""
        if 0 not in self.job.ranks:
            return
        from replicast.storage import run_files  # Imports numpy: not at start-up.

        worker = None
        if failure is not None:
            why = reason(failure, self.hosts)
            worker = failure.host * self.job.workers if failure.worker is None else failure.worker
        change = run_files.Change(
            run_files.JobState(state),
            attempt,
            workers=self.job.world_size,
            step=step,
            worker=worker,
            reason=why,
            last_lines=() if failure is None else failure.lines,
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


# --- The workers of one attempt --------------------------------------------------------------------------
#
#   RUNNING ── a worker fails ──→ SETTLING ── time is up ──→ STOPPING ── time is up ──→ KILLING
#      └──────── Ctrl-C, SIGTERM, a signal on another host ─────↗    └── Ctrl-C again ────↗
#
# When one fails, the others notice by themselves and exit with their own message, which is better than that
# of a killed process: so they get some time first, how much depends on how the first one ended. Then they are
# asked (SIGTERM: they may save), then killed. No stage is without a time limit, and nothing is left running.
#
# A worker leads its own session, so that its whole process tree can be signalled; and the kernel kills it
# when the launcher dies (`bootstrap.py`).


class FrozenWorkers:
    """Counts for how long each worker has been frozen. Pure: the caller looks at the processes.

    A group that is stopped as a whole has been paused on purpose and can be continued, so that does not
    count. Nor does a job of one worker, for which nobody waits. Nor does time in which the launcher was
    stopped too: when a suspended job is continued, the launcher may run again before the last worker does.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._looked: float | None = None

    def update(self, frozen: Collection[int], workers: int, now: float) -> None:
        alone = frozen if len(frozen) < workers else ()
        delay = 0.0 if self._looked is None else now - self._looked
        uncounted = delay if delay > _MAX_DELAY_SECS else 0.0
        since = {rank: begun + uncounted for rank, begun in self._since.items()}
        self._since = {rank: since.get(rank, now) for rank in alone}
        self._looked = now

    def for_at_least(self, secs: float, now: float) -> set[int]:
        return {rank for rank, since in self._since.items() if now - since >= secs}


class WorkerProcess:
    """A running worker.

    Only `close` reaps the process, at the end of the group: until then its pid is not reused, and a signal to
    its tree cannot reach an unrelated process.
    """

    def __init__(self, plan: WorkerPlan, output: Output, environ: Mapping[str, str]) -> None:
        self.plan = plan
        self.output = output
        self.stopped = False
        self.blamed_as_frozen = False  # The group ends because this worker was stopped by a signal.
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            bootstrapped(plan.argv),
            env={**environ, **plan.env},
            stdin=subprocess.DEVNULL,
            stdout=output.writing_end,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output.hand_over()
            self.end_notice = os.pidfd_open(self._process.pid)  # Readable when the process has exited.
        except BaseException:  # For example too many open files. Nobody else knows the process yet.
            self._end(time.monotonic() + _END_SECS)
            raise

    def signal_tree(self, signum: signal.Signals, *, stops: bool = True) -> None:
        self.stopped = self.stopped or stops
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signum)

    def poll(self) -> WorkerExit | None:
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        return WorkerExit(
            worker=self.plan.rank,
            code=status.si_status if status.si_code == os.CLD_EXITED else -status.si_status,
            ran_secs=time.monotonic() - self._started,
            log=str(self.plan.log),
            stopped=self.stopped,
            frozen=self.blamed_as_frozen,
        )

    def is_frozen(self) -> bool:
        return is_frozen(self._process.pid)

    def close(self, *, until: float) -> None:
        """Kills what is left of the process tree, reaps the worker and reads the rest of its output."""
        self._end(until)
        os.close(self.end_notice)
        self.output.close()

    def _end(self, until: float) -> None:
        self.signal_tree(signal.SIGKILL, stops=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(0.0, until - time.monotonic()))


class Ending(enum.IntEnum):
    RUNNING = 0  # No failure so far. A worker that exits with code 0 changes nothing.
    SETTLING = 1  # One failed. The others are told and may exit with their own message.
    STOPPING = 2  # The remaining workers were asked to exit.
    KILLING = 3  # The remaining workers were killed.


@dataclass(slots=True)
class Group:
    """The workers of one attempt. Use once; call `run` in the main thread."""

    plans: Sequence[WorkerPlan]
    job: JobPlan
    screen: Screen
    interruptions: Interruptions
    peers: Peers | None = None

    _workers: dict[int, WorkerProcess] = field(default_factory=dict, init=False)
    _exits: dict[int, WorkerExit] = field(default_factory=dict, init=False)  # in the order of exit
    _frozen: FrozenWorkers = field(default_factory=FrozenWorkers, init=False)
    _ending: Ending = field(default=Ending.RUNNING, init=False)
    _deadline: float = field(default=math.inf, init=False)  # of the stage
    # The exit code of the worker, here or elsewhere, because of which the group ends.
    _first_code: int | None = field(default=None, init=False)
    _interrupted_by: signal.Signals | None = field(default=None, init=False)
    # The signal, or none, of the order of other hosts by which the group ends; such an order is repeated.
    _ends_for: tuple[int | None] | None = field(default=None, init=False)

    def run(self, environ: Mapping[str, str], started: Callable[[], None] = lambda: None) -> GroupEnd:
        """Runs the workers until all have exited. Has a time limit only after a failure or a signal."""
        with contextlib.closing(selectors.DefaultSelector()) as selector:
            try:
                self._start(selector, environ)
                started()
                while len(self._exits) < len(self.plans) and not self._is_late(Ending.KILLING):
                    self._wait_once(selector)
            finally:
                # All are killed before the first is waited for, so that many take no longer than one.
                for worker in self._workers.values():
                    worker.signal_tree(signal.SIGKILL, stops=False)
                until = time.monotonic() + self.job.timeouts.kill_secs
                for worker in self._workers.values():
                    worker.close(until=until)
        return GroupEnd(
            exits=tuple(self._detailed(ended) for ended in self._exits.values()),
            interrupted_by=self._interrupted_by,
            left_behind=tuple(rank for rank in self._workers if rank not in self._exits),
        )

    def _start(self, selector: selectors.BaseSelector, environ: Mapping[str, str]) -> None:
        selector.register(self.interruptions, selectors.EVENT_READ, self.interruptions)
        if self.peers is not None:
            selector.register(self.peers, selectors.EVENT_READ, self.peers)
        for plan in self.plans:
            teed = self.screen if plan.rank in self.job.tee else None
            live = teed is not None and plan.rank == self.screen.live_rank
            columns = self.screen.columns_for_live_worker() if live else None
            output = Output(plan.rank, plan.log, teed, columns, chatter=LOG_LEVEL in environ)
            try:
                worker = WorkerProcess(plan, output, environ)
            except BaseException:
                output.close()
                raise
            self._workers[plan.rank] = worker
            selector.register(worker.end_notice, selectors.EVENT_READ, worker)
            selector.register(output.reading_end, selectors.EVENT_READ, output)

    def _wait_once(self, selector: selectors.BaseSelector) -> None:
        remaining = self._deadline - time.monotonic()
        ready = [key for key, _ in selector.select(max(0.0, min(_POLL_SECS, remaining)))]
        self._take_frozen()
        for key in ready:
            source = key.data
            if isinstance(source, Output):
                source.pump()
                if source.at_end:
                    selector.unregister(key.fileobj)
            elif isinstance(source, WorkerProcess) and (ended := source.poll()) is not None:
                selector.unregister(key.fileobj)
                self._exits[source.plan.rank] = ended
                if ended.code != 0:
                    self._settle(ended.code)
                    first = first_cause(self._exits.values())
                    if self.peers is not None and first is not None:
                        self.peers.tell_failure(self._detailed(first))
            elif source is self.interruptions:
                self._take_signals()
        self._take_end()
        if self._is_late(Ending.SETTLING):
            timeouts, killed = self.job.timeouts, self._first_code == -signal.SIGKILL
            secs = timeouts.stop_killed_secs if killed else timeouts.stop_failed_secs
            self._enter(Ending.STOPPING, min(secs, timeouts.stop_secs))
        elif self._is_late(Ending.STOPPING):
            self._enter(Ending.KILLING, self.job.timeouts.kill_secs)

    def _detailed(self, ended: WorkerExit) -> WorkerExit:
        worker = self._workers[ended.worker or 0]
        return with_details(ended, worker.plan.log, list(worker.output.tail)) if ended.code else ended

    def _take_end(self) -> None:
        """Other hosts have failed or were told to stop: the group ends as it would because of one here."""
        end = None if self.peers is None else self.peers.to_end()
        if self.peers is None or end is None or self._ends_for == (end.signal,):
            return
        self._ends_for = (end.signal,)
        if end.signal is not None:
            if self._interrupted_by is None:
                self._stop_because_of(end.signal, self.peers.hosts.on(end.stopped_on))
            return
        for worker in self._rest():
            worker.blamed_as_frozen = worker.blamed_as_frozen or worker.is_frozen()
        # After the loss of a host, the others wait in vain as after that of a killed worker.
        failed = end.failure
        is_of_worker = failed is not None and failed.worker is not None
        self._settle(failed.code if failed and is_of_worker else -signal.SIGKILL)

    def _take_signals(self) -> None:
        for signum in self.interruptions.take():
            if signum not in STOP_SIGNALS:
                for worker in self._workers.values():
                    worker.output.resize(self.screen.columns_for_live_worker())
            elif self._interrupted_by is None:
                self._interrupted_by = signum
                if self.peers is not None:
                    self.peers.tell_signal(signum)
                self._stop_because_of(signum)
            elif signum is signal.SIGINT:
                self._enter(Ending.KILLING, self.job.timeouts.kill_secs)

    def _stop_because_of(self, signum: int, where: str = "") -> None:
        """Asks the workers to save and exit, also after Ctrl-C."""
        if self._ending < Ending.STOPPING:
            again = "; Ctrl-C again ends them at once" if signum == signal.SIGINT and not where else ""
            secs, told = self.job.timeouts.stop_secs, f"replicast: {signal_name(signum)}{where}"
            self.screen.tell(f"{told}: the workers save a checkpoint and exit, within {secs:g} s{again}")
            self._enter(Ending.STOPPING, self.job.timeouts.stop_secs)

    def _take_frozen(self) -> None:
        """Kills workers that have been frozen for too long: the others wait for them in vain."""
        rest = self._rest()
        frozen = [worker.plan.rank for worker in rest if worker.is_frozen()]
        self._frozen.update(frozen, len(self.plans), time.monotonic())
        if self._ending > Ending.SETTLING:
            return
        self._blame_frozen(self.job.timeouts.frozen_secs)
        for worker in rest:
            if worker.blamed_as_frozen:
                worker.signal_tree(signal.SIGKILL)

    def _blame_frozen(self, at_least_secs: float) -> None:
        long = self._frozen.for_at_least(at_least_secs, time.monotonic())
        for worker in self._rest():
            worker.blamed_as_frozen = worker.blamed_as_frozen or worker.plan.rank in long

    def _rest(self) -> list[WorkerProcess]:
        return [worker for rank, worker in self._workers.items() if rank not in self._exits]

    def _settle(self, code: int) -> None:
        """A worker has exited with this code: the others may take some time to exit by themselves."""
        if self._ending > Ending.SETTLING:
            return
        if self._first_code is None:
            self._first_code = code
        timeouts = self.job.timeouts
        # A worker that freezes makes others fail after half of the timeout at the earliest, not before.
        self._blame_frozen(0.0 if code == config.PEER_FAILED else timeouts.frozen_secs / 2)
        secs = timeouts.settle_killed_secs if code < 0 else timeouts.settle_secs
        if all(worker.is_frozen() for worker in self._rest()):  # None of them will exit by itself.
            secs = timeouts.settle_killed_secs
        elif code == config.PEER_FAILED:
            secs = timeouts.settle_blamed_secs
        elif code == config.TOLD_TO_END:  # The others are exiting too; one may still write the checkpoint.
            secs = max(timeouts.settle_secs, timeouts.stop_secs)
        elif code == -signal.SIGKILL:
            secs = 0.0
        # If the others already know, their time does not start again.
        self._enter(Ending.SETTLING, min(secs, self._deadline - time.monotonic()))

    def _enter(self, stage: Ending, at_most_secs: float) -> None:
        self._ending, self._deadline = stage, time.monotonic() + at_most_secs
        if stage > Ending.SETTLING:
            for worker in self._rest():
                worker.signal_tree(signal.SIGTERM if stage is Ending.STOPPING else signal.SIGKILL)

    def _is_late(self, stage: Ending) -> bool:
        return self._ending is stage and time.monotonic() >= self._deadline


# --- The run directory: its default name, its lock and the logs ---------------------------------------------


def make_run_dir(path: Path) -> Path:
    with _created(path, "--run-dir"):
        path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def make_attempt_dir(log_dir: RunPath, attempt: int) -> RunPath:
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
                env=config.without(environ, config.JOB_SECRET),  # The token is for it.
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
