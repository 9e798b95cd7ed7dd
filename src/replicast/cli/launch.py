"""Commands that start something: `run` hands a job to the launcher, `serve` its page to a web server, and
`doctor` checks whether this machine can run one.

They start without numpy and rich: these are loaded while the workers start, or for a table.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from replicast import config
from replicast.errors import ClusterError, ServeRefused
from replicast.files import below
from replicast.launcher import launcher, plan
from replicast.launcher.hosts_leader import HostTimeouts

_DIR, _FILE = click.Path(path_type=Path), click.Path(dir_okay=False, path_type=Path)
_COUNT, _SECS = click.IntRange(min=0), click.FloatRange(min=0)
_PORTS_SECS = 5.0
_NEEDED = ("starlette", "uvicorn", "plotly")
_LITTLE_SHARED_MEMORY = 256 * 2**20


@click.command(context_settings={"allow_interspersed_args": False, "show_default": True})
@click.option("-n", "--workers", type=int, metavar="N", help="Workers on this machine. [default: 1]")
@click.option(
    "--from-tf-config",
    is_flag=True,
    help="For each task of TF_CONFIG, -n workers at its port and those after it. [default for -n: the GPUs]",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module's name, as in python -m.")
@click.option("--run-dir", type=_DIR, metavar="DIR", help="The run directory. [default: runs/TIME-PROGRAM]")
@click.option("--log-dir", type=_DIR, metavar="DIR", help="For attempt-K/worker-R.log. [default: in the run]")
@click.option("--max-restarts", type=_COUNT, default=0, metavar="K", help="Restarts after a failure.")
@click.option("--tee", metavar="WHO", help='Workers to show: "all", "none" or 0,2. [default: the first here]')
@click.option(
    "--grace",
    type=_SECS,
    default=plan.EndTimeouts().stop_secs,
    metavar="SECS",
    help="Time for the last checkpoint, before workers are killed; docs/hosts.md says how much.",
)
@click.option("--hosts", metavar="H1,H2", help="All machines, in the same order on each.")
@click.option(
    "--nnodes",
    type=click.IntRange(1),
    metavar="N",
    help="Instead of --hosts: how many machines; with --rdzv-endpoint.",
)
@click.option(
    "--node-rank",
    type=int,
    metavar="I",
    help="The index of this machine, from 0. [default: found by its address in --hosts]",
)
@click.option(
    "--rdzv-endpoint",
    metavar="HOST:PORT",
    help="Where the launcher of machine 0 waits for the others. [default: the first of --hosts, --port - 1]",
)
@click.option("--port", default=plan.DEFAULT_PORT, help="With --hosts: the first worker's port.")
@click.option("--serve", metavar="[HOST:]PORT", help="Serve the page of the job too; see `replicast serve`.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int | None,
    from_tf_config: bool,
    module: bool,
    run_dir: Path | None,
    log_dir: Path | None,
    max_restarts: int,
    tee: str | None,
    grace: float,
    port: int,
    serve: str | None,
    program: str,
    arguments: tuple[str, ...],
    **placed: Any,
) -> int:
    """Start the workers of a job on this machine and supervise them.

    Every worker runs PROGRAM with its ARGUMENTS and finds TF_CONFIG, RANK, WORLD_SIZE and LOCAL_RANK in its
    environment. All output is kept in log files. The screen leaves out TensorFlow's informational messages;
    set TF_CPP_MIN_LOG_LEVEL, for example to 0, to see them. When a worker fails, the others are stopped, and
    the first to fail is named. Where TF_CONFIG is already set, this machine runs the one worker it describes,
    or with --from-tf-config one worker for each of its GPUs.

    \b
    Examples:
      replicast run -n 2 train.py --epochs 3
      replicast run -n 4 --max-restarts 3 --run-dir runs/first train.py
      replicast run -n 2 --tee all -m my_package.train
      replicast run -n 2 --serve 8080 train.py
      replicast run -n 2 --hosts gpu1,gpu2 --run-dir /shared/first train.py        (the same on each)
      replicast run -n 2 --nnodes 2 --node-rank 0 --rdzv-endpoint gpu1:29400 train.py
      replicast run --from-tf-config train.py                (as a task of Kubeflow, Vertex AI, Ray or Slurm)

    On several machines, start the same command on each. Their launchers act as one: a failure anywhere
    restarts all, Ctrl-C on one stops all, and all exit with the same code (docs/hosts.md).

    Exit code: 0 when all workers succeeded; else that of the first worker to fail, or 128 plus the number of
    the signal that ended it; 130 after Ctrl-C, 143 after SIGTERM or a stop; 75 when a machine was lost or did
    not come; 2 when nothing was started.
    """
    (plan.check_module if module else plan.check_script)(program)
    argv = (sys.executable, *(["-m"] if module else []), program, *arguments)
    if config.is_evaluator(os.environ):  # It is no worker: there is nothing to supervise.
        place = {} if run_dir is None else {config.RUN_DIR: str(run_dir.absolute())}
        os.execve(sys.executable, argv, config.without(os.environ, *config.SECRETS) | place)
    given = config.read_cluster(os.environ)
    count = workers if workers is not None and not from_tf_config else 1
    job = plan.place_on_hosts(plan.JobPlan(argv=argv, workers=count, port=port, given=given), **placed)
    if from_tf_config:
        gpus = len(plan.this_machine(os.environ).gpus)
        job = plan.spread_over_devices(job, max(1, gpus) if workers is None else workers)
    heartbeat_secs = config.heartbeat_timeout_secs(os.environ)
    shown = plan.parse_tee(tee, job)
    page = None if serve is None else launcher.parse_page_address(serve)
    if job.fixed_ports is not None:
        # Refused before a run directory is made. After a kill -9 of the launcher before this one, its workers
        # may take a moment to give back their memory, and hold their ports until then.
        plan.hold_ports(job.fixed_ports, within_secs=_PORTS_SECS if job.nodes > 1 else 0.0).close()
    join_secs = config.start_timeout_secs(os.environ, HostTimeouts().join_secs)
    # Launchers are more patient than workers, who wait `heartbeat_secs` for each other.
    silent_secs = max(HostTimeouts().silent_secs, 2 * heartbeat_secs)
    if run_dir is None and job.node_rank == 0:
        name = program.rpartition(".")[2] if module else Path(program).stem
        run_dir = launcher.RUNS / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    job = replace(
        job,
        run_dir=None if run_dir is None else launcher.make_run_dir(run_dir),
        log_dir=None if log_dir is None else below(log_dir.absolute()),
        tee=shown,
        max_restarts=max_restarts,
        timeouts=plan.EndTimeouts(stop_secs=grace, frozen_secs=heartbeat_secs),
        secret=os.environ.get(config.JOB_SECRET, "").strip().encode(),
        host_timeouts=HostTimeouts(join_secs=join_secs, silent_secs=silent_secs),
        page=page,
    )
    # The environment of the children, who get it without secrets.
    environ = {**os.environ, config.HEARTBEAT_TIMEOUT: f"{heartbeat_secs:g}"}
    return launcher.supervise(job, environ)


@click.command(context_settings={"show_default": True})
@click.argument("path", metavar="RUN", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, metavar="P", help="The port; 0: any.")
@click.option("--token-file", type=_FILE, metavar="FILE", help="A token for actions. Made if missing.")
@click.option("--private", is_flag=True, help="Reading needs the token too, also from this machine.")
@click.option("--allow-host", "allowed_hosts", multiple=True, metavar="NAME", help="A name of the server.")
@click.option(
    "--trusted-proxy",
    "trusted_proxies",
    multiple=True,
    metavar="ADDRESS",
    help="A proxy, or a network of proxies, whose X-Forwarded-For says who is calling.",
)
@click.option("--certfile", type=_FILE, metavar="FILE", help="The certificate, for https.")
@click.option("--keyfile", type=_FILE, metavar="FILE", help="The key of the certificate.")
@click.option("--max-upload", type=click.IntRange(1), default=4096, metavar="MIB", help="The largest update.")
def serve(path: Path, token_file: Path | None, max_upload: int, **options: Any) -> None:
    """Serve the page of RUN: see the job, and steer it from a browser or by HTTP.

    RUN is a run directory, or a directory with several. The page follows the job and costs it nothing: the
    server reads what `replicast status` reads. Actions are off unless a token is given, by --token-file or
    the environment's REPLICAST_TOKEN. The API is described at /openapi.json, and /metrics is for Prometheus.

    \b
    Examples:
      replicast serve runs/first
      replicast serve runs --token-file ~/.replicast-token
      replicast serve runs --host 0.0.0.0 --token-file token --certfile cert.pem --keyfile key.pem

    Exit code: 0 after Ctrl-C or SIGTERM; 2 when it cannot be served.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise ServeRefused(
            f"The page needs {', '.join(missing)}", remedy="Install it with: pip install 'replicast[page]'"
        )
    from replicast.page.app import App
    from replicast.page.live import runs_in
    from replicast.page.web_server import PageSettings, address_of, listen, read_token, run

    token = read_token(token_file, os.environ)
    settings = PageSettings(token=token, max_upload_bytes=max_upload * 2**20, **options)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    with listen(settings) as listener:
        click.echo(f"Serving {path} at {address_of(settings, listener)}")
        if token_file is not None:
            click.echo(f"Clients need the token in {token_file} to change anything.")
        elif settings.token is None:
            click.echo("Actions are off: give --token-file FILE to allow them.")
        run(App(runs_in(path), settings), settings, listener)


