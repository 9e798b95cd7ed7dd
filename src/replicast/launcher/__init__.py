"""Starts the workers of a job on this machine, watches them, and ends them together."""

from replicast.launcher.group import EndTimeouts
from replicast.launcher.launcher import Settings, supervise
from replicast.launcher.plan import HeldPorts, Job, hold_free_ports, hold_ports, parse_tee
from replicast.launcher.run_directory import make_run_dir

__all__ = [
    "EndTimeouts",
    "HeldPorts",
    "Job",
    "Settings",
    "hold_free_ports",
    "hold_ports",
    "make_run_dir",
    "parse_tee",
    "supervise",
]
