"""Starts the workers of a job on this machine, watches them, and ends them together."""

from replicast.launcher.group import EndTimeouts
from replicast.launcher.launcher import Settings, supervise
from replicast.launcher.plan import Job, WorkerPlan, check_job, parse_tee, plan_workers
from replicast.launcher.ports import HeldPorts, hold_free_ports, hold_ports
from replicast.launcher.rundir import make_run_dir

__all__ = [
    "EndTimeouts",
    "HeldPorts",
    "Job",
    "Settings",
    "WorkerPlan",
    "check_job",
    "hold_free_ports",
    "hold_ports",
    "make_run_dir",
    "parse_tee",
    "plan_workers",
    "supervise",
]