# --- What works on this machine and what does not, with how to fix it ---------------------------------------


class Verdict(enum.Enum):
    GOOD = "✓"  # Nothing to do.
    NOTE = "!"  # Works, but worth knowing.
    BROKEN = "✗"  # Must be fixed first.


@dataclass(frozen=True, slots=True)
class Check:
    """What was checked, how it came out, what was found, and how to fix it."""

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


# The distributions that bring a package, the oldest version that works, the first one that was not tested,
# how to install and how to uninstall it. Release candidates of TensorFlow bring a second copy of Keras.
_PACKAGES = {
    "TensorFlow": (
        ("tensorflow", "tensorflow-cpu"),
        ((2, 20), (2, 23)),
        "pip install 'replicast[cpu]' (no GPU) or 'replicast[tensorflow]'",
        "pip uninstall -y tensorflow tensorflow-cpu, then install one of them",
    ),
    "Keras": (
        ("keras", "keras-nightly"),
        ((3, 12), ()),
        "pip install 'keras>=3.12'",
        "pip uninstall -y keras keras-nightly, then pip install --no-deps keras",
    ),
}


def check_package(subject: str, version_of: Callable[[str], str] = metadata.version) -> Check:
    names, (oldest, untested), install, uninstall = _PACKAGES[subject]
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = version_of(name)
    if not versions:
        return Check(subject, Verdict.BROKEN, "not installed", install)
    found = " and ".join(f"{name} {version}" for name, version in versions.items())
    if len(versions) > 1:
        return Check(subject, Verdict.BROKEN, f"{found}: two copies of the same files", uninstall)
    (name, version), *_ = versions.items()
    if release(version) < oldest or (untested and release(version) >= untested):
        bounds = ((">=", oldest), ("<", untested))
        ends = ",".join(f"{sign}{'.'.join(map(str, end))}" for sign, end in bounds if end)
        return Check(subject, Verdict.BROKEN, f"{found}: not supported", f"pip install '{name}{ends}'")
    return Check(subject, Verdict.GOOD, found)


