"""`replicast.connect`: from what a person gives to the run that is meant."""

from __future__ import annotations

import os
from pathlib import Path

from replicast.client.directory import DirectoryRun
from replicast.client.http import Address, read_token
from replicast.client.notes import is_run
from replicast.client.run import Run
from replicast.client.served import ServedRun
from replicast.errors import NotFound
from replicast.files import RunDir, below


def connect(run: RunDir, *, token: str | None = None, token_file: Path | str | None = None) -> Run:
    """The run in a directory, or at the address at which it is served.

    Args:
        run: The --run-dir of the job, or an address such as "https://host:8080/first".
        token: For an address: what the server asks for.
        token_file: A file with the token. Default: the environment's REPLICAST_TOKEN, or the file that
            REPLICAST_TOKEN_FILE names.

    Raises:
        NotFound: There is no such run, or its job has not begun yet; names those near it.
        RequestFailed: The address cannot be used, its server cannot be reached, or does not accept the token.
    """
    if is_address(run):
        return ServedRun(Address.parse(str(run)), read_token(token, token_file, os.environ))
    if is_run(run):
        return DirectoryRun(run)
    path = below(run)
    if not path.is_dir():
        raise NotFound(f"There is no directory {path}. Give the --run-dir of the job.")
    try:
        children = sorted(path.iterdir())
    except OSError as error:
        raise NotFound(f"The directory {path} cannot be read ({error.strerror}).") from error
    near = [str(child) for child in (*children, below(path.as_path().parent)) if is_run(child)][-5:]
    if near:
        raise NotFound(f"{path} is not a run directory. Perhaps: {', '.join(near)}.")
    if path.glob("launcher-*.lock") and not (path / "launcher-0.lock").exists():
        raise NotFound(f"{path} has only logs here: it is not shared with the first host. Run this there.")
    raise NotFound(f"{path} has no run.json yet: is the job still starting?")


def is_address(run: RunDir) -> bool:
    """Whether a run is given by its address, and not by its directory."""
    return isinstance(run, str) and run.startswith(("http://", "https://"))
