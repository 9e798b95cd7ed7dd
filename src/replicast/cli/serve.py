"""`replicast serve`: the page of a run, or of all runs in a directory, and their HTTP interface."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from replicast.errors import ServeRefused

_FILE = click.Path(dir_okay=False, path_type=Path)
_NEEDED = ("starlette", "uvicorn", "plotly")


@click.command(context_settings={"show_default": True})
@click.argument("path", metavar="RUN", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8080, metavar="P", help="The port; 0 for any free one."
)
@click.option(
    "--token-file", type=_FILE, metavar="FILE", help="A token that allows actions. Created if missing."
)
@click.option("--private", is_flag=True, help="Reading needs the token too, also from this machine.")
@click.option(
    "--allow-host", "allowed_hosts", multiple=True, metavar="NAME", help="A name of the server, as a proxy's."
)
@click.option(
    "--trusted-proxy",
    "trusted_proxies",
    multiple=True,
    metavar="ADDRESS",
    help="A proxy, or a network of proxies, whose X-Forwarded-For says who is calling.",
)
@click.option("--certfile", type=_FILE, metavar="FILE", help="The certificate, for https.")
@click.option("--keyfile", type=_FILE, metavar="FILE", help="The key of the certificate.")
@click.option(
    "--max-upload", type=click.IntRange(1), default=4096, metavar="MIB", help="The largest update to accept."
)
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
            click.echo(f"The token is in {token_file}: clients that send it may act.")
        elif settings.token is None:
            click.echo("Actions are off: give --token-file FILE to allow them.")
        run(App(runs_in(path), settings), settings, listener)
