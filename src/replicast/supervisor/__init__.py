"""Starts the workers of a job on this machine, watches them, and ends them together."""

from replicast.supervisor.group import EndTimeouts
from replicast.supervisor.plan import Job, WorkerPlan, check_job, parse_tee, plan_workers
from replicast.supervisor.ports import HeldPorts, hold_free_ports, hold_ports
from replicast.supervisor.rundir import make_run_dir
from replicast.supervisor.supervisor import Settings, supervise

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
