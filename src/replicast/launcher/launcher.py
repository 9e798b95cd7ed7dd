"""Runs a job: one attempt after another, until one succeeds or no restart is left."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from replicast.config import ANY, SECRETS, TAKE_OVER, shared_memory_directory, without
from replicast.errors import ClusterError
from replicast.launcher.attempts import Attempts, Begin, LocalAttempts, Verdict
from replicast.launcher.group import EndTimeouts, Group, GroupEnd
from replicast.launcher.hosts.attempts import HostsAttempts
from replicast.launcher.hosts.setup import make_link, secret_line
from replicast.launcher.hosts.timeouts import HostTimeouts
from replicast.launcher.interruptions import Interruptions
from replicast.launcher.machine import this_machine
from replicast.launcher.network import exposure_line, outside_addresses
from replicast.launcher.plan import Job, absent_workers, check_job, log_path, plan_workers, planned_faults
from replicast.launcher.ports import HeldPorts, hold_free_ports, hold_ports
from replicast.launcher.report import (
    absent_line,
    faults_line,
    finished_line,
    restart_line,
    short_path,
    standby_words,
)
from replicast.launcher.rundir import locked, make_attempt_dir, next_attempt
from replicast.launcher.screen import Screen, make_screen
from replicast.launcher.standby import StandbySet
from replicast.launcher.states import States, what_is_taken_over
from replicast.launcher.verdicts import report_verdict
from replicast.paths import RunDir, RunPath


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a job is supervised."""

    run_dir: Path
    log_dir: RunPath
    tee: frozenset[int]
    max_restarts: int = 0
    timeouts: EndTimeouts = field(default_factory=EndTimeouts)
    standby: bool = False
    secret: bytes = b""
    host_timeouts: HostTimeouts = field(default_factory=HostTimeouts)
    take_over: bool = False


def supervise(job: Job, settings: Settings, environ: Mapping[str, str]) -> int:
    """Runs a job to its end and reports on standard error. Only in the main thread."""
    check_job(job)
    environ = without(environ, *SECRETS)  # No worker and no standby needs them.
    faults, absent = planned_faults(environ), absent_workers(job, environ)
    with (
        locked(settings.run_dir, job.ranks[0]),
        _free(job, settings, environ) as environ,
        Interruptions() as interruptions,
        contextlib.closing(make_screen(sys.stdout, sys.stderr, tee=settings.tee, environ=environ)) as screen,
        _standbys(job, settings, screen) as standbys,
        _attempts(job, settings, screen, interruptions) as attempts,
    ):
        if faults:
            screen.tell(faults_line(faults))
        exposed = exposure_line(job, environ, outside_addresses())
        if exposed:
            screen.tell(exposed)
        if absent:
            screen.tell(absent_line(absent, job.world_size))
        taken_over = what_is_taken_over(settings.run_dir)
        if taken_over:
            screen.tell(taken_over)
        return _Supervision(job, settings, environ, screen, interruptions, standbys, attempts).run()


class _Supervision:
    """One attempt after another, until the job is over."""

    def __init__(
        self,
        job: Job,
        settings: Settings,
        environ: Mapping[str, str],
        screen: Screen,
        interruptions: Interruptions,
        standbys: StandbySet | None,
        attempts: Attempts,
    ) -> None:
        self._began = time.monotonic()
        self._job, self._settings, self._environ = job, settings, environ
        self._screen, self._interruptions = screen, interruptions
        self._standbys, self._attempts = standbys, attempts
        self._states = States(settings.run_dir, screen, job.world_size, writes=0 in job.ranks)
        self._is_first = True

    def run(self) -> int:
        """Returns the exit code of the launcher."""
        while True:
            begun = self._attempts.begin()
            if isinstance(begun, Verdict):
                report_verdict(begun, self._screen, self._settings.run_dir, None)
                self._states.ended(begun.attempt, begun.end, begun.code or 0, None)
                return begun.code or 0
            end = self._run_attempt(begun)
            verdict = self._attempts.decide(end)
            if any(ended.code for ended in end.exits):
                _remove_shared_memory(self._environ)
            report_verdict(verdict, self._screen, self._settings.run_dir, begun.attempt)
            if verdict.code is not None:
                self._finish(begun.attempt, verdict, verdict.code)
                return verdict.code
            self._states.restarting(verdict.attempt, verdict.end)
            self._screen.tell(restart_line(verdict.end, verdict.restarts, verdict.max_restarts))

    def _run_attempt(self, begun: Begin) -> GroupEnd:
        job = replace(self._job, hosts=begun.hosts) if begun.hosts else self._job
        attempt_dir = make_attempt_dir(self._settings.log_dir, begun.attempt)
        with _hold_ports(job) as ports:
            plans = plan_workers(
                job,
                ports=ports.numbers,
                attempt=begun.attempt,
                run_dir=self._settings.run_dir,
                log_dir=self._settings.log_dir,
                machine=this_machine(self._environ),
                environ=self._environ,
            )
            self._screen.tell(
                f"replicast: {_who(job)}, attempt {begun.attempt}, logs in {short_path(attempt_dir)}; "
                "starting, which takes some seconds"
                + ("" if self._standbys is None else standby_words(job.workers))
            )
            group = Group(
                plans,
                screen=self._screen,
                tee=self._settings.tee,
                timeouts=self._settings.timeouts,
                interruptions=self._interruptions,
                standbys=self._standbys,
                peers=self._attempts.peers,
            )
            return group.run(self._environ, lambda: self._started(begun))

    def _started(self, begun: Begin) -> None:
        """The workers were started: this loads numpy or starts processes, for which they need not wait."""
        if self._is_first:
            self._states.starting(begun.attempt)
        self._is_first = False
        if self._standbys is not None:
            self._standbys.begin(begun.attempt, is_last=begun.is_last)

    def _finish(self, attempt: int, verdict: Verdict, code: int) -> None:
        step = _last_step(self._settings.run_dir, attempt)
        if code == 0 and self._settings.tee:
            finished = finished_line(
                _who(self._job),
                step=step,
                secs=time.monotonic() - self._began,
                restarts=verdict.restarts,
                logs=log_path(self._settings.log_dir, attempt, self._job.ranks[0]).parent,
            )
            self._screen.tell(finished)
        self._states.ended(attempt, verdict.end, code, step)


