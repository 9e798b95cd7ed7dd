"""How the hosts of a planned job meet for `replicast doctor --hosts`: all send what they know to the first.

    host K → host 0    its `Facts`
    host 0 → host K    "clock", some times; K answers with its time
    host 0 → host K    `Look`: when all have come, or the time is over
    host K → host 0    `Found`
    host 0 → host K    the table, which every host prints

Everything blocks, each step with a deadline. Lines are those of `wire.py`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from replicast.errors import ClusterError
from replicast.launcher.checks import Check, Verdict
from replicast.launcher.hosts.connection import shown_address
from replicast.launcher.hosts.diagnosis import Evidence, diagnose
from replicast.launcher.hosts.events import NotWelcome
from replicast.launcher.hosts.facts import Facts, Found, Look, gather_facts, look_around, now
from replicast.launcher.hosts.messages import FirstOf, Refused, to_json, two_firsts
from replicast.launcher.hosts.notices import Notices
from replicast.launcher.hosts.rivals import Rivals
from replicast.launcher.hosts.setup import listen
from replicast.launcher.hosts.talk import STEP_SECS, Talk
from replicast.launcher.hosts.wire import NotAuthentic
from replicast.launcher.plan import Job
from replicast.names import Dialer
from replicast.paths import RunDir, below
from replicast.processes import accept_problem
from replicast.strictjson import described

_LOOK_SECS_PER_HOST = 3.0
_PAUSE_SECS = 0.2
_PINGS = 5


class Visit:
    """One run of `replicast doctor --hosts` on one host."""

    def __init__(
        self,
        hosts: Sequence[str],
        port: int,
        secret: bytes,
        timeout_secs: float,
        run_dir: RunDir | None,
        report: Callable[[str], object],
    ) -> None:
        self._hosts, self._port, self._secret = hosts, port, secret
        self._timeout_secs, self._run_dir, self._report = timeout_secs, run_dir, report
        self._notices = Notices()
        self._look_secs = _LOOK_SECS_PER_HOST * len(hosts) + STEP_SECS

    def host(self, own: Facts, listener: socket.socket) -> list[Check]:
        """On the first host: waits for the others, and tells all what was found."""
        with contextlib.ExitStack() as stack:
            came = self._gather(stack, listener, own)
            facts = {0: own} | {node: one for node, (one, _) in sorted(came.items())}
            talks = {node: talk for node, (_, talk) in sorted(came.items())}
            clocks = {0: 0.0} | self._clocks(talks)
            with _mark(self._run_dir) as mark:
                found = self._all_look(talks, Look(present=tuple(facts), mark=mark))
            evidence = Evidence(self._hosts, self._port, facts, found, clocks, self._timeout_secs)
            checks = diagnose(evidence)
            for talk in talks.values():
                with contextlib.suppress(OSError):
                    talk.send({"table": [_to_json(check) for check in checks]})
            return checks

    def join(self, own: Facts, endpoint: tuple[str, int]) -> list[Check]:
        """On another host: goes to the first one and does what it asks."""
        connection, talk = self._connect(endpoint)
        with connection:
            try:
                talk.send({"facts": asdict(own)})
                while True:
                    message = talk.receive(self._timeout_secs + self._look_secs)
                    if "clock" in message:
                        talk.send({"clock": now()})
                    elif "look" in message:
                        look = described(Look, "look", message["look"])
                        found = look_around(look, self._hosts, self._port, self._run_dir)
                        talk.send({"found": asdict(found)})
                    else:
                        return [_from_json(fields) for fields in message["table"]]
            except NotAuthentic as error:
                raise ClusterError(
                    f"{self._hosts[0]} and this host do not belong together: {error}", remedy=error.remedy
                ) from None
            except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
                raise ClusterError(f"The first host has left before the end ({error})") from None

    def _gather(
        self, stack: contextlib.ExitStack, listener: socket.socket, own: Facts
    ) -> dict[int, tuple[Facts, Talk]]:
        came: dict[int, tuple[Facts, Talk]] = {}
        until = time.monotonic() + self._timeout_secs
        rivals = Rivals(self._hosts, listener.getsockname()[1], self._port, self._secret)
        stack.callback(rivals.close)
        self._report(self._missing({own.node}))
        while len(came) < len(self._hosts) - 1 and time.monotonic() < until:
            if not self._has_come(listener, rivals):
                continue
            try:
                connection = stack.enter_context(listener.accept()[0])
            except OSError as error:
                if problem := accept_problem(error):
                    self._say(f"cannot accept other hosts for now: {problem}")
                    time.sleep(_PAUSE_SECS)
                continue
            try:
                facts, talk = self._meet(connection)
            except NotAuthentic as error:
                self._say(f"refused a host: {error}. {error.remedy}")
                continue
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if facts.node in range(1, len(self._hosts)) and len(facts.addresses) == len(self._hosts):
                came[facts.node] = facts, talk
                if len(came) < len(self._hosts) - 1:
                    self._report(self._missing({0, *came}))
        return came

    def _has_come(self, listener: socket.socket, rivals: Rivals) -> bool:
        """Whether somebody has connected within a moment."""
        with selectors.PollSelector() as selector:
            for one in (listener, *rivals.sockets()):
                selector.register(one, selectors.EVENT_READ, one)
            readable = [key.data for key, _ in selector.select(_PAUSE_SECS)]
        for event in rivals.poll(readable, self._notices):
            if isinstance(event, NotWelcome):
                raise ClusterError(
                    f"{event.by} has refused this host: {event.why}",
                    remedy="Start the same command on all hosts, with --hosts in the same order",
                )
            self._report(event.text)
        return listener in readable

    def _meet(self, connection: socket.socket) -> tuple[Facts, Talk]:
        talk = Talk(connection, self._secret, is_first=True)
        message = talk.receive(STEP_SECS)
        if "first_of" in message:
            theirs = described(FirstOf, "first_of", message["first_of"])
            if why := two_firsts(FirstOf(tuple(self._hosts), self._port), theirs):
                talk.send(to_json(Refused(why)))
                self._say(f"refused a host: {why}")
        return described(Facts, "facts", message["facts"]), talk

    def _say(self, text: str) -> None:
        for notice in self._notices.say(text, time.monotonic()):
            self._report(notice.text)

    def _missing(self, came: set[int]) -> str:
        missing = [host for node, host in enumerate(self._hosts) if node not in came]
        return f"waiting for {', '.join(missing)}, at most {self._timeout_secs:.0f} s"

    @staticmethod
    def _clocks(talks: dict[int, Talk]) -> dict[int, float]:
        """How far each clock is ahead of this one's: the best of some round trips."""
        ahead: dict[int, float] = {}
        for node, talk in talks.items():
            trips = []
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                for _ in range(_PINGS):
                    sent = now()
                    talk.send({"clock": sent})
                    theirs = float(talk.receive(STEP_SECS)["clock"])
                    received = now()
                    trips.append((received - sent, theirs - (sent + received) / 2))
            if trips:
                ahead[node] = min(trips)[1]
        return ahead

    def _all_look(self, talks: dict[int, Talk], look: Look) -> dict[int, Found]:
        for talk in talks.values():
            with contextlib.suppress(OSError):
                talk.send({"look": asdict(look)})
        found = {0: look_around(look, self._hosts, self._port, self._run_dir)}
        for node, talk in talks.items():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found[node] = described(Found, "found", talk.receive(self._look_secs)["found"])
        return found

    def _connect(self, endpoint: tuple[str, int]) -> tuple[socket.socket, Talk]:
        shown, why = shown_address(*endpoint), ""
        until, told, dialer = time.monotonic() + self._timeout_secs, "", Dialer(*endpoint)
        while time.monotonic() < until:
            connection = None
            try:
                connection = dialer.connect(STEP_SECS)
                return connection, Talk(connection, self._secret, is_first=False)
            except (OSError, ValueError) as error:
                why = str(error)
                if connection is not None:
                    connection.close()
            if told != why:
                told = why
                waits = f"waiting for {self._hosts[0]} at {shown}, at most {self._timeout_secs:.0f} s ({why})"
                self._report(waits)
            time.sleep(_PAUSE_SECS)
        raise ClusterError(
            f"{self._hosts[0]} did not answer at {shown} within {self._timeout_secs:.0f} s ({why})",
            remedy=f"Start the same command on {self._hosts[0]} at the same time, and open this port there",
        )


