"""Launchers on several hosts act as one, in virtual time: crashes, cut links, late hosts, signals."""

from __future__ import annotations

import ast
import random
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from replicast.launcher import hosts_leader
from replicast.launcher.failure import LaunchOrder, Phase, WorkerExit
from replicast.launcher.hosts_leader import HostTimeouts, Leader, Member, Report, difference
from tests.unit.launchers import World, causes, play

KILLED, PEER, TOLD = -9, 75, 143


def started(hosts: int = 2, *, max_restarts: int = 3, seed: int = 0) -> World:
    world = World(hosts, max_restarts=max_restarts, seed=seed)
    world.boot()
    world.run(2.0)
    assert world.running() == [0] * hosts
    return world


SCENARIOS = {
    "a death on any host restarts all hosts within a second": (
        "hosts 3; fail 0; wait 1.5; running 1 1 1; announced 1 1 1; count 1 1 1;"
        "fail 1; wait 1.5; running 2 2 2; fail 2; wait 1.5; running 3 3 3; announced 3 3 3"
    ),
    "every host has the same first cause, count and exit code": (
        "hosts 3; restarts 1; fail 2; wait 2; fail 1 4; wait 2; codes 4 4 4; blamed 1 1 1"
    ),
    "a worker that ends because of another is not the cause": (
        "restarts 0; slow 5; fail 0 75; wait 1; fail 1 4; wait 10; codes 4 4"
    ),
    "all workers that end well end the job well, even if not at once": (
        "finish 1; wait 300; running 0 -; finish 0; wait 3; codes 0 0"
    ),
    "a failure that a restart has mended is not reported at the end": (
        "fail 1; wait 2; running 1 1; finish 0; finish 1; wait 3; codes 0 0; blamed - -"
    ),
    "a failure that was reported is not reported again when the wait after it is stopped": (
        "kill 1; wait 5; announced 1 0; signal 0 2; wait 3; codes 130 -; blamed -"
    ),
    "a worker that fails after another host has finished restarts both": (
        "finish 1; wait 5; fail 0; wait 3; running 1 1"
    ),
    "Ctrl-C on the first host stops all without a restart": (
        "signal 0 2; wait 3; codes 130 130; announced 0 0; stopped 0 0"
    ),
    "SIGTERM on another host stops all without a restart": (
        "signal 1 15; wait 3; codes 143 143; announced 0 0; stopped 1 1"
    ),
    "a job stopped on the first host ends on both sides although the link is cut": (
        "slow 5; signal 0 15; wait 1; cut 1; wait 12; codes 143 143"  # within a scheduler's grace period
    ),
    "a job stopped on another host ends on both sides although the link is cut": (
        "slow 5; signal 1 15; wait 1; cut 1; wait 12; codes 143 143"
    ),
    "a launcher without contact can be stopped": (
        "cut 1; wait 1; signal 0 2; signal 1 2; wait 7; codes 130 130"
    ),
    "a launcher that is stopped before the first one came names its own host": (
        "off; boot 1; wait 5; signal 1 2; wait 5; codes - 130; stopped 1"
    ),
    "workers that saved because they were told to are not restarted": "fail 1 143; wait 3; codes 143 143",
    "a launcher that is killed and started again at once joins the same job": (
        "kill 1; wait 0.1; boot 1; wait 3; running 1 1; count 1 1"
    ),
    "a launcher that is killed and started again later joins the same job": (
        "kill 1; wait 10; running - -; boot 1; wait 3; running 1 1; count 1 1"
    ),
    "a host that finished long ago waits for the first launcher to come back": (
        "finish 1; wait 1200; kill 0; wait 10; codes - -; boot 0; wait 3; running 1 1"
    ),
    "the first launcher that is killed and started again continues the count": (
        "fail 0; wait 3; kill 0; wait 10; running - -; boot 0; wait 3; running 2 2; count 2 2"
    ),
    "without a restart left nobody waits for a lost first host": "restarts 0; kill 0; wait 5; codes - 75",
    "without a restart left nobody waits for another lost host": "restarts 0; kill 1; wait 5; codes 75 -",
    "a host that does not come is named, and the job ends": (
        "hosts 3; off; boot 0; boot 1; wait 60; codes - - -; wait 70; codes 75 75 -; blamed 2 2"
    ),
    "a late host starts the job": "off; boot 0; wait 100; boot 1; wait 2; running 0 0",
    "a connection that is reset while both launchers live changes nothing": (
        "reset 1; wait 3; reset 1; wait 3; reset 1; wait 3; running 0 0"
    ),
    "a link that is down for some seconds changes nothing": "cut 1; wait 20; mend; wait 20; running 0 0",
    "a link that stays down ends both sides, and they meet again": (
        "cut 1; wait 32; running - -; wait 60; mend; wait 3; running 1 1"
    ),
    "a link that never returns ends both sides with the name of the other": (
        "cut 1; wait 160; codes 75 75; blamed 1 0"
    ),
    "a host that is lost while another is waited for is waited for as long": (
        "hosts 3; off; boot 0; boot 1; wait 100; kill 1; wait 10; boot 2; wait 100;"
        "codes - - -; boot 1; wait 2; running 0 0 0"  # 120 s since the start, and not since host 1 was lost
    ),
}


