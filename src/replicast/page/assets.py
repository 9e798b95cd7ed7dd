"""The page's own files, and plotly's JavaScript from the installed package: nothing comes from outside."""

from __future__ import annotations

import gzip
import hashlib
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response

from replicast.page.problems import HttpError

_HERE = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PLOTLY = "plotly.js"
PAGE = "index.html"


@lru_cache(maxsize=64)
def _content(name: str) -> tuple[bytes, bytes, str]:
    """A file as it is and compressed, and its tag. Blocks."""
    plain = (plotly_file() if name == PLOTLY else _HERE / name).read_bytes()
    return plain, gzip.compress(plain, 6, mtime=0), hashlib.sha256(plain).hexdigest()[:32]


@lru_cache(maxsize=1)
def names() -> frozenset[str]:
    """The files that can be asked for."""
    return frozenset({PLOTLY, *(path.name for path in _HERE.iterdir() if path.suffix in _TYPES)})


def plotly_file() -> Path:
    """Plotly's JavaScript, as its Python package brings it."""
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        raise HttpError(503, "plotly is not installed", remedy="pip install 'replicast[page]'")
    return Path(spec.origin).parent / "package_data" / "plotly.min.js"


def asset(name: str, headers: Headers) -> Response:
    """The answer to a request for one of the files. Blocks."""
    if name not in names():
        raise HttpError(404, "There is no such file", received=name)
    plain, compressed, digest = _content(name)
    tag = f'"{digest}"'
    answer = {"ETag": tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if tag in headers.get("if-none-match", ""):
        return Response(status_code=304, headers=answer)
    takes_gzip = "gzip" in headers.get("accept-encoding", "")
    if takes_gzip:
        answer["Content-Encoding"] = "gzip"
    media = _TYPES[Path(name).suffix]
    return Response(compressed if takes_gzip else plain, headers=answer | {"Content-Type": media})