def check_hosts(
    job: Job,
    *,
    secret: bytes,
    timeout_secs: float,
    run_dir: RunDir | None,
    environ: Mapping[str, str],
    report: Callable[[str], object],
) -> list[Check]:
    """Meets the other hosts of a job and returns the checks of all; the same on each."""
    if job.endpoint is None:
        raise ClusterError("--hosts must list at least two hosts", received=",".join(job.hosts))
    node = job.node_rank
    with contextlib.ExitStack() as stack:
        taken = ""
        try:  # The others try to connect to it.
            stack.enter_context(listen((job.hosts[node], job.port)))
        except ClusterError:
            taken = f"{job.hosts[node]}:{job.port} cannot be used on {job.hosts[node]}"
        own = gather_facts(node, job.hosts, environ, run_dir, taken)
        visit = Visit(job.hosts, job.port, secret, timeout_secs, run_dir, report)
        if node == 0:
            return visit.host(own, stack.enter_context(listen(job.endpoint)))
        return visit.join(own, job.endpoint)


@contextlib.contextmanager
def _mark(run_dir: RunDir | None) -> Iterator[str]:
    """A file in the run directory that other hosts can look for; yields its name, empty if there is none."""
    if run_dir is None:
        yield ""
        return
    mark = below(run_dir) / f"doctor-{secrets.token_hex(8)}"
    try:
        os.close(mark.open(os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except OSError:
        yield ""
        return
    try:
        yield mark.name
    finally:
        mark.unlink(missing_ok=True)


def _to_json(check: Check) -> dict[str, str]:
    return {
        "subject": check.subject,
        "verdict": check.verdict.name,
        "found": check.found,
        "remedy": check.remedy,
    }


def _from_json(fields: dict[str, Any]) -> Check:
    return Check(
        str(fields["subject"]), Verdict[fields["verdict"]], str(fields["found"]), str(fields["remedy"])
    )