@pytest.mark.parametrize("script", SCENARIOS.values(), ids=SCENARIOS)
def test_launchers_of_several_hosts_act_as_one(script: str) -> None:
    play(script)


RUN = LaunchOrder(session="s", phase=Phase.RUN, max_restarts=3, hosts=("a", "b"))


def join(leader: Leader) -> None:
    for node, session in enumerate(("first", "one")):
        leader.on_joined(node, session, "", 0.0)
        leader.on_report(node, Report(next_attempt=0), 0.0)


def test_the_first_cause_is_the_first_that_failed_by_itself_on_any_host() -> None:
    leader = Leader(("a", "b"), "first", 0, HostTimeouts(), 0.0)
    join(leader)
    told = [(0, 0, PEER), (1, 1, 4), (0, 2, 5)]  # Worker 0 noticed; then worker 1 and worker 2 failed.
    for node, worker, code in told:
        failure = WorkerExit(host=node, worker=worker, code=code, reported_by=node)
        leader.on_report(node, Report(next_attempt=0, attempt=0, running=True, failure=failure), 0.2)
    assert leader.order.failure is not None
    assert leader.order.failure.worker == 1
    details = WorkerExit(host=1, worker=1, code=4, lines=("the end of its log",), reported_by=1)
    leader.on_report(1, Report(next_attempt=1, attempt=0, failure=details), 0.3)
    assert leader.order.failure == details, "what follows about the same worker changes no order"


def test_the_first_cause_stays_the_first_though_its_host_is_lost_then() -> None:
    leader = Leader(("a", "b"), "first", 3, HostTimeouts(), 0.0)
    join(leader)
    began = Report(next_attempt=0, attempt=0, running=True)
    leader.on_report(1, replace(began, failure=WorkerExit(host=1, worker=1, code=KILLED)), 1.0)
    leader.on_report(0, replace(began, failure=WorkerExit(host=0, worker=0, code=-11)), 2.0)
    leader.on_closed(1, "one", 2.0)
    leader.on_time(5.0)
    assert leader.order.failure is not None
    assert leader.order.failure.host == 1


def test_the_same_error_on_any_host_soon_after_the_start_ends_the_job() -> None:
    for secs, phase in ((5.0, Phase.OVER), (500.0, Phase.WAIT)):
        leader = Leader(("a", "b"), "first", 9, HostTimeouts(), 0.0)
        join(leader)
        for attempt in (0, 1):
            failure = WorkerExit(host=1, worker=1, code=1, ran_secs=secs, why="ValueError: x", where="t.py:1")
            ended = Report(next_attempt=attempt + 1, attempt=attempt)
            for running in (True, False):
                leader.on_report(0, replace(ended, running=running), 1.0)
                leader.on_report(1, replace(ended, running=running, failure=failure), 1.0)
        assert (leader.order.phase is Phase.OVER) == (phase is Phase.OVER), leader.order
        assert leader.order.repeats == (phase is Phase.OVER)


def running_member(node: int = 1, max_restarts: int = 3) -> Member:
    """A launcher that runs attempt 0."""
    member = Member(node, max_restarts, HostTimeouts(), 0.0)
    member.on_ready(0)
    member.on_order(replace(RUN, max_restarts=max_restarts), 0.1)
    order = member.to_start(0.1)
    assert order is not None
    assert (order.phase, order.attempt) == (Phase.RUN, 0)
    return member


