"""Whether hosts can be a job, from what each of them has found. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from replicast.config import TRUSTED_NETWORKS
from replicast.launcher.checks import LITTLE_SHARED_MEMORY, Check, Verdict
from replicast.launcher.hosts.facts import Facts, Found

_FAR_APART_SECS = 1.0


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was found."""

    hosts: Sequence[str]
    port: int
    facts: Mapping[int, Facts]
    found: Mapping[int, Found] = field(default_factory=dict)
    clocks: Mapping[int, float] = field(default_factory=dict)
    waited_secs: float = 0.0


def diagnose(evidence: Evidence) -> list[Check]:
    """The checks of a job on several hosts."""
    return [
        _presence(evidence),
        _names(evidence),
        _ports(evidence),
        _exposure(evidence),
        _clocks(evidence),
        *(_version(evidence, what) for what in ("Python", "TensorFlow", "Keras", "replicast")),
        _shared_memory(evidence),
        _resources(evidence),
        *_run_dir(evidence),
    ]


def _presence(evidence: Evidence) -> Check:
    absent = [host for node, host in enumerate(evidence.hosts) if node not in evidence.facts]
    if not absent:
        return Check("Hosts", Verdict.GOOD, f"all {len(evidence.hosts)} came")
    found = f"{', '.join(absent)} did not come within {evidence.waited_secs:.0f} s"
    remedy = "Start the same command there at the same time; if it runs there, it says what it waits for"
    return Check("Hosts", Verdict.BROKEN, found, remedy)


def _names(evidence: Evidence) -> Check:
    wrong, differing = [], []
    for node, host in enumerate(evidence.hosts):
        seen = {facts.addresses[node]: evidence.hosts[one] for one, facts in evidence.facts.items()}
        wrong += [f"{host} has no address on {on}" for address, on in seen.items() if not address]
        if len(evidence.hosts) > 1 and host not in seen:
            wrong += [f"{host} is {address} on {on}" for address, on in seen.items() if _is_loopback(address)]
        if len([address for address in seen if address]) > 1:
            differing.append(f"{host} is " + ", ".join(f"{address} on {on}" for address, on in seen.items()))
    if wrong:
        remedy = "Correct /etc/hosts or the DNS there, or list addresses instead of names"
        return Check("Names", Verdict.BROKEN, "; ".join(wrong), remedy)
    if differing:
        return Check("Names", Verdict.NOTE, "; ".join(differing), "Fine if both lead to the same machine")
    return Check("Names", Verdict.GOOD, f"each has the same address on every host{_limit(evidence)}")


def _limit(evidence: Evidence) -> str:
    """What is said of hosts that did not come: nothing."""
    return "" if len(evidence.facts) == len(evidence.hosts) else ", of those that came"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _ports(evidence: Evidence) -> Check:
    taken = [facts.port for facts in evidence.facts.values() if facts.port]
    if taken:
        return Check("Ports", Verdict.BROKEN, "; ".join(taken), "Stop what listens there, or choose --port")
    closed = [
        f"{evidence.hosts[int(to)]}:{evidence.port} from {evidence.hosts[node]}: {answer}"
        for node, found in evidence.found.items()
        for to, answer in found.reach.items()
        if answer != "answers"
    ]
    silent = [evidence.hosts[node] for node in evidence.facts if node not in evidence.found]
    if closed:
        remedy = f"Open {evidence.port} and the ports after it, one per worker, between the hosts"
        return Check("Ports", Verdict.BROKEN, "; ".join(closed), remedy)
    if silent:
        return Check("Ports", Verdict.NOTE, f"not known from {', '.join(silent)}, which left early")
    found = f"{evidence.port} of each host is reached from every host{_limit(evidence)}"
    return Check("Ports", Verdict.GOOD, found)


def _exposure(evidence: Evidence) -> Check:
    open_to_all = [evidence.hosts[node] for node, facts in evidence.facts.items() if not facts.trusted]
    if open_to_all:
        found = (
            f"{', '.join(open_to_all)}: any process that can reach the workers' ports can run code in them"
        )
        remedy = f"Set {TRUSTED_NETWORKS} to the job's networks, or use a firewall: SECURITY.md"
        return Check("Open ports", Verdict.NOTE, found, remedy)
    trusted = {node: facts.trusted for node, facts in evidence.facts.items()}
    return Check("Open ports", Verdict.GOOD, f"{TRUSTED_NETWORKS}={_by_value(evidence, trusted)}")


