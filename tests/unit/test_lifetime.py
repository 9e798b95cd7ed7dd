"""The end of a job, with threads as workers and an in-memory coordination service."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from replicast.config import HEARTBEAT_SECS, PEER_FAILED
from replicast.coordination import LOOK_SECS, Loss, MemoryCoordination, lost_worker, unregistered_workers
from replicast.errors import JobFailed
from replicast.lifetime import (
    CALL_SECS,
    GRACE_SECS,
    POLL_SECS,
    SILENT_AFTER_HEARTBEAT_SECS,
    TURNS_KEPT,
    Lifetime,
    Pauses,
)
from tests.unit.slow_service import SlowService

DEADLINE_SECS = 120.0


class NeverPaused(Pauses):
    """A process that was never stopped. On a busy machine this one looks as if it was."""

    def pause_secs(self) -> float | None:
        return None


class Worker:
    """A worker whose transfers are counted by hand."""

    def __init__(
        self,
        store: MemoryCoordination.Store,
        rank: int,
        size: int = 2,
        heartbeat_secs: float = HEARTBEAT_SECS,
        service: type[MemoryCoordination] = MemoryCoordination,
        pauses: type[Pauses] = NeverPaused,
    ) -> None:
        self.coordination = service(store)
        self.transfers = 0
        self.exit_codes: list[int] = []
        self.lifetime = Lifetime(
            self.coordination,
            rank,
            size,
            lambda: self.transfers,
            heartbeat_secs=heartbeat_secs,
            pauses=pauses(heartbeat_secs, 22.0),
            end_process=self.exit_codes.append,
        )
        self.lifetime.watch()

    @property
    def failure(self) -> JobFailed:
        assert self.lifetime.failure is not None
        return self.lifetime.failure

    def interrupt(self) -> None:
        """By Ctrl-C: it waits for nobody."""
        self.lifetime.failed(KeyboardInterrupt())
        self.lifetime.leave()


@contextlib.contextmanager
def in_a_thread(act: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    yield thread
    thread.join(DEADLINE_SECS)
    assert not thread.is_alive()


@pytest.fixture
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicast.lifetime.GRACE_SECS", 0.2)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[Worker]:
    monkeypatch.setattr("replicast.lifetime.POLL_SECS", 0.02)
    heartbeat_secs = getattr(request, "param", HEARTBEAT_SECS)
    if heartbeat_secs < HEARTBEAT_SECS:
        monkeypatch.setattr("replicast.lifetime.SILENT_AFTER_HEARTBEAT_SECS", 0.0)
    store = MemoryCoordination.Store()
    return [Worker(store, rank, heartbeat_secs=heartbeat_secs) for rank in range(2)]


def eventually(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_SECS
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def leave_all(workers: list[Worker]) -> None:
    with contextlib.ExitStack() as threads:
        for worker in workers:
            threads.enter_context(in_a_thread(worker.lifetime.leave))


@pytest.mark.parametrize("early", [0, 1])
def test_a_worker_that_is_ready_waits_for_the_other(workers: list[Worker], early: int) -> None:
    with in_a_thread(workers[early].lifetime.leave) as first:
        eventually(lambda: workers[1 - early].lifetime.has_left(early))
        polled = workers[early].lifetime.polls
        eventually(lambda: workers[early].lifetime.polls >= polled + 2)
        assert first.is_alive()
        workers[1 - early].lifetime.leave()


class SlowToLeave(MemoryCoordination):
    """A service that hears that this worker has left long before the worker continues."""

    def __init__(self, store: MemoryCoordination.Store) -> None:
        super().__init__(store)
        self.others_end = lambda: None

    def put(self, key: str, value: str) -> bool:
        written = super().put(key, value)
        if "/left/" in key:
            self.others_end()
        return written


def test_a_worker_that_ends_because_all_have_left_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicast.lifetime.POLL_SECS", 0.02)
    service = SlowToLeave(MemoryCoordination.Store())
    exit_codes: list[int] = []
    lifetime = Lifetime(service, 0, 2, lambda: 7, exit_codes.append)
    lifetime.watch()
    ended: list[int] = []
    lifetime.dead_worker = lambda: next(iter(ended), None)

    def others_end() -> None:
        MemoryCoordination.put(service, "replicast/lifetime/left/1", "{}")
        ended.append(1)
        polls = lifetime.polls
        eventually(lambda: lifetime.polls >= polls + 2 or lifetime.failure is not None)

    service.others_end = others_end
    lifetime.leave()
    assert lifetime.failure is None
    assert exit_codes == []


class GoneOnceToldOf(MemoryCoordination):
    """A service that goes away, with worker 0, as soon as it was told of a failure."""

    def __init__(self, store: MemoryCoordination.Store) -> None:
        super().__init__(store)
        self._gone = threading.Event()
        self.noticed = threading.Event()

    def put(self, key: str, value: str) -> bool:
        written = super().put(key, value)
        if key.endswith("/failed"):
            self._gone.set()
            self.noticed.wait(DEADLINE_SECS)  # by the watching thread, before the caller knows of its success
        return written

    def get(self, key: str, timeout_secs: float) -> str | None:
        if self._gone.is_set():
            raise JobFailed("The coordination service does not answer", worker=0)
        return super().get(key, timeout_secs)

    def abort(self, message: str) -> None:
        super().abort(message)
        self.noticed.set()


def test_a_worker_that_raised_is_the_cause_though_the_service_goes_before_it_has_said_so() -> None:
    service = GoneOnceToldOf(MemoryCoordination.Store())
    exit_codes: list[int] = []
    lifetime = Lifetime(service, 1, 2, lambda: 0, exit_codes.append)
    lifetime.watch()
    lifetime.failed(ValueError("no such column"))
    assert service.noticed.is_set()
    assert lifetime.failure is not None
    assert lifetime.failure.worker == 1
    lifetime.leave()
    assert exit_codes == []  # the process exits with the code of its own exception


def test_a_failure_reaches_the_others_with_its_first_line(workers: list[Worker]) -> None:
    workers[1].lifetime.failed(ValueError("no such column"))
    eventually(lambda: workers[0].coordination.aborted)
    assert workers[0].coordination.aborted == ["worker 1 failed first: ValueError: no such column"]
    leave_all(workers)
    assert workers[0].exit_codes == [PEER_FAILED]
    assert workers[1].exit_codes == []  # Python's own exit code 1 stays


def test_of_two_failures_the_first_is_named(workers: list[Worker]) -> None:
    workers[1].lifetime.failed(ValueError("the cause"))
    workers[0].lifetime.failed(RuntimeError("a consequence, a moment later"))
    assert "worker 1 failed first: ValueError: the cause" in str(workers[0].failure)
    leave_all(workers)
    assert workers[0].exit_codes == [PEER_FAILED]


def test_workers_know_who_has_left_and_keys_of_turns_are_deleted(workers: list[Worker]) -> None:
    for _ in range(3 * TURNS_KEPT):
        for worker in workers:
            worker.lifetime.take_turn()
    kept = workers[0].coordination._store.values
    # Of each turn that is kept: the key of the first worker there, and one of each worker.
    eventually(lambda: len([key for key in list(kept) if "/turn/" in key]) <= 3 * TURNS_KEPT)
    assert not workers[0].lifetime.has_left(1)
    with in_a_thread(workers[1].lifetime.leave):
        eventually(lambda: workers[0].lifetime.has_left(1))
        assert not workers[0].lifetime.has_left(0)
        workers[0].lifetime.leave()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_worker_knows_which_of_two_others_have_gone_on_and_left(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr("replicast.lifetime.POLL_SECS", 0.02)
    store = MemoryCoordination.Store()
    workers = [Worker(store, rank, size=3) for rank in range(3)]
    second, last = (first + 1) % 3, workers[first - 1].lifetime
    for worker in (first, second):
        assert not last.has_gone_on(worker)
        workers[worker].lifetime.take_turn()
        assert last.has_gone_on(worker)
    last.take_turn()
    leaving = [threading.Thread(target=workers[worker].lifetime.leave) for worker in (first, second)]
    for worker, thread in zip((first, second), leaving, strict=True):
        assert not last.has_left(worker)
        thread.start()
        eventually(lambda worker=worker: last.has_left(worker))
        assert last.has_gone_on(worker)
    last.leave()
    for thread in leaving:
        thread.join(DEADLINE_SECS)


def raises(act: Callable[[], object]) -> bool:
    try:
        act()
    except JobFailed:
        return True
    return False


def test_workers_that_exchanged_nothing_are_told_why(
    workers: list[Worker], capsys: pytest.CaptureFixture[str]
) -> None:
    leave_all(workers)
    assert capsys.readouterr().err.count("Build and compile the model inside") == 2


def test_a_worker_whose_data_ends_early_is_noticed_by_the_one_that_waits(workers: list[Worker]) -> None:
    for worker in workers:
        worker.lifetime.take_turn()
        worker.transfers = 10
    workers[1].lifetime.take_turn()  # its data ended after 10 transfers
    workers[0].transfers = 11  # and this one has started the next step
    eventually(lambda: workers[0].coordination.aborted)
    assert "worker 1 reached the end of its data" in workers[0].coordination.aborted[0]
    assert isinstance(workers[0].lifetime.failure, JobFailed)
    assert workers[0].failure.worker == 1


@pytest.mark.parametrize("late", [0, 2])
def test_every_worker_that_waits_for_the_others_is_told_for_whom_and_then_what_all_say(
    late: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("replicast.lifetime.REMIND_SECS", LOOK_SECS)
    store = MemoryCoordination.Store()
    workers = [Worker(store, rank, size=3, service=SlowService) for rank in range(3)]
    heard: dict[int, dict[int, str]] = {}

    def meet(rank: int) -> None:
        heard[rank] = workers[rank].lifetime.meet(f"of {rank}")

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
    early = [rank for rank in range(3) if rank != late]
    for rank in early:
        threads[rank].start()
    for rank in early:
        of_all = "until all workers have opened their data, or traced their first step: worker 0's log names"
        what = of_all if late and rank else f"for worker {late} to open its data"
        eventually(lambda rank=rank, what=what: f"worker {rank} waits {what}" in caplog.text)
    threads[late].start()
    for thread in threads:
        thread.join(DEADLINE_SECS)
    said = {rank: f"of {rank}" for rank in range(3)}
    assert [heard[rank] for rank in range(3)] == [said] * 3
    for worker in workers * (TURNS_KEPT + 1):
        worker.lifetime.take_turn()
    eventually(lambda: not [key for key in list(store.values) if key.endswith("/all")])
    leave_all(workers)


def test_a_worker_that_waits_for_one_that_failed_is_told(workers: list[Worker]) -> None:
    told: list[JobFailed] = []

    def meet() -> None:
        with pytest.raises(JobFailed) as failure:
            workers[0].lifetime.meet()
        told.append(failure.value)

    with in_a_thread(meet):
        workers[1].lifetime.failed(ValueError("no such column"))
    assert [failure.worker for failure in told] == [1]


def test_a_worker_that_others_wait_for_in_vain_does_not_wait_for_them(workers: list[Worker]) -> None:
    told: list[bool] = []
    with in_a_thread(lambda: told.append(raises(workers[1].lifetime.meet))):
        eventually(lambda: workers[0].lifetime.has_gone_on(1))
        workers[0].lifetime.failed(JobFailed("worker 1 did not come", worker=1))
    assert told == [True]
    leave_all(workers)


def test_a_worker_that_is_only_slower_is_left_alone(workers: list[Worker]) -> None:
    for worker in workers:
        worker.lifetime.take_turn()
        worker.transfers = 10
    workers[1].lifetime.take_turn()
    polled = workers[0].lifetime.polls
    eventually(lambda: workers[0].lifetime.polls >= polled + 2)
    assert workers[0].coordination.aborted == []
    workers[0].lifetime.take_turn()
    leave_all(workers)
    assert [worker.exit_codes for worker in workers] == [[], []]


@pytest.mark.parametrize(
    ("interrupted", "said"),
    [
        (False, "worker 1 reached the end of its script"),
        (True, "worker 1 was interrupted by Ctrl-C while worker 0 is still"),
    ],
)
def test_a_worker_that_leaves_while_another_trains_is_noticed(
    workers: list[Worker], interrupted: bool, said: str
) -> None:
    workers[0].transfers = 6
    workers[1].transfers = 5
    if interrupted:
        workers[1].lifetime.failed(KeyboardInterrupt())
    with in_a_thread(workers[1].lifetime.leave):
        eventually(lambda: workers[0].coordination.aborted)
        assert said in workers[0].coordination.aborted[0]
        workers[0].lifetime.leave()


def test_a_worker_that_leaves_while_another_exchanges_metrics_is_noticed(workers: list[Worker]) -> None:
    with in_a_thread(workers[1].lifetime.leave):
        workers[0].lifetime.take_turn()
        eventually(lambda: workers[0].coordination.aborted)
        assert "worker 1 reached the end of its script" in workers[0].coordination.aborted[0]
        workers[0].lifetime.leave()


def test_a_worker_that_does_not_stop_by_itself_is_ended(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch, little_grace: None
) -> None:
    assert GRACE_SECS > 1
    workers[1].lifetime.failed(ValueError("x"))
    eventually(lambda: workers[0].exit_codes)
    assert workers[0].exit_codes == [PEER_FAILED]


def test_after_ctrl_c_a_worker_does_not_wait_for_the_others(workers: list[Worker]) -> None:
    workers[0].interrupt()  # worker 1 has not left
    assert workers[0].exit_codes == []


def test_when_the_watching_thread_dies_the_job_fails_and_every_wait_ends(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch, little_grace: None
) -> None:
    workers[0].coordination.get = lambda *_: 1 / 0  # type: ignore[method-assign,assignment]
    eventually(lambda: workers[0].coordination.aborted)
    with pytest.raises(JobFailed, match="thread that watches the job has died"):
        workers[0].lifetime.take_turn()
    eventually(lambda: workers[0].exit_codes)
    assert workers[0].exit_codes == [1], "the failure is its own"


def test_a_transfer_of_a_worker_that_writes_alone_ends_the_job_and_says_why(workers: list[Worker]) -> None:
    with workers[0].lifetime.alone("writing model.keras"):
        workers[0].transfers += 1
        eventually(lambda: workers[0].coordination.aborted and workers[1].coordination.aborted)
    for worker in workers:
        assert "worker 0 started a transfer" in worker.coordination.aborted[0]
        assert "while it alone was writing model.keras" in worker.coordination.aborted[0]


def test_a_turn_of_a_worker_that_writes_alone_is_refused(workers: list[Worker]) -> None:
    with (
        workers[0].lifetime.alone("writing model.keras"),
        pytest.raises(JobFailed, match="alone was writing"),
    ):
        workers[0].lifetime.take_turn()
    assert workers[0].lifetime.take_turn() == 1


def test_a_save_in_another_thread_does_not_unprotect_the_main_thread(workers: list[Worker]) -> None:
    def save() -> None:
        with workers[0].lifetime.alone("writing another.keras"):
            pass

    with workers[0].lifetime.alone("writing model.keras"):
        with in_a_thread(save):
            pass
        with pytest.raises(JobFailed, match="alone was writing model"):
            workers[0].lifetime.take_turn()


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Three workers; the service answers workers 1 and 2 slowly."""
    monkeypatch.setattr("replicast.lifetime.POLL_SECS", 0.02)
    store = MemoryCoordination.Store()
    services = (MemoryCoordination, SlowService, SlowService)
    return [Worker(store, rank, size=3, service=service) for rank, service in enumerate(services)]


