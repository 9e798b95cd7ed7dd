"""Opens the exchange on all workers, or on none: one that cannot take part decides for all."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from functools import partial

from replicast import agreement
from replicast.allreduce.exchange import Exchange
from replicast.allreduce.part import WorkerPart, part_bytes
from replicast.config import shared_memory_directory
from replicast.coordination import Coordination
from replicast.errors import JobFailed
from replicast.transport.opening import OPEN_SECS, hosts_of_job
from replicast.transport.shared_file import SharedFile, name_prefix, remove_leftovers

_PREFIX = "replicast/allreduce"
SEVERAL_HOSTS = "the workers are on several hosts"


def open_exchange(
    coordination: Coordination,
    rank: int,
    size: int,
    environ: Mapping[str, str],
    *,
    unwilling: str | None,
    check: Callable[[], None],
) -> Exchange | str:
    """The exchange of this job. On every worker; blocks until all have said whether they can take part."""
    first_problem = partial(_first_problem, coordination, rank, size, check)
    hosts, job = hosts_of_job(_PREFIX, coordination, rank, size, environ, check)
    if len(set(hosts)) > 1:
        return SEVERAL_HOSTS
    with contextlib.ExitStack() as on_failure:
        file, problem = None, unwilling
        if problem is None:
            try:
                directory = shared_memory_directory(environ)
                remove_leftovers(directory)
                file = SharedFile(directory, part_bytes(size))
                on_failure.callback(file.remove)
                own = WorkerPart.of(file, size)
                name = f"{name_prefix()}{job}-allreduce-"
                file.complete(directory / f"{name}{rank}")
            except OSError as error:
                problem = f"worker {rank} has no shared memory ({error})"
        problem = first_problem("created", problem)
        if problem is not None or file is None:
            return problem or "unreachable"
        try:
            parts = [
                own if w == rank else WorkerPart.open(directory / f"{name}{w}", size) for w in range(size)
            ]
        except OSError as error:
            problem = f"worker {rank} cannot map the shared memory of all workers ({error})"
        problem = first_problem("mapped", problem)
        if problem is not None:
            return problem
        file.hide()
        on_failure.pop_all()
    return Exchange(rank, parts, check)


def _first_problem(
    coordination: Coordination,
    rank: int,
    size: int,
    check: Callable[[], None],
    question: str,
    own: str | None,
) -> str | None:
    """The problem of the first worker that has one; the same on all workers."""
    key = f"{_PREFIX}/{question}"
    coordination.put(f"{key}/{rank}", json.dumps(own))

    def late(worker: int) -> JobFailed:
        return JobFailed(
            f"worker {worker} did not say within {OPEN_SECS:g} s whether it has shared memory. See its log.",
            worker=worker,
        )

    wait = agreement.Wait(coordination, OPEN_SECS, late, lambda key, worker: check())
    answers = agreement.collect(wait, key, rank, size)
    problems: list[str | None] = [json.loads(text) for text in answers.values()]
    return next((problem for problem in problems if problem is not None), None)
