"""Launchers of a job in virtual time: the real state machines, a network to cut, and played workers."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from replicast.launcher.failure import LaunchOrder, Phase, WorkerExit
from replicast.launcher.hosts_leader import HostTimeouts, Leader, Member, Report

TICK_SECS = 0.25


@dataclass
class Launcher:
    """One launcher process. It ends its workers some time after it was told to."""

    node: int
    session: str
    member: Member
    leader: Leader | None = None
    alive: bool = True
    connected_to: str = ""
    running: int | None = None
    is_ending: bool = False  # It has told its workers to end.
    has_run: bool = False  # It waits to hear what follows an attempt.
    said: list[LaunchOrder] = field(default_factory=list)
    over: LaunchOrder | None = None
    ends_in_secs: float = 0.3
    connected_at: float = 0.0
    sent_at: float = -9.0
    last_arrivals: dict[str, float] = field(default_factory=dict)
    sent: Report | LaunchOrder | None = None

    @property
    def code(self) -> int | None:
        return None if self.over is None else self.over.code


class World:
    """Hosts with one launcher each, on a network whose links can be cut.

    Attributes:
        launchers: The launcher of each host; None where none runs.
        starts: Every start of workers: time, host, attempt.
    """

    def __init__(
        self, hosts: int, *, max_restarts: int = 3, seed: int = 0, timeouts: HostTimeouts | None = None
    ) -> None:
        self.now = 0.0
        self.hosts = hosts
        self.max_restarts = max_restarts
        self.timeouts = timeouts or HostTimeouts(join_secs=120.0)
        self.launchers: list[Launcher | None] = [None] * hosts
        self.ended: list[Launcher] = []
        self.cut: set[int] = set()
        self.starts: list[tuple[float, int, int]] = []
        self.last_attempts = [-1] * hosts  # the logs on each host's disk
        self._random = random.Random(seed)
        self._sessions = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def boot(self, *nodes: int) -> None:
        """Start the launchers of these hosts; of all if none is named."""
        for node in nodes or range(self.hosts):
            assert self.launchers[node] is None
            session = f"s{next(self._sessions)}"
            member = Member(node, self.max_restarts, self.timeouts, self.now)
            member.on_ready(self.last_attempts[node] + 1)
            launcher = Launcher(node, session, member)
            if node == 0:
                names = tuple(f"h{number}" for number in range(self.hosts))
                launcher.leader = Leader(names, session, self.max_restarts, self.timeouts, self.now)
                launcher.leader.on_joined(0, session, "", self.now)
            self.launchers[node] = launcher
            self._tick(launcher)

    def at(self, secs: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + secs, next(self._order), what))

    def run(self, secs: float) -> None:
        end = self.now + secs
        while self._queue and self._queue[0][0] <= end:
            self.now, _, what = heapq.heappop(self._queue)
            what()
        self.now = end

    def kill(self, node: int) -> None:
        """kill -9 of a launcher; its workers end with it."""
        launcher = self.of(node)
        launcher.alive, launcher.running = False, None
        self.launchers[node] = None
        for other in self.present():
            self._closed(other, launcher)

    def fail(self, node: int, code: int = -9, *, worker: int | None = None) -> None:
        """A worker of a host fails; the others there are ended as the group does it."""
        launcher = self.of(node)
        assert launcher.running is not None
        rank = node if worker is None else worker
        failure = WorkerExit(host=node, worker=rank, code=code, reported_by=node)
        launcher.member.on_failure(failure)
        self._end_later(launcher, failure)
        self._poll(launcher)

    def finish(self, node: int) -> None:
        """All workers of a host exit with 0."""
        self._group_ends(self.of(node), None)

    def signal(self, node: int, signum: int) -> None:
        launcher = self.of(node)
        launcher.member.on_signal(signum)
        if launcher.running is not None:
            self._end_later(launcher, None)
        self._poll(launcher)

    def of(self, node: int) -> Launcher:
        launcher = self.launchers[node]
        assert launcher is not None
        return launcher

    def present(self) -> Iterator[Launcher]:
        return (launcher for launcher in self.launchers if launcher is not None)

    def running(self) -> list[int | None]:
        return [None if launcher is None else launcher.running for launcher in self.launchers]

    def codes(self) -> list[int | None]:
        """The exit code of the last launcher of each host."""
        by_node = {launcher.node: launcher.code for launcher in [*self.ended, *self.present()]}
        return [by_node.get(node) for node in range(self.hosts)]

    def orders(self, node: int, phase: Phase) -> list[LaunchOrder]:
        """What a host has learned: RUN starts an attempt, WAIT announces a restart, OVER ends the job."""
        everyone = [*self.ended, *self.present()]
        return [one for it in everyone if it.node == node for one in it.said if one.phase is phase]

    def reached(self, one: int, other: int) -> bool:
        return one == other or not {one, other} & self.cut

    def _tick(self, launcher: Launcher) -> None:
        if launcher.alive:
            self._poll(launcher)
            self.at(TICK_SECS * self._random.uniform(0.8, 1.2), lambda: self._tick(launcher))

    def _poll(self, launcher: Launcher) -> None:
        if launcher.leader is not None:
            launcher.leader.on_report(0, launcher.member.report, self.now)
            launcher.leader.on_time(self.now)
            self._broadcast(launcher)
            launcher.member.on_order(launcher.leader.order, self.now)
            self._act(launcher)
        elif launcher.alive:
            self._connect(launcher)
            self._act(launcher)
            self._send_report(launcher)

    def _connect(self, launcher: Launcher) -> None:
        fresh = self.now - launcher.connected_at < self.timeouts.redial_secs
        if launcher.connected_to and not fresh and launcher.member.should_redial(self.now):
            launcher.connected_to = ""
        if launcher.connected_to or launcher.over is not None or not self.reached(launcher.node, 0):
            return
        first = self.launchers[0]
        if first is None or first.leader is None:
            launcher.member.on_closed(self.now)
        elif not first.leader.refusal(launcher.node, launcher.session, self.now):
            launcher.connected_to, launcher.connected_at = first.session, self.now
            launcher.sent = None
            first.leader.on_joined(launcher.node, launcher.session, f"10.0.0.{launcher.node}", self.now)
            self._send_order(launcher, first.session, first.leader.order)  # At once, as `First` does.

    def _send_report(self, launcher: Launcher) -> None:
        report, session = launcher.member.report, launcher.connected_to
        due = report != launcher.sent or self.now - launcher.sent_at >= self.timeouts.beat_secs
        if not session or not due:
            return
        launcher.sent, launcher.sent_at = report, self.now

        def arrives() -> None:
            first = self.launchers[0]
            is_there = first is not None and first.session == session and launcher.connected_to == session
            if is_there and self.reached(launcher.node, 0) and first is not None and first.leader:
                first.leader.on_report(launcher.node, report, self.now)
                self._poll(first)

        self._deliver(launcher, "up", arrives)

    def _broadcast(self, first: Launcher) -> None:
        assert first.leader is not None
        order = first.leader.order
        if order == first.sent and self.now - first.sent_at < self.timeouts.beat_secs:
            return
        first.sent, first.sent_at = order, self.now
        for launcher in list(self.present()):
            if launcher.connected_to == first.session:
                self._send_order(launcher, first.session, order)

    def _send_order(self, launcher: Launcher, session: str, order: LaunchOrder) -> None:
        def arrives() -> None:
            if launcher.alive and launcher.connected_to == session and self.reached(launcher.node, 0):
                launcher.member.on_order(order, self.now)
                self._act(launcher)
                self._send_report(launcher)

        self._deliver(launcher, "down", arrives)

    def _deliver(self, launcher: Launcher, direction: str, arrives: Callable[[], None]) -> None:
        """After some milliseconds, and in order."""
        arrival = max(
            self.now + self._random.uniform(0.001, 0.02), launcher.last_arrivals.get(direction, 0.0)
        )
        launcher.last_arrivals[direction] = arrival
        self.at(arrival - self.now, arrives)

    def _closed(self, other: Launcher, ended: Launcher) -> None:
        """The kernel of a killed process closes its connections, which others see if they are reached."""
        if not self.reached(other.node, ended.node):
            return
        if other.leader is not None:
            other.leader.on_closed(ended.node, ended.session, self.now)
        if other.connected_to == ended.session:
            other.connected_to = ""
            other.member.on_closed(self.now)

    def drop_connections(self, node: int) -> None:
        """Something on the way resets the connection of a host; both launchers live."""
        launcher = self.of(node)
        first = self.of(0)
        assert first.leader is not None
        if launcher.connected_to:
            launcher.connected_to = ""
            launcher.member.on_closed(self.now)
            first.leader.on_closed(node, launcher.session, self.now)

    def _act(self, launcher: Launcher) -> None:
        """What the main thread of a launcher does: it asks, by what it is at."""
        member = launcher.member
        if launcher.over is not None or not launcher.alive:
            return
        if launcher.running is not None:
            if not launcher.is_ending and member.to_end(self.now) is not None:
                launcher.is_ending = True
                self._end_later(launcher, member.report.failure)
            return
        order = member.after(self.now) if launcher.has_run else member.to_start(self.now)
        if order is None:
            return
        launcher.said.append(order)
        launcher.has_run = False
        if order.phase is Phase.RUN:
            self._start(launcher, order.attempt)
        elif order.phase is Phase.OVER:
            launcher.over = order
            if launcher.leader is None:
                self._leave(launcher)
        else:
            self._act(launcher)

    def _start(self, launcher: Launcher, attempt: int) -> None:
        others = [one.running for one in self.present() if one.running not in (None, attempt)]
        assert not others, f"attempt {attempt} starts while {others} runs"
        assert attempt > self.last_attempts[launcher.node], "an attempt starts twice on a host"
        launcher.running, launcher.is_ending = attempt, False
        self.last_attempts[launcher.node] = attempt
        self.starts.append((self.now, launcher.node, attempt))

    def _end_later(self, launcher: Launcher, failure: WorkerExit | None) -> None:
        attempt = launcher.running

        def ends() -> None:
            if launcher.running == attempt:
                self._group_ends(launcher, failure)

        self.at(launcher.ends_in_secs, ends)

    def _group_ends(self, launcher: Launcher, failure: WorkerExit | None) -> None:
        if not launcher.alive or launcher.running is None:
            return
        launcher.running, launcher.has_run = None, True
        launcher.member.on_group_end(failure, left_behind=False)
        self._poll(launcher)

    def _leave(self, launcher: Launcher) -> None:
        launcher.alive = False
        self.launchers[launcher.node] = None
        self.ended.append(launcher)
        for other in self.present():
            self._closed(other, launcher)


def causes(world: World) -> list[WorkerExit | None]:
    return [over.failure for node in range(world.hosts) for over in world.orders(node, Phase.OVER)]


def play(script: str) -> None:
    """Plays a scenario: what happens, and what must be seen then, host by host; "-" is none.

    It begins with two running hosts and three restarts, unless it says otherwise: `off` starts no launcher.
    """
    steps = [step.split() for step in script.split(";")]
    settings = {verb: rest for verb, *rest in steps if verb in ("hosts", "restarts", "off")}
    hosts, restarts = (int(settings.get(name, [usual])[0]) for name, usual in (("hosts", 2), ("restarts", 3)))
    world = World(hosts, max_restarts=restarts)
    if "off" not in settings:
        world.boot()
        world.run(2.0)
        assert world.running() == [0] * hosts
    for verb, *rest in steps:
        numbers = [None if one == "-" else float(one) for one in rest]
        whole = [int(number or 0) for number in numbers]
        over = [one for node in range(hosts) for one in world.orders(node, Phase.OVER)]
        match verb:
            case "fail" | "kill" | "finish" | "boot" | "signal":
                getattr(world, verb)(*whole)
            case "wait":
                world.run(numbers[0] or 0.0)
            case "cut" | "mend":
                world.cut = set(whole)
            case "reset":
                world.drop_connections(whole[0])
            case "slow":
                for launcher in world.present():
                    launcher.ends_in_secs = numbers[0] or 0.0
            case "running" | "codes":
                assert getattr(world, verb)() == numbers, (verb, script)
            case "announced":  # restarts, on each screen
                assert [len(world.orders(node, Phase.WAIT)) for node in range(hosts)] == whole, script
            case "count":  # of restarts, as each host reports it
                assert [launcher.member.report.restarts for launcher in world.present()] == whole
            case "blamed":
                assert [None if one is None else one.host for one in causes(world)] == numbers
            case "stopped":
                assert [one.stopped_on for one in over] == whole
            case _:
                assert verb in settings, f"unknown verb {verb}"