def test_a_launcher_that_ended_its_workers_for_want_of_the_first_does_not_report_a_good_end() -> None:
    member = running_member()
    assert member.to_end(20.0) is None
    end = member.to_end(40.1)
    assert end is not None
    assert end.phase is Phase.END
    member.on_group_end(None, left_behind=False)
    assert member.report.failure is not None
    assert "because of the first host: no message from it for 40 s" in member.report.failure.why


def test_a_launcher_whose_first_one_was_started_again_ends_its_workers_and_says_why() -> None:
    member = running_member()
    member.on_order(replace(RUN, session="t", phase=Phase.WAIT), 0.2)
    end = member.to_end(0.2)
    assert end is not None
    assert end.phase is Phase.END
    assert end.failure is not None
    assert end.failure.why == "its launcher was restarted"


@pytest.mark.parametrize("node", [0, 1])
def test_a_job_that_is_stopped_during_a_cut_says_how_long_nothing_was_heard(node: int) -> None:
    world = started(2)
    world.cut = {1}
    world.run(20.0)
    world.signal(node, signal.SIGINT)
    world.run(3.0)
    (over,) = world.orders(node, Phase.OVER)
    assert over.code == 130
    if node == 0:
        assert over.failure is not None
        assert over.failure.why in ("no message from it for 20 s", "no message from it for 21 s")


def test_why_a_launcher_was_refused_is_said_of_the_host_that_did_not_come_until_it_has() -> None:
    leader = Leader(("a", "b"), "first", 1, HostTimeouts(join_secs=15.0), 0.0)
    leader.refused = "Another -n"
    join(leader)
    assert leader.order.phase is Phase.RUN
    leader.on_time(40.0)
    leader.on_report(0, Report(next_attempt=1, attempt=0), 40.0)

    def why(now: float) -> str:
        leader.on_report(0, Report(next_attempt=1, attempt=0), now)
        assert leader.order.failure is not None
        return leader.order.failure.why

    assert why(56.0).startswith("it did not join within 15 s. Was the command started there")
    leader = Leader(("a", "b"), "first", 1, HostTimeouts(join_secs=15.0), 0.0)
    leader.refused = "Another -n"
    assert why(16.0) == "it did not join within 15 s. Another -n"


def test_a_launcher_that_comes_back_at_once_does_not_run_its_last_attempt_again() -> None:
    leader = Leader(("a", "b"), "first", 3, HostTimeouts(), 0.0)
    join(leader)
    assert (leader.order.phase, leader.order.attempt) == (Phase.RUN, 0)
    leader.on_report(1, Report(next_attempt=0, attempt=0, running=True), 1.0)
    leader.on_closed(1, "one", 2.0)
    leader.on_joined(1, "two", "", 2.1)
    assert leader.order.phase is Phase.END, "this order is the first that the new launcher hears"
    member = Member(1, 3, HostTimeouts(), 2.1)
    member.on_ready(1)
    member.on_order(replace(leader.order, phase=Phase.RUN), 2.1)
    assert member.to_start(2.1) is None, "there are logs of it"


def test_the_first_launcher_does_not_take_itself_for_lost_after_it_was_stopped() -> None:
    member = running_member(0, max_restarts=0)
    member.on_group_end(WorkerExit(host=0, worker=0, code=3), left_behind=False)
    assert member.after(100.0) is None, "it decides when it has looked around"


def test_a_launcher_whose_first_one_does_not_come_says_so_and_ends() -> None:
    world = World(2)
    world.boot(1)
    world.run(119.0)
    assert world.of(1).member.missing(world.now) == ((0,), "")
    world.run(3.0)
    assert world.codes() == [None, PEER]
    assert causes(world)[0].host == 0  # type: ignore[union-attr]


def test_why_the_first_launcher_is_not_reached_is_said_until_it_answers() -> None:
    world = World(2)
    world.boot(1)
    world.of(1).member.unreachable = "h0:5: Name or service not known"
    world.run(60.0)
    assert world.of(1).member.missing(world.now) == ((0,), "h0:5: Name or service not known")
    world.boot(0)
    world.run(1.0)
    world.kill(0)
    world.run(200.0)
    assert causes(world)[-1].why.endswith(" s")  # type: ignore[union-attr]