def test_a_worker_that_went_on_from_a_boundary_is_not_waited_for_there(busy: list[Worker]) -> None:
    busy[1].lifetime.report_wait(step=3)
    busy[2].lifetime.report_wait(step=3)
    busy[1].lifetime.report_wait(None)
    busy[0].transfers = 1  # the next step
    polled = busy[0].lifetime.polls
    eventually(lambda: busy[0].lifetime.polls >= polled + 3 or busy[0].lifetime.failure is not None)
    assert busy[0].lifetime.failure is None
    for worker in busy:
        worker.transfers = 1
    leave_all(busy)


def test_a_missed_boundary_is_noticed_though_a_third_worker_goes_on(busy: list[Worker]) -> None:
    busy[1].lifetime.report_wait(step=3)
    busy[0].lifetime.report_wait(step=3)
    busy[0].lifetime.report_wait(None)
    busy[2].transfers = 1
    eventually(lambda: busy[2].coordination.aborted)
    assert "worker 1 waits for the others at the boundary of step 3" in busy[2].coordination.aborted[0]
    leave_all(busy)


def freeze_the_service(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when worker 0 is stopped: calls with a timeout find nothing, and the others never return."""
    for call in ("put", "delete"):
        monkeypatch.setattr(worker.coordination, call, lambda *_: threading.Event().wait())
    monkeypatch.setattr(worker.coordination, "get", lambda key, timeout_secs: time.sleep(timeout_secs))


@pytest.mark.parametrize("workers", [0.5], indirect=True)
def test_a_worker_exits_when_the_service_does_not_answer(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch, little_grace: None
) -> None:
    eventually(lambda: workers[1].lifetime.polls)
    freeze_the_service(workers[1], monkeypatch)
    script = threading.Thread(target=workers[1].lifetime.take_turn, daemon=True)
    script.start()  # never returns
    eventually(lambda: workers[1].exit_codes)
    assert workers[1].exit_codes == [PEER_FAILED]
    assert workers[1].failure.worker == 0
    assert workers[1].coordination.aborted == [str(workers[1].lifetime.failure)]
    workers[0].interrupt()


def test_a_script_that_raises_exits_although_the_service_does_not_answer(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CALL_SECS < HEARTBEAT_SECS + SILENT_AFTER_HEARTBEAT_SECS
    monkeypatch.setattr("replicast.lifetime.CALL_SECS", 0.1)
    freeze_the_service(workers[1], monkeypatch)
    lost = "Collective ops is aborted by: Deadline Exceeded\nRPC: /tensorflow.CoordinationService/Heartbeat"
    workers[1].lifetime.failed(RuntimeError(lost))
    workers[1].lifetime.leave()
    assert workers[1].exit_codes == [PEER_FAILED]
    assert str(workers[1].failure).startswith("worker 0 was lost: it does not answer heartbeats")
    workers[0].interrupt()


def test_the_bounds_of_every_end_add_up_to_less_than_30_seconds() -> None:
    one_poll_secs = 5 * POLL_SECS
    silent_secs = HEARTBEAT_SECS + SILENT_AFTER_HEARTBEAT_SECS
    assert silent_secs + one_poll_secs + GRACE_SECS < 30 - 5, "5 s are left for a busy machine"


def test_a_worker_exits_when_the_service_has_lost_another(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch, little_grace: None
) -> None:

    def lost(*_: object) -> None:
        raise JobFailed("worker 1 was lost", worker=1)

    monkeypatch.setattr(workers[0].coordination, "get", lost)
    eventually(lambda: workers[0].exit_codes)
    assert workers[0].exit_codes == [PEER_FAILED]
    assert workers[0].coordination.aborted == ["worker 1 was lost (reported by worker 0)"]


def test_worker_0_exits_when_a_peer_is_lost_while_it_waits_for_it_to_finish(
    workers: list[Worker],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    little_grace: None,
) -> None:
    leaving = threading.Thread(target=workers[0].lifetime.leave, daemon=True)
    leaving.start()
    eventually(lambda: workers[1].lifetime.has_left(0))

    def lost(*_: object) -> None:
        raise JobFailed("worker 1 was lost", worker=1)

    monkeypatch.setattr(workers[0].coordination, "get", lost)
    eventually(lambda: workers[0].exit_codes)
    assert workers[0].exit_codes[0] == PEER_FAILED
    assert "replicast: worker 1 was lost" in capsys.readouterr().err, "the log says because of whom"
    workers[1].interrupt()


def test_a_worker_that_the_service_has_lost_ends_all_others_although_none_of_them_is_in_a_transfer(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch, little_grace: None
) -> None:
    workers[0].coordination._store.lost = Loss(1, "it sent no heartbeats")
    eventually(lambda: workers[0].exit_codes)
    assert workers[0].exit_codes == [PEER_FAILED]
    assert str(workers[0].failure).startswith("worker 1 was lost: it sent no heartbeats")
    workers[1].interrupt()


def test_after_a_failure_worker_0_does_not_wait_for_the_worker_that_was_lost(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicast.lifetime.GRACE_SECS", 10 * DEADLINE_SECS)
    workers[0].lifetime.failed(JobFailed("worker 1 was lost", worker=1))
    with in_a_thread(workers[0].lifetime.leave):
        pass
    assert workers[0].exit_codes == [PEER_FAILED]
    workers[1].interrupt()


RESET = (
    "Collective ops is aborted by: recvmsg:Connection reset by peer\nAdditional GRPC error information from "
    "remote target /job:worker/replica:0/task:{} while calling /tensorflow.WorkerService/RecvBuf:\n:UNKNOWN:"
    'Error received from peer  {{grpc_message:"{}", grpc_status:{}}}\nThe error could be from a previous '
    "operation."
)
UNHEALTHY = (
    "Error reported from /job:worker/task:1: The following tasks are unhealthy (stopped sending heartbeats):"
    "\n/job:worker/replica:0/task:1\nThe tasks have crashed."
)
PASSED_ON = (
    "Collective ops is aborted by: Additional GRPC error information from remote target "
    "/job:worker/replica:0/task:0 while calling /tensorflow.WorkerService/RecvBuf:\n:UNKNOWN:Error received "
    'from peer  {{grpc_status:14, grpc_message:"{}"}}'
)


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        (UNHEALTHY, 1),
        (
            "Collective ops is aborted by: Deadline Exceeded\nRPC: /tensorflow.CoordinationService/Heartbeat",
            0,
        ),
        (RESET.format(2, "recvmsg:Connection reset by peer", 14), 2),
        (PASSED_ON.format(RESET.format(2, "recvmsg:Connection reset by peer", 14)), 2),
        (RESET.format(2, "Inconsistent shapes", 3), None),
        ("no such column", None),
    ],
)
def test_the_lost_worker_is_read_from_the_error_of_tensorflow(said: str, lost: int | None) -> None:
    found = lost_worker(said)
    assert (None if found is None else found.worker) == lost


def test_who_is_missing_at_the_start_is_read_from_the_error_of_tensorflow() -> None:
    said = """Barrier timed out. Id: [Init]Wait_for_all_tasks_to_register::0.
# of tasks that reached the barrier: 2/4.
The first task at the barrier: /job:worker/replica:0/task:0. Some timed out task names:
/job:worker/replica:0/task:1
/job:worker/replica:0/task:3
Additional GRPC error information from remote target /job:worker/replica:0/task:0 while calling X"""
    assert unregistered_workers(said) == [1, 3]
    assert unregistered_workers(said, chiefs=1) == [2, 4]
    assert unregistered_workers("Deadline Exceeded") == [0], "so another worker says that worker 0 is missing"


def test_a_chief_is_worker_0_and_the_workers_come_after_it() -> None:
    unhealthy = "(stopped sending heartbeats):\n/job:{}/replica:0/task:{}"
    ranks = [lost_worker(unhealthy.format(*task), chiefs=1) for task in (("chief", 0), ("worker", 0))]
    assert [lost.worker for lost in ranks if lost is not None] == [0, 1]


def test_a_worker_that_was_lost_is_blamed_with_who_says_so(workers: list[Worker]) -> None:
    workers[0].lifetime.failed(RuntimeError(RESET.format(1, "Connection reset by peer", 14)))
    assert workers[0].failure.worker == 1
    assert str(workers[0].failure).startswith("worker 1 was lost: its connection broke")
    assert "(reported by worker 0)" in str(workers[0].failure)
    workers[1].lifetime.failed(KeyboardInterrupt())
    leave_all(workers)
    assert workers[0].exit_codes == [PEER_FAILED]


def test_a_worker_that_others_blame_learns_why(workers: list[Worker]) -> None:
    blamed, other = workers
    other.lifetime.failed(JobFailed("worker 0 left its loop while worker 1 continued", worker=0))

    def why() -> str:
        try:
            blamed.lifetime.check()
        except JobFailed as error:
            return str(error)
        return ""

    eventually(why)
    assert why() == "worker 0 left its loop while worker 1 continued"
    leave_all(workers)
    assert other.exit_codes == [PEER_FAILED]
    assert blamed.exit_codes == [], "whatever it ends with stays"


class Paused(Pauses):
    """As in a process that has just been continued."""

    def pause_secs(self) -> float | None:
        return 15.0


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Worker 1 was paused."""
    monkeypatch.setattr("replicast.lifetime.POLL_SECS", 0.02)
    store = MemoryCoordination.Store()
    return [Worker(store, 0), Worker(store, 1, pauses=Paused)]


LOST = "The coordination service has lost worker 0. RPC: /tensorflow.CoordinationService/Heartbeat"


class UnavailableError(Exception):
    __module__ = "tensorflow.python.framework.errors_impl"


def test_a_worker_that_was_paused_names_itself_and_not_the_one_that_it_lost(
    paused: list[Worker], capsys: pytest.CaptureFixture[str]
) -> None:
    paused[1].lifetime.failed(UnavailableError(LOST))
    eventually(lambda: paused[0].lifetime.failure)
    assert paused[0].failure.worker == 1
    paused[1].lifetime.leave()
    assert paused[1].exit_codes == [1]
    assert "replicast: worker 1 did not run for 15 s: it was stopped (SIGSTOP)" in capsys.readouterr().err
    paused[0].lifetime.leave()
    assert paused[0].exit_codes == [PEER_FAILED]


def test_an_error_of_the_script_is_its_own_though_the_worker_was_paused(paused: list[Worker]) -> None:
    paused[1].lifetime.failed(ValueError("no such column"))
    assert str(paused[1].failure) == "worker 1 failed first: ValueError: no such column"
    paused[1].lifetime.leave()
    assert paused[1].exit_codes == []
    paused[0].lifetime.leave()


def test_what_another_worker_says_of_itself_counts_though_this_one_was_paused(paused: list[Worker]) -> None:
    paused[0].lifetime.failed(ValueError("no such column"))
    eventually(lambda: paused[1].lifetime.failure)
    assert str(paused[1].failure) == "worker 0 failed first: ValueError: no such column"
    for worker in reversed(paused):
        worker.lifetime.leave()
    assert paused[1].exit_codes == [PEER_FAILED]


def test_a_worker_that_others_have_taken_for_lost_says_so_when_it_exits(
    workers: list[Worker], capsys: pytest.CaptureFixture[str]
) -> None:
    workers[0].lifetime.failed(
        RuntimeError(
            "Task /job:worker/replica:0/task:1 stopped sending heartbeats: /job:worker/replica:0/task:1"
        )
    )
    workers[1].lifetime.failed(UnavailableError("recvmsg: connection reset"))
    workers[1].lifetime.leave()
    assert "replicast: worker 1 was lost: it sent no heartbeats" in capsys.readouterr().err
    assert workers[1].exit_codes == [1]
    workers[0].lifetime.leave()