@contextlib.contextmanager
def _free(job: Job, settings: Settings, environ: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """No job of another host runs in the directory; one of this host would hold the lock.

    Before anything is started or written there, and before signals are caught: Ctrl-C ends the wait. Yields
    the environment of the workers: their first one need not watch again what was watched here.
    """
    allowed = ""
    if 0 in job.ranks and (settings.run_dir / "groups").is_dir():
        from replicast.storage.liveness import check_free  # Imports numpy: not for a new run.

        any_job = ANY if settings.take_over else environ.get(TAKE_OVER, "")
        allowed = check_free(
            settings.run_dir, any_job, tell=lambda line: print(f"replicast: {line}", file=sys.stderr)
        )
    yield {**without(environ, TAKE_OVER), **({TAKE_OVER: allowed} if allowed else {})}


@contextlib.contextmanager
def _attempts(
    job: Job, settings: Settings, screen: Screen, interruptions: Interruptions
) -> Iterator[Attempts]:
    """Who decides about attempts: this launcher, or those of all hosts together."""
    first = next_attempt(settings.log_dir, job.ranks)
    if job.endpoint is None:
        yield LocalAttempts(first, settings.max_restarts)
        return
    warning = secret_line(job, settings.secret)
    if warning:
        screen.tell(warning)
    with make_link(
        job,
        max_restarts=settings.max_restarts,
        secret=settings.secret,
        next_attempt=first,
        run_name=settings.run_dir.name,
        timeouts=settings.host_timeouts,
    ) as link:
        yield HostsAttempts(link, job, screen, interruptions)


def _remove_shared_memory(environ: Mapping[str, str]) -> None:
    """Removes the shared memory of workers that were killed."""
    from replicast.transport.files import remove_leftovers  # needs numpy, which takes time to import

    with contextlib.suppress(ClusterError):  # the directory may be gone
        remove_leftovers(shared_memory_directory(environ))


@contextlib.contextmanager
def _standbys(job: Job, settings: Settings, screen: Screen) -> Iterator[StandbySet | None]:
    """The standby processes of a job, if it has any; they end with this context."""
    if not settings.standby:
        yield None
        return
    program = job.argv[1:]
    with contextlib.closing(
        StandbySet(program, screen, lambda attempt: _trains(settings.run_dir, attempt))
    ) as standbys:
        yield standbys


def _hold_ports(job: Job) -> HeldPorts:
    fixed = job.fixed_ports
    return hold_free_ports(job.workers) if fixed is None else hold_ports(fixed)


def _who(job: Job) -> str:
    if job.world_size == 1:
        return "1 worker"
    if job.workers == job.world_size:
        return f"{job.workers} workers"
    ranks = ", ".join(str(rank) for rank in job.ranks)
    return f"{'workers' if job.workers > 1 else 'worker'} {ranks} of {job.world_size}"


def _last_step(run_dir: RunDir, attempt: int) -> int | None:
    """The last step of an attempt; None if its workers write no notes, as in a job without Replicas."""
    from replicast.storage.run_files import read_worker_notes  # Imports numpy, which nothing else here needs.

    return max((note.step for note in read_worker_notes(run_dir) if note.attempt == attempt), default=None)


def _trains(run_dir: RunDir, attempt: int) -> bool:
    """Whether a worker notes that it has finished a step in this attempt."""
    from replicast.storage.run_files import read_worker_notes  # Imports numpy, which nothing else here needs.

    notes = read_worker_notes(run_dir)
    return any(note.attempt == attempt and note.stepped_at is not None for note in notes)
