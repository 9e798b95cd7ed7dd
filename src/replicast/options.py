"""Optional environment variables: who may connect to the workers, and where progress is reported."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from replicast.config import shortened
from replicast.errors import ClusterError

TRUSTED_NETWORKS = "REPLICAST_TRUSTED_NETWORKS"
"""Who may connect to TensorFlow's ports: networks such as 10.1.0.0/16,fd00::/8, or "any"."""
PROGRESS_FILE = "REPLICAST_PROGRESS_FILE"
PROGRESS_URL = "REPLICAST_PROGRESS_URL"
KUBEFLOW_SERVER = "KUBEFLOW_TRAINER_SERVER"
"""With _URL, _TOKEN and _CA_CERT: what Kubeflow's Trainer sets in the pods of a TrainJob."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
LOOPBACK: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))


@dataclass(frozen=True, slots=True)
class ProgressTarget:
    """Where a worker reports its progress.

    Attributes:
        file: The heartbeat file of this worker.
        url: Where worker 0 sends reports.
        token_file: The file with the token that is sent with them.
        ca_file: The file with the certificates that are trusted there; None for those of the system.
    """

    file: Path | None = None
    url: str | None = None
    token_file: Path | None = None
    ca_file: str | None = None


def progress_target(environ: Mapping[str, str], rank: int) -> ProgressTarget:
    """Where to report progress: `REPLICAST_PROGRESS_FILE` and `REPLICAST_PROGRESS_URL`; nowhere by default.

    The file's name may contain {rank}. The address may be "kubeflow" for the one
    that Kubeflow's Trainer sets.

    Raises:
        ClusterError: The address is invalid.
    """
    file = environ.get(PROGRESS_FILE, "").strip()
    url = environ.get(PROGRESS_URL, "").strip()
    token_file = ca_file = None
    if url == "kubeflow":
        url = environ.get(f"{KUBEFLOW_SERVER}_URL", "")
        if not url:
            raise ClusterError(
                f"{PROGRESS_URL} is kubeflow, but {KUBEFLOW_SERVER}_URL is not set",
                remedy="Enable the feature gate TrainJobStatus of Kubeflow's Trainer, or unset the variable",
            )
        token_file = environ.get(f"{KUBEFLOW_SERVER}_TOKEN")
        ca_file = environ.get(f"{KUBEFLOW_SERVER}_CA_CERT")
    if "@" in url:  # Not shown: what comes before it may be a password.
        raise ClusterError(f"{PROGRESS_URL} must be an address without a user, a password and @")
    if url and not _is_address(url):
        raise ClusterError(
            f'{PROGRESS_URL} must be an http or https address, or "kubeflow"', received=shortened(url)
        )
    return ProgressTarget(
        file=Path(file.replace("{rank}", str(rank))).absolute() if file else None,
        url=url or None,
        token_file=Path(token_file) if token_file else None,
        ca_file=ca_file or None,
    )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # A port that is none, or a bracket that is not closed.
        return False


def trusted_networks(environ: Mapping[str, str], addresses: Sequence[str]) -> tuple[Network, ...] | None:
    """Which networks may connect to TensorFlow's ports: `REPLICAST_TRUSTED_NETWORKS`.

    Args:
        environ: The environment.
        addresses: The addresses of all workers. If all are on the loopback, only that is the default.

    Returns:
        The networks, the loopback included; None for any network: the default between machines, where a
        worker's connections may come from another address than the one in `TF_CONFIG`.

    Raises:
        ClusterError: The value is not a list of networks.
    """
    text = environ.get(TRUSTED_NETWORKS, "").strip()
    if text == "any":
        return None
    if not text:
        return LOOPBACK if addresses and all(map(_is_loopback, addresses)) else None
    try:
        return LOOPBACK + tuple(ipaddress.ip_network(part.strip()) for part in text.split(","))
    except ValueError as error:
        raise ClusterError(
            f"{TRUSTED_NETWORKS} must be networks separated by commas ({error})",
            received=shortened(text),
            remedy='For example 10.1.0.0/16,fd00::/8, or "any"',
        ) from None


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