def release(version: str) -> tuple[int, ...]:
    """The numbers a version starts with: "2.21.0rc1" is (2, 21, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def check_backend(environ: Mapping[str, str]) -> Check:
    home = environ.get("KERAS_HOME")
    settings = (Path(home) if home is not None else Path.home() / ".keras") / "keras.json"
    backend, where = environ.get("KERAS_BACKEND"), "KERAS_BACKEND"
    remedy = "export KERAS_BACKEND=tensorflow"
    if not backend:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # Keras ignores such a file too.
            backend, where = json.loads(settings.read_text()).get("backend"), str(settings)
            remedy = f'Set "backend": "tensorflow" in {where}, or {remedy}'
    if not backend or not isinstance(backend, str) or backend == "tensorflow":
        return Check("Keras backend", Verdict.GOOD, f"tensorflow ({where if backend else 'default'})")
    return Check("Keras backend", Verdict.BROKEN, f"{backend} ({where})", remedy)


def check_cluster(environ: Mapping[str, str]) -> Check:
    try:
        cluster = config.read_cluster(environ)
    except ClusterError as error:
        return Check("TF_CONFIG", Verdict.BROKEN, str(error), "Correct it, or unset TF_CONFIG")
    if cluster is None:
        return Check("TF_CONFIG", Verdict.GOOD, "not set: a job of one, or replicast run sets it")
    return Check("TF_CONFIG", Verdict.GOOD, f"worker {cluster.rank} of {cluster.size}")


def check_shared_memory(place: Path, free_bytes: Callable[[Path], int]) -> Check:
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Check("Shared memory", Verdict.BROKEN, f"{place} is missing or not writable", "Mount a tmpfs")
    free = free_bytes(place)
    found = f"{free / 2**20:,.0f} MiB free in {place}"
    if free < _LITTLE_SHARED_MEMORY:
        return Check("Shared memory", Verdict.NOTE, found, "In a container: docker run --shm-size=2g")
    return Check("Shared memory", Verdict.GOOD, found)


def check_machine(machine: plan.Machine) -> Check:
    verdict, fit = Verdict.GOOD, f"up to -n {machine.cores} without sharing a core"
    if machine.gpus:
        fit = f"-n {len(machine.gpus)} gives each worker one GPU"
    elif machine.cores < 2:
        verdict, fit = Verdict.NOTE, "several workers share one core"
    return Check("Cores and GPUs", verdict, f"{machine.cores} and {len(machine.gpus) or 'none'}: {fit}")


@click.command(context_settings={"show_default": True})
def doctor() -> int:
    """Check this machine, and say how to fix what is wrong.

    \b
    Examples:
      replicast doctor

    Exit code: 0 when nothing is broken, 1 when something must be fixed first, 2 when the command is wrong.
    """
    from rich.text import Text

    from replicast.cli import texts

    memory = Path(os.environ.get(config.SHM_DIR) or "/dev/shm")
    checks = [
        Check("Python", Verdict.GOOD, ".".join(map(str, sys.version_info[:3]))),  # pip has checked it
        check_package("TensorFlow"),
        check_package("Keras"),
        check_backend(os.environ),
        check_shared_memory(memory, lambda place: shutil.disk_usage(place).free),
        check_machine(plan.this_machine(os.environ)),
        check_cluster(os.environ),
    ]
    styles = {Verdict.GOOD: "green", Verdict.NOTE: "yellow", Verdict.BROKEN: "red"}
    rows = [
        (Text(one.verdict.value, style=styles[one.verdict]), one.subject, one.found, one.remedy)
        for one in checks
    ]
    texts.print_table("", "what", "found", "how to fix", rows=rows)
    broken = [check.subject for check in checks if check.verdict is Verdict.BROKEN]
    fine = "Nothing to fix. To see two workers train: replicast demo"
    click.echo(f"Fix first: {', '.join(broken)}." if broken else fine)
    return 1 if broken else 0
