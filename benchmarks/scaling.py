"""`python -m benchmarks.scaling`: how a transfer grows with hosts, bytes and bandwidth; a model of it.

Hosts are namespaces on one switch, without TensorFlow. Writes every figure and the fitted model into
`results/scaling.json`, and draws docs/images/scaling.svg. `--fit` measures nothing: it fits stored figures.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.groups import REPOSITORY, cluster_of
from benchmarks.results import DIRECTORY
from benchmarks.scaling_worker import ARRAY_BYTES
from tests.hosts.network import Network

RESULTS = DIRECTORY / "scaling.json"
PICTURE = REPOSITORY / "docs" / "images" / "scaling.svg"
HOSTS = (2, 3, 4, 6, 8)
BYTES = {"200mbit": (4_000_000, 24_000_000), "1gbit": (4_000_000, 24_000_000, 100_000_000)}
BYTES_PER_SEC = {"200mbit": 25e6, "1gbit": 125e6}
KINDS = ("add", "add_low_rank", "add_rows", "changed_only")
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Point:
    """A measured transfer: the median of its rounds."""

    hosts: int
    nbytes: int
    bytes_per_sec: float
    secs: float


@dataclass(frozen=True, slots=True)
class Model:
    """secs = start + line · bytes / bandwidth + (hosts - 2) · (fill · block / bandwidth + hop)

    Attributes:
        start: Seconds before the first byte, on two hosts.
        line: How many bytes go over the line per byte of the update.
        fill: How many blocks a host receives before the next one receives the first.
        hop: Seconds that a host adds, whatever the bandwidth.
    """

    start: float
    line: float
    fill: float
    hop: float

    def secs(self, hosts: int, nbytes: float, bytes_per_sec: float, latency_secs: float = 0.0) -> float:
        link = self.fill * ARRAY_BYTES / bytes_per_sec + self.hop + latency_secs
        return self.start + latency_secs + self.line * nbytes / bytes_per_sec + (hosts - 2) * link


def fitted(points: list[Point]) -> Model:
    """The model with the smallest relative errors; no part of it is negative."""
    rows = np.array(
        [
            [
                1.0,
                point.nbytes / point.bytes_per_sec,
                (point.hosts - 2) * ARRAY_BYTES / point.bytes_per_sec,
                point.hosts - 2,
            ]
            for point in points
        ]
    )
    secs = np.array([point.secs for point in points])
    weighted, ones = rows / secs[:, None], np.ones(len(points))
    used = list(range(rows.shape[1]))
    while True:
        found = np.linalg.lstsq(weighted[:, used], ones, rcond=None)[0]
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))
    parts = np.zeros(rows.shape[1])
    parts[used] = found
    return Model(*map(float, parts))


def measured(network: Network, hosts: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Transfers between the first hosts of a network."""
    addresses = [f"{host.address}:2222" for host in network.hosts[:hosts]]
    with tempfile.TemporaryDirectory() as directory:
        arguments = [str(hosts), directory, ",".join(kinds), str(ROUNDS)]
        workers = [
            host.start(
                [sys.executable, "-m", "benchmarks.scaling_worker", str(rank), *arguments],
                env={**os.environ, "PYTHONPATH": ":".join(sys.path), **cluster_of(rank, addresses)},
                stdout=subprocess.PIPE,
            )
            for rank, host in enumerate(network.hosts[:hosts])
        ]
        try:
            outputs = [worker.communicate(timeout=200)[0].decode() for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    assert all(worker.returncode == 0 for worker in workers), outputs
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


def measure() -> dict[str, Any]:
    points: list[Point] = []
    load = os.getloadavg()
    with Network(max(HOSTS)) as network:
        for rate, sizes in BYTES.items():
            network.shape(rate)
            for hosts in HOSTS:
                found = measured(network, hosts, tuple(map(str, sizes)))
                for size in sizes:
                    secs = statistics.median(found[str(size)]["secs"])
                    points.append(Point(hosts, found[str(size)]["nbytes"], BYTES_PER_SEC[rate], secs))
                    sys.stderr.write(f"{points[-1]}\n")
        kinds = measured(network, 2, KINDS)
    return {"load": [load, os.getloadavg()], "points": [asdict(point) for point in points], "kinds": kinds}


def draw(points: list[Point], model: Model, path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from benchmarks.pictures import LINES, STYLE, themed

    title = "An update of 100 MB by the number of hosts: measured (dots) and the model"
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 4.6), layout="constrained")
        axes = figure.add_subplot()
        figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
        across = np.unique(np.geomspace(2, 1000, 60).astype(int))
        for (name, speed), color in zip(
            (("200 Mbit/s", 25e6), ("1 Gbit/s", 125e6), ("10 Gbit/s", 1.25e9), ("25 Gbit/s", 3.125e9)),
            LINES,
            strict=False,
        ):
            axes.plot(across, [model.secs(int(n), 1e8, speed) for n in across], color=color, label=name)
            own = [one for one in points if one.bytes_per_sec == speed and one.nbytes == 1e8]
            axes.plot([one.hosts for one in own], [one.secs for one in own], "o", color=color, markersize=5)
        axes.set(xscale="log", yscale="log", xlabel="hosts", ylabel="s until the last host has it")
        axes.set_xticks([2, 4, 8, 64, 1000], ["2", "4", "8", "64", "1,000"])
        axes.minorticks_off()
        axes.grid(linewidth=0.6)
        axes.legend(frameon=False, title="links of", alignment="left", fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
    path.write_text(themed(path.read_text(), title))


def main() -> None:
    figures = json.loads(RESULTS.read_text()) if "--fit" in sys.argv else measure()
    points = [Point(**point) for point in figures["points"]]
    model = fitted(points)
    errors = [model.secs(one.hosts, one.nbytes, one.bytes_per_sec) / one.secs - 1 for one in points]
    figures["model"] = {**asdict(model), "largest_error": max(map(abs, errors))}
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    draw(points, model, PICTURE)
    sys.stdout.write(f"{model}\nlargest error {max(map(abs, errors)):.1%}\n")
    for hosts in (2, 4, 8, 64, 1000):
        for name, speed in (("1 Gbit/s", 125e6), ("10 Gbit/s", 1.25e9)):
            sys.stdout.write(f"{hosts:5} hosts, {name}: {model.secs(hosts, 1e8, speed, 1e-4):.2f} s\n")
    for kind, found in figures["kinds"].items():
        secs = statistics.median(found["secs"])
        sys.stdout.write(f"{kind}: {found['nbytes']:,} bytes, {secs * 1e3:.0f} ms at 1 Gbit/s\n")


if __name__ == "__main__":
    main()