@pytest.mark.parametrize("ends_by_itself", [0, 1])
def test_both_sides_wait_the_whole_join_timeout_from_when_the_other_counts_as_lost(
    ends_by_itself: int,
) -> None:
    """A worker gives up its peers after 14 s of silence, long before its launcher gives up the other one."""
    timeouts = HostTimeouts(join_secs=15.0)
    world = World(2, timeouts=timeouts)
    world.boot()
    world.run(2.0)
    world.cut = {1}
    world.run(14.0)
    world.fail(ends_by_itself, code=PEER)
    world.run(timeouts.silent_secs + timeouts.join_secs - 14.0 - 1.5)
    assert world.codes() == [None, None]
    world.cut = set()
    world.run(1.5)
    assert world.running() == [1, 1]


def test_the_attempt_is_one_of_which_no_host_has_logs() -> None:
    world = World(2)
    world.last_attempts[1] = 6
    world.boot()
    world.run(2.0)
    assert world.running() == [7, 7]


def test_a_second_launcher_of_a_host_is_refused_and_one_of_a_silent_host_is_not() -> None:
    leader = Leader(("a", "b"), "first", 0, HostTimeouts(), 0.0)
    leader.on_joined(1, "one", "10.0.0.1", 0.0)
    assert "already connected, from 10.0.0.1" in leader.refusal(1, "two", 1.0)
    assert leader.refusal(1, "one", 1.0) == ""
    assert leader.refusal(1, "two", 6.0) == "", "the machine was reset, and nobody told us"
    assert "from 0 to 1. Received: 2" in leader.refusal(2, "two", 0.0)


IDENTITY = {"version of replicast": "1", "program": "train.py", "-n": "2", "--hosts": "a,b", "--port": "5"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"version of replicast": "2"},
            "a different version of replicast: 1 on the first host, 2 on the oth",
        ),
        (
            {"program": "train.py --lr 1"},
            "a different program: train.py on the first host, train.py --lr 1 on the other",
        ),
        ({"--hosts": ""}, "a different --hosts: a,b on the first host, none on the other"),
        ({}, ""),
    ],
)
def test_what_differs_between_launchers_is_named(changed: dict[str, str], said: str) -> None:
    found = difference(IDENTITY, IDENTITY | changed)
    assert said in found
    assert bool(found) == bool(changed)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_all_hosts_run_one_attempt_at_a_time_and_all_end(seed: int) -> None:
    """Random crashes, cuts, resets and failures; `World` checks that no two attempts overlap."""
    chance = random.Random(seed)
    hosts = chance.choice([2, 3])
    world = World(hosts, max_restarts=50, seed=seed, timeouts=HostTimeouts(join_secs=400.0))
    world.boot()
    for _ in range(12):
        world.run(chance.choice([0.05, 0.4, 1.0, 3.0, 10.0, 35.0]))
        _disturb(world, chance)
    world.cut = set()
    for node in range(hosts):
        if world.launchers[node] is None:
            world.boot(node)
    world.run(60.0)
    leader = world.of(0).leader
    assert leader is not None
    assert leader.order.phase is Phase.RUN, leader.order
    assert world.running() == [leader.order.attempt] * hosts
    for node in range(hosts):
        world.finish(node)
    world.run(3.0)
    assert world.codes() == [0] * hosts
    counts = [attempt for _, node, attempt in world.starts if node == 0]
    assert counts == sorted(set(counts))


def _disturb(world: World, chance: random.Random) -> None:
    node = chance.randrange(world.hosts)
    match chance.choice(["fail", "kill", "boot", "cut", "mend", "reset"]):
        case "fail" if world.running()[node] is not None:
            world.fail(node, chance.choice([KILLED, PEER, 1]))
        case "kill" if world.launchers[node] is not None:
            world.kill(node)
        case "boot":
            for absent in [number for number, it in enumerate(world.launchers) if it is None]:
                world.boot(absent)
        case "cut":
            world.cut = {node}
        case "mend":
            world.cut = set()
        case "reset" if node and world.launchers[0] is not None and world.launchers[node] is not None:
            world.drop_connections(node)


def test_the_decisions_have_no_clocks_sockets_threads_or_files() -> None:
    tree = ast.parse(Path(hosts_leader.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    allowed = {"dataclasses", "typing", "__future__", "msgspec"}
    allowed |= {"replicast.config", "replicast.launcher.failure"}
    assert not {one for one in imported - allowed if not one.startswith(("collections", "msgspec."))}
