"""`replicast doctor --hosts`: whether some machines can be a job. They meet at the first one:

    host K → host 0    its `Facts`
    host 0 → host K    `Look`: when all have come, or the time is over
    host K → host 0    `Found`, with its time when it was asked
    host 0 → host K    `Table`: the checks, which every host prints

Everything blocks, each step with a deadline. The lines are those of the launchers (`Wire`).
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import msgspec

from replicast.errors import ClusterError
from replicast.files import RunDir, below
from replicast.launcher.checks import Check, Verdict, machine_checks
from replicast.launcher.hosts_leader import FirstOf, Notices, RefusedHost, two_firsts
from replicast.launcher.hosts_link import CONNECT_SECS, STEP_SECS, Connection, NotAuthentic, Rivals, listen
from replicast.launcher.plan import JobPlan, shown_address
from replicast.names import NAMES_SECS, Dialer, Lookups
from replicast.processes import accept_problem

_LOOK_SECS_PER_HOST = 3.0
_PAUSE_SECS = 0.2
_FAR_APART_SECS = 1.0
_SAME_VERSION = (Verdict.BROKEN, "Install the same version everywhere")
_IF_DIFFERENT = {
    **dict.fromkeys(("Python", "TensorFlow", "Keras", "replicast"), _SAME_VERSION),
    "Cores and GPUs": (Verdict.NOTE, "-n is the same on all hosts: the smallest one decides"),
}


# --- What the hosts tell each other ----------------------------------------------------------------------


class _Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=str.lower):
    """A message between the hosts."""


class Facts(_Step, frozen=True):
    """A host by itself."""

    node: int
    addresses: tuple[str, ...]  # those of all hosts, as it resolves their names
    checks: tuple[Check, ...]
    run_dir: str = ""
    port: str = ""  # why its port cannot be used


class Look(_Step, frozen=True):
    """What the first host asks the others to do when all are there."""

    present: tuple[int, ...]
    mark: str = ""


class Found(_Step, frozen=True):
    """What a host has found when it looked at the others."""

    reach: dict[int, str]
    sees_mark: bool | None = None
    asked_at: float = 0.0  # in seconds since 1970, by its own clock


class Table(_Step, frozen=True):
    checks: tuple[Check, ...]


_Came = dict[int, tuple[Facts, Connection]]
_Steps = Facts | Look | Found | Table | FirstOf | RefusedHost
_read = functools.partial(msgspec.convert, type=_Steps, str_keys=True)


# --- The meeting -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    job: JobPlan
    secret: bytes
    timeout_secs: float
    run_dir: RunDir | None
    report: Callable[[str], object]
    notices: Notices = field(default_factory=Notices)

    @property
    def look_secs(self) -> float:
        return _LOOK_SECS_PER_HOST * len(self.job.hosts) + STEP_SECS

    def checks(self, environ: Mapping[str, str]) -> list[Check]:
        job, own = self.job, self.job.node_rank
        if job.endpoint is None:
            raise ClusterError("--hosts must list at least two hosts", received=",".join(job.hosts))
        with contextlib.ExitStack() as stack:
            taken = ""
            try:  # The others try to connect to it.
                stack.enter_context(listen((job.hosts[own], job.port)))
            except ClusterError:
                taken = f"{job.hosts[own]}:{job.port} cannot be used on {job.hosts[own]}"
            facts = self._facts(environ, taken)
            if own == 0:
                return self._host(facts, stack.enter_context(listen(job.endpoint)))
            return self._join(facts, job.endpoint)

    def _facts(self, environ: Mapping[str, str], port: str) -> Facts:
        """Looks at this machine. Blocks until the names of the hosts are resolved, at most `NAMES_SECS`."""
        lookups, addresses, state = Lookups(self.job.hosts), [], ""
        if self.run_dir is not None:
            path = below(self.run_dir).as_path()  # Only whether a user's choice can be used.
            usable = "writable" if os.access(path, os.W_OK | os.X_OK) else "not writable"
            state = usable if path.is_dir() else "missing"
        lookups.wait(NAMES_SECS)
        for host in self.job.hosts:
            try:
                addresses.append(next(iter(lookups.addresses(host) or []), ""))
            except OSError:
                addresses.append("")
        version = Check("replicast", Verdict.GOOD, metadata.version("replicast"))
        return Facts(
            node=self.job.node_rank,
            addresses=tuple(addresses),
            checks=(version, *machine_checks(environ)),
            run_dir=state,
            port=port,
        )

    def _look_around(self, look: Look) -> Found:
        """Connects to every host that came and looks for the mark; 2 s for each that does not answer."""
        reach, sees, asked_at = {}, None, time.time()
        for node in look.present:
            try:
                with Dialer(self.job.hosts[node], self.job.port).connect(CONNECT_SECS):
                    reach[node] = "answers"
            except OSError as error:
                reach[node] = error.strerror or str(error)
        if look.mark and self.run_dir is not None:
            sees = (below(self.run_dir) / Path(look.mark).name).exists()
        return Found(reach=reach, sees_mark=sees, asked_at=asked_at)

    def _host(self, own: Facts, listener: socket.socket) -> list[Check]:
        """On the first host: waits for the others, and tells all what was found."""
        with contextlib.ExitStack() as stack:
            came = dict(sorted(self._gather(stack, listener).items()))
            facts = {0: own} | {node: one for node, (one, _) in came.items()}
            talks = {node: talk for node, (_, talk) in came.items()}
            clocks = {0: 0.0}  # how far each is ahead of this one's, and the time that a message takes
            with _mark(self.run_dir) as mark:
                look = Look(present=tuple(facts), mark=mark)
                asked_at = {node: time.time() for node, talk in talks.items() if _tell(talk, look)}
                found = {0: self._look_around(look)}
                for node, asked in asked_at.items():
                    with contextlib.suppress(OSError, ValueError):
                        found[node] = talks[node].expect(Found, self.look_secs)
                        clocks[node] = found[node].asked_at - asked
            evidence = Evidence(self.job.hosts, self.job.port, facts, found, clocks, self.timeout_secs)
            table = Table(checks=tuple(evidence.checks()))
            for talk in talks.values():
                _tell(talk, table)
            return list(table.checks)

    def _gather(self, stack: contextlib.ExitStack, listener: socket.socket) -> _Came:
        came: _Came = {}
        hosts, until = self.job.hosts, time.monotonic() + self.timeout_secs
        rivals = Rivals(hosts, listener.getsockname()[1], self.job.port, self.secret)
        self._report_missing(came)
        while len(came) < len(hosts) - 1 and time.monotonic() < until:
            has_come = select.select([listener], [], [], _PAUSE_SECS)[0]
            for found in rivals.poll(self.notices):
                if not isinstance(found, str):
                    raise found
                self.report(found)
            if not has_come:
                continue
            try:
                connection = stack.enter_context(listener.accept()[0])
            except OSError as error:
                if problem := accept_problem(error):
                    self._say(f"cannot accept other hosts for now: {problem}")
                    time.sleep(_PAUSE_SECS)
                continue
            try:
                talk = Connection(connection, self.secret, _read, is_first=True, blocks=True)
                talk.wait_for_opening()
                message = talk.expect(object, STEP_SECS)
                ours = FirstOf(hosts=tuple(hosts), port=self.job.port)
                if isinstance(message, FirstOf) and (why := two_firsts(ours, message)):
                    talk.send(RefusedHost(why=why))
                    self._say(f"refused a host: {why}")
            except NotAuthentic as error:
                with contextlib.suppress(OSError):  # By its seal the other side sees that the secrets differ.
                    talk.send(RefusedHost(why=str(error)))
                self._say(f"refused a host: {error}. {error.remedy}")
                continue
            except (OSError, ValueError):
                continue
            others = range(1, len(hosts))
            if isinstance(message, Facts) and len(message.addresses) == len(hosts) and message.node in others:
                came[message.node] = message, talk
                self._report_missing(came)
        return came

    def _say(self, text: str) -> None:
        for notice in self.notices.say(text, time.monotonic()):
            self.report(notice)

    def _report_missing(self, came: Mapping[int, object]) -> None:
        missing = [host for node, host in enumerate(self.job.hosts) if node and node not in came]
        if missing:
            self.report(f"waiting for {', '.join(missing)}, at most {self.timeout_secs:.0f} s")

    def _join(self, own: Facts, endpoint: tuple[str, int]) -> list[Check]:
        """On another host: goes to the first one and does what it asks."""
        connection, talk = self._connect(endpoint)
        with connection:
            try:
                talk.send(own)
                while True:
                    match talk.expect(object, self.timeout_secs + self.look_secs):
                        case Look() as look:
                            talk.send(self._look_around(look))
                        case Table(checks=checks):
                            return list(checks)
            except NotAuthentic as error:
                raise ClusterError(
                    f"{self.job.hosts[0]} and this host do not belong together: {error}", remedy=error.remedy
                ) from None
            except (OSError, ValueError, IndexError) as error:
                raise ClusterError(f"The first host has left before the end ({error})") from None

    def _connect(self, endpoint: tuple[str, int]) -> tuple[socket.socket, Connection]:
        first, shown, within = self.job.hosts[0], shown_address(*endpoint), f"{self.timeout_secs:.0f} s"
        until, why, told, dialer = time.monotonic() + self.timeout_secs, "", "", Dialer(*endpoint)
        while time.monotonic() < until:
            with contextlib.ExitStack() as stack:
                try:
                    connection = stack.enter_context(dialer.connect(STEP_SECS))
                    talk = Connection(connection, self.secret, _read, is_first=False, blocks=True)
                    talk.wait_for_opening()
                    stack.pop_all()
                    return connection, talk
                except (OSError, ValueError) as error:
                    why = str(error)
            if told != why:
                told = why
                self.report(f"waiting for {first} at {shown}, at most {within} ({why})")
            time.sleep(_PAUSE_SECS)
        raise ClusterError(
            f"{first} did not answer at {shown} within {within} ({why})",
            remedy="Start the same command there at the same time, and open this port there",
        )


def _tell(talk: Connection, message: Look | Table) -> bool:
    """Whether the other host is still there to be told."""
    with contextlib.suppress(OSError):
        talk.send(message)
        return True
    return False


@contextlib.contextmanager
def _mark(run_dir: RunDir | None) -> Iterator[str]:
    """A file in the run directory that other hosts can look for; yields its name, empty if there is none."""
    with contextlib.ExitStack() as stack:
        name = ""
        if run_dir is not None:
            mark = below(run_dir) / f"doctor-{secrets.token_hex(8)}"
            with contextlib.suppress(OSError):
                os.close(mark.open(os.O_WRONLY | os.O_CREAT | os.O_EXCL))
                stack.callback(mark.unlink, missing_ok=True)
                name = mark.name
        yield name


# --- The diagnosis: pure ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evidence:
    hosts: Sequence[str]
    port: int
    facts: Mapping[int, Facts]
    found: Mapping[int, Found] = field(default_factory=dict)
    clocks: Mapping[int, float] = field(default_factory=dict)
    waited_secs: float = 0.0

    @property
    def limit(self) -> str:
        """Nothing is said of hosts that did not come."""
        return "" if len(self.facts) == len(self.hosts) else ", of those that came"

    def checks(self) -> list[Check]:
        return [
            self._presence(),
            self._names(),
            self._ports(),
            self._clocks(),
            *(self._merged(check.subject) for check in self.facts[0].checks),
            *self._run_dir(),
        ]

    def _presence(self) -> Check:
        absent = [host for node, host in enumerate(self.hosts) if node not in self.facts]
        if not absent:
            return Check("Hosts", Verdict.GOOD, f"all {len(self.hosts)} came")
        found = f"{', '.join(absent)} did not join within {self.waited_secs:.0f} s"
        remedy = "Start the same command there at the same time; if it runs there, it says what it waits for"
        return Check("Hosts", Verdict.BROKEN, found, remedy)

    def _names(self) -> Check:
        wrong, differing = [], []
        if loopback := [host for host in self.hosts if _is_loopback(host)]:
            found = (
                f"{', '.join(loopback)}: TensorFlow listens at every address of a machine, so the ports clash"
            )
            return Check("Names", Verdict.BROKEN, found, "List different machines; on one machine, use -n")
        for node, host in enumerate(self.hosts):
            seen = {facts.addresses[node]: self.hosts[one] for one, facts in self.facts.items()}
            wrong += [f"{host} has no address on {on}" for address, on in seen.items() if not address]
            wrong += [f"{host} is {address} on {on}" for address, on in seen.items() if _is_loopback(address)]
            if len([address for address in seen if address]) > 1:
                differing.append(
                    f"{host} is " + ", ".join(f"{address} on {on}" for address, on in seen.items())
                )
        if wrong:
            remedy = "Correct /etc/hosts or the DNS there, or list addresses instead of names"
            return Check("Names", Verdict.BROKEN, "; ".join(wrong), remedy)
        if differing:
            return Check("Names", Verdict.NOTE, "; ".join(differing), "Fine if both lead to the same machine")
        return Check("Names", Verdict.GOOD, f"each has the same address on every host{self.limit}")

    def _ports(self) -> Check:
        taken = [facts.port for facts in self.facts.values() if facts.port]
        if taken:
            return Check(
                "Ports", Verdict.BROKEN, "; ".join(taken), "Stop what listens there, or choose --port"
            )
        closed = [
            f"{self.hosts[to]}:{self.port} from {self.hosts[node]}: {answer}"
            for node, found in self.found.items()
            for to, answer in found.reach.items()
            if answer != "answers"
        ]
        if closed:
            remedy = f"Open {self.port} and the ports after it, one per worker, between the hosts"
            return Check("Ports", Verdict.BROKEN, "; ".join(closed), remedy)
        if silent := [self.hosts[node] for node in self.facts if node not in self.found]:
            return Check("Ports", Verdict.NOTE, f"not known from {', '.join(silent)}, which left early")
        found = f"{self.port} of each host is reached from every host{self.limit}"
        return Check("Ports", Verdict.GOOD, found)

    def _clocks(self) -> Check:
        if len(self.clocks) < 2:
            return Check("Clocks", Verdict.GOOD, "nothing to compare")
        apart = max(self.clocks.values()) - min(self.clocks.values())
        if apart < _FAR_APART_SECS:
            return Check("Clocks", Verdict.GOOD, f"{apart:.3f} s apart at most")
        offsets = ", ".join(f"{self.hosts[node]} {secs:+.1f} s" for node, secs in self.clocks.items())
        remedy = (
            "Training does not need equal clocks; times in logs and on the page are easier with them (NTP)"
        )
        return Check("Clocks", Verdict.NOTE, f"{apart:.1f} s apart: {offsets}", remedy)

    def _merged(self, subject: str) -> Check:
        """What each host has found of itself, grouped: "2.21 on all", or "2.21 on h1, h3; 2.20 on h2"."""
        unknown, groups = Check(subject, Verdict.NOTE, "not known"), dict[str, list[str]]()
        checks = []
        for node, facts in self.facts.items():
            checks.append(next((one for one in facts.checks if one.subject == subject), unknown))
            groups.setdefault(checks[-1].found, []).append(self.hosts[node])
        worst = max(checks, key=lambda check: list(Verdict).index(check.verdict))
        if len(groups) == 1:
            return Check(subject, worst.verdict, f"{worst.found} on all{self.limit}", worst.remedy)
        shown = "; ".join(f"{found} on {', '.join(hosts)}" for found, hosts in groups.items())
        verdict, remedy = _IF_DIFFERENT.get(subject, (worst.verdict, worst.remedy))
        if subject == "Python" and len({tuple(version.split(".")[:2]) for version in groups}) == 1:
            verdict, remedy = Verdict.NOTE, "The same version everywhere is safer"
        if worst.verdict is Verdict.BROKEN:
            verdict, remedy = worst.verdict, worst.remedy
        return Check(subject, verdict, shown, remedy)

    def _run_dir(self) -> list[Check]:
        first = self.facts.get(0)
        if first is None or not first.run_dir:
            return []
        if first.run_dir != "writable":
            found = f"{first.run_dir} on {self.hosts[0]}, where worker 0 writes"
            return [Check("Run directory", Verdict.BROKEN, found, "Create it, or make it writable")]
        blind = [self.hosts[node] for node, found in self.found.items() if not found.sees_mark]
        if not blind:
            return [Check("Run directory", Verdict.GOOD, "the same one on all hosts")]
        found = f"{', '.join(blind)}: not the one of {self.hosts[0]}"
        remedy = (
            "Works: worker 0 reads and writes for all. Logs stay on each host; `push` and `status` run on "
        )
        return [Check("Run directory", Verdict.NOTE, found, remedy + self.hosts[0])]


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False
