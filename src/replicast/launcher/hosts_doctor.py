"""`replicast doctor --hosts`: whether some machines can be a job. They meet as launchers do.

When all have come, each looks around: at itself, at the names and ports of the others, and whether it sees
the run directory of the first one. Its checks go to the first host with its report, and from there to all,
with the order that ends the job: so each prints the same table. If a host does not come, the table has what
is known of the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from replicast.errors import ClusterError
from replicast.files import RunDir, below
from replicast.launcher.checks import Check, Verdict, machine_checks
from replicast.launcher.failure import GroupEnd, LaunchOrder, Phase, report
from replicast.launcher.hosts_leader import HostTimeouts
from replicast.launcher.hosts_link import CONNECT_SECS, HostsAttempts, Part, listen, make_link
from replicast.launcher.interruptions import Interruptions
from replicast.launcher.plan import JobPlan
from replicast.launcher.screen import make_screen
from replicast.names import NAMES_SECS, Dialer, Lookups

_MAX_HOSTS = 100  # The checks of all of them go to all of them, in one message.
_SHOWN = 4
_FAR_APART_SECS = 1.0
_SAME_VERSION = (Verdict.BROKEN, "Install the same version everywhere")
_IF_DIFFERENT = {
    **dict.fromkeys(("Python", "TensorFlow", "Keras"), _SAME_VERSION),
    "Names": (Verdict.NOTE, "Fine if each leads to the same machine from everywhere"),
    "Cores and GPUs": (Verdict.NOTE, "-n is the same on all hosts: the smallest one decides"),
}


def check_hosts(
    job: JobPlan,
    *,
    secret: bytes,
    timeout_secs: float,
    run_dir: RunDir | None,
    environ: Mapping[str, str],
) -> list[Check]:
    """Meets the other hosts and says what all have found. Only in the main thread."""
    if job.endpoint is None or len(job.hosts) > _MAX_HOSTS:
        raise ClusterError(
            f"--hosts must list from two to {_MAX_HOSTS} hosts", received=",".join(job.hosts)[:200]
        )
    own, session = job.hosts[job.node_rank], secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        interruptions = stack.enter_context(Interruptions())
        screen = make_screen(sys.stdout, sys.stderr, tee=frozenset(), environ=environ)
        stack.enter_context(contextlib.closing(screen))
        checks, taken = [_names(job.hosts), *machine_checks(environ)], ""
        try:  # The others try to connect to it.
            stack.enter_context(listen((own, job.port)))
        except ClusterError:
            taken = f"{own}:{job.port} cannot be used on {own}"
        if run_dir is not None and job.node_rank == 0:  # The other hosts look for this file.
            mark = below(run_dir) / f"doctor-{session}"
            with contextlib.suppress(OSError):
                os.close(mark.open(os.O_WRONLY | os.O_CREAT | os.O_EXCL))
                stack.callback(mark.unlink, missing_ok=True)
        part = Part(
            job=job,
            endpoint=job.endpoint,
            secret=secret,
            timeouts=HostTimeouts(join_secs=timeout_secs, tell_after_secs=0.0),
            next_attempt=0,
            facts=_told(checks),
            session=session,
        )
        peers = HostsAttempts(stack.enter_context(make_link(part)), job, screen, interruptions)
        order = peers.begin()
        if order.phase is Phase.RUN:
            clock = Check("Clocks", Verdict.GOOD, repr(time.time()))  # All hear at once that all have come.
            checks = [_ports(job, taken), clock, *checks]
            if run_dir is not None:
                checks.append(_run_directory(run_dir, order.session, is_first=job.node_rank == 0))
            order = peers.decide(GroupEnd(), _told(checks))
        if order.signal is not None:
            report(order, None, peers.hosts, screen)
            sys.exit(order.code)
    facts = {node: found for node, text in enumerate(order.facts) if (found := _heard(text))}
    return table(job.hosts, facts or {job.node_rank: checks}, order)


def _told(checks: Sequence[Check]) -> str:
    return msgspec.json.encode(checks).decode()


def _heard(text: str) -> list[Check]:
    with contextlib.suppress(msgspec.ValidationError, msgspec.DecodeError):
        return msgspec.json.decode(text or "[]", type=list[Check])
    return []


# --- What a host finds -----------------------------------------------------------------------------------


def _names(hosts: Sequence[str]) -> Check:
    """Blocks until the names of the hosts are resolved, at most `NAMES_SECS`."""
    lookups, found, wrong = Lookups(hosts), [], []
    lookups.wait(NAMES_SECS)
    for host in hosts:
        address = ""
        with contextlib.suppress(OSError):
            address = next(iter(lookups.addresses(host) or []), "")
        found.append(f"{host} is {address}" if address != host else host)
        if not address:
            wrong.append(f"{host} has no address")
        elif ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            wrong.append(f"{host} is {address}, at which other machines do not reach it")
    if wrong:
        remedy = "Correct /etc/hosts or the DNS there, or list addresses of different machines"
        return Check("Names", Verdict.BROKEN, _some(wrong), remedy)
    text = ", ".join(found)
    if len(text) > 200:
        text = f"addresses with the digest {hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return Check("Names", Verdict.GOOD, text)


def _ports(job: JobPlan, taken: str) -> Check:
    """Connects to every host; 2 s for each that does not answer."""
    if taken:
        return Check("Ports", Verdict.BROKEN, taken, "Stop what listens there, or choose --port")
    closed = []
    for host in job.hosts:
        try:
            Dialer(host, job.port).connect(CONNECT_SECS).close()
        except OSError as error:
            closed.append(f"{host}:{job.port} from {job.hosts[job.node_rank]}: {error.strerror or error}")
    if closed:
        remedy = f"Open {job.port} and the ports after it, one per worker, between the hosts"
        return Check("Ports", Verdict.BROKEN, _some(closed), remedy)
    return Check("Ports", Verdict.GOOD, f"{job.port} of each host is reached")


def _run_directory(run_dir: RunDir, session: str, *, is_first: bool) -> Check:
    subject, path = "Run directory", below(run_dir)
    if (path / f"doctor-{session}").exists():
        return Check(subject, Verdict.GOOD, "seen")
    if is_first:  # It could not make the file: worker 0 could write nothing either.
        found = "not writable" if path.is_dir() else "missing"
        return Check(subject, Verdict.BROKEN, found, "Worker 0 writes there: create it, or make it writable")
    remedy = (
        "Works: worker 0 reads and writes for all; logs stay on each host; `push` and `status` on the first"
    )
    return Check(subject, Verdict.NOTE, "not seen", remedy)


def _some(found: Sequence[str]) -> str:
    more = [f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "; ".join([*found[:_SHOWN], *more])


# --- What all have found: pure ---------------------------------------------------------------------------


def table(hosts: Sequence[str], facts: Mapping[int, Sequence[Check]], order: LaunchOrder) -> list[Check]:
    """The checks of all hosts that came, one line for each subject."""
    here = Check("Hosts", Verdict.GOOD, f"all {len(hosts)} came")
    if order.failure is not None:
        why, _, remedy = order.failure.why.partition(". ")
        here = Check("Hosts", Verdict.BROKEN, f"{hosts[order.failure.host]}: {why}", remedy)
    subjects = dict.fromkeys(check.subject for checks in facts.values() for check in checks)
    return [here, *(_merged(subject, hosts, facts) for subject in subjects)]


def _merged(subject: str, hosts: Sequence[str], facts: Mapping[int, Sequence[Check]]) -> Check:
    """What each host has found, grouped: "2.21 on all", or "2.21 on h1, h3; 2.20 on h2"."""
    unknown = Check(subject, Verdict.NOTE, "not known")
    checks = {
        hosts[node]: next((check for check in found if check.subject == subject), unknown)
        for node, found in facts.items()
    }
    if subject == "Clocks":
        return _clocks(checks)
    groups = dict[str, list[str]]()
    for host, check in checks.items():
        groups.setdefault(check.found, []).append(host)
    worst = max(checks.values(), key=lambda check: list(Verdict).index(check.verdict))
    if len(groups) == 1:
        limit = "" if len(facts) == len(hosts) else ", of those that came"
        return Check(subject, worst.verdict, f"{worst.found} on all{limit}", worst.remedy)
    verdict, remedy = worst.verdict, worst.remedy
    if verdict is not Verdict.BROKEN and subject in _IF_DIFFERENT:
        verdict, remedy = _IF_DIFFERENT[subject]
        if subject == "Python" and len({tuple(version.split(".")[:2]) for version in groups}) == 1:
            verdict, remedy = Verdict.NOTE, "The same version everywhere is safer"
    shown = [f"{found} on {', '.join(names)}" for found, names in groups.items()]
    return Check(subject, verdict, "; ".join(shown), remedy)


def _clocks(checks: Mapping[str, Check]) -> Check:
    """How far the clocks are apart, and the time that a message takes."""
    times = dict[str, float]()
    for host, check in checks.items():
        with contextlib.suppress(ValueError):  # It left before it was asked.
            times[host] = float(check.found)
    first = min(times.values(), default=0.0)
    apart = max(times.values(), default=0.0) - first
    if apart < _FAR_APART_SECS:
        return Check("Clocks", Verdict.GOOD, f"{apart:.3f} s apart at most")
    ahead = ", ".join(f"{host} {secs - first:+.1f} s" for host, secs in times.items())
    remedy = "Training does not need equal clocks; times in logs and on the page are easier with them (NTP)"
    return Check("Clocks", Verdict.NOTE, f"{apart:.1f} s apart: {ahead}", remedy)