def _clocks(evidence: Evidence) -> Check:
    if len(evidence.clocks) < 2:
        return Check("Clocks", Verdict.GOOD, "nothing to compare")
    apart = max(evidence.clocks.values()) - min(evidence.clocks.values())
    if apart < _FAR_APART_SECS:
        return Check("Clocks", Verdict.GOOD, f"{apart:.3f} s apart at most")
    offsets = ", ".join(f"{evidence.hosts[node]} {secs:+.1f} s" for node, secs in evidence.clocks.items())
    remedy = "Training does not need equal clocks; times in logs and on the page are easier with them (NTP)"
    return Check("Clocks", Verdict.NOTE, f"{apart:.1f} s apart: {offsets}", remedy)


def _version(evidence: Evidence, what: str) -> Check:
    versions = {node: facts.versions.get(what, "") for node, facts in evidence.facts.items()}
    shown = _by_value(evidence, {node: version or "not installed" for node, version in versions.items()})
    if not all(versions.values()):
        return Check(what, Verdict.BROKEN, shown, "Install it there")
    if len(set(versions.values())) == 1:
        return Check(what, Verdict.GOOD, shown)
    releases = {tuple(version.split(".")[:2]) for version in versions.values()}
    if what == "Python" and len(releases) == 1:
        return Check(what, Verdict.NOTE, shown, "The same version everywhere is safer")
    return Check(what, Verdict.BROKEN, shown, "Install the same version everywhere")


def _shared_memory(evidence: Evidence) -> Check:
    free = {node: facts.shared_bytes for node, facts in evidence.facts.items()}
    none = [evidence.hosts[node] for node, size in free.items() if size is None]
    if none:
        return Check(
            "Shared memory", Verdict.BROKEN, f"none on {', '.join(none)}", "Mount a tmpfs on /dev/shm"
        )
    least, node = min((size, node) for node, size in free.items() if size is not None)
    found = f"{least / 2**20:,.0f} MiB free at least, on {evidence.hosts[node]}"
    if least < LITTLE_SHARED_MEMORY:
        return Check("Shared memory", Verdict.NOTE, found, "In a container: docker run --shm-size=2g")
    return Check("Shared memory", Verdict.GOOD, found)


def _resources(evidence: Evidence) -> Check:
    shown = {node: f"{facts.cores} and {facts.gpus or 'none'}" for node, facts in evidence.facts.items()}
    verdict = Verdict.GOOD if len(set(shown.values())) == 1 else Verdict.NOTE
    remedy = "" if verdict is Verdict.GOOD else "-n is the same on all hosts: the smallest one decides"
    return Check("Cores and GPUs", verdict, _by_value(evidence, shown), remedy)


def _run_dir(evidence: Evidence) -> list[Check]:
    first = evidence.facts.get(0)
    if first is None or not first.run_dir:
        return []
    if first.run_dir != "writable":
        found = f"{first.run_dir} on {evidence.hosts[0]}, where worker 0 writes"
        return [Check("Run directory", Verdict.BROKEN, found, "Create it, or make it writable")]
    blind = [evidence.hosts[node] for node, found in evidence.found.items() if not found.sees_mark]
    if not blind:
        return [Check("Run directory", Verdict.GOOD, "the same one on all hosts")]
    found = f"{', '.join(blind)}: not the one of {evidence.hosts[0]}"
    remedy = "Works: worker 0 reads and writes for all. Logs stay on each host; `push` and `status` run on "
    return [Check("Run directory", Verdict.NOTE, found, remedy + evidence.hosts[0])]


def _by_value(evidence: Evidence, values: Mapping[int, str]) -> str:
    """A value per host, grouped: "2.21.0 on all", or "2.21.0 on h1, h3; 2.20.0 on h2"."""
    groups: dict[str, list[str]] = {}
    for node, value in values.items():
        groups.setdefault(value, []).append(evidence.hosts[node])
    if len(groups) == 1:
        return f"{next(iter(groups))} on all{_limit(evidence)}"
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in groups.items())
