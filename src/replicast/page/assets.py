"""The page's own files: served by app.py, or all in one HTML file with a run's data (`replicast report`).

A report is the page itself. Its scripts are modules in an import map of `data:` addresses, its data is JSON
in an element that no browser runs, and `report.js` answers from it what a server would answer. A policy in
the file forbids every request. Whatever comes from a job is text, as on the page. This module needs none of
the packages of a web server; without plotly, which is most of the file's 5 MB, a report has no chart.
"""

from __future__ import annotations

import base64
import json
import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from replicast.client.directory import DirectoryRun
from replicast.client.run import OPERATIONS
from replicast.storage.claims import Chain
from replicast.storage.run_files import changes

STATIC = Path(__file__).parent / "static"
PLOTLY = "plotly.js"
PAGE = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_MOST_AUDITS = 1000
_TRACES = re.compile(rb"register\(\[(?:[\w$]+\(\),?){20,}\]\)")
_IF_NO_STYLE = re.compile(rb'if\(!document\.getElementById\("[0-9a-f]{64}"\)\)')
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:; "
    "form-action 'none'; base-uri 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


def plotly_script() -> bytes | None:
    """Plotly's JavaScript, as its Python package brings it, but for what no chart of this page uses.

    That is every kind of trace other than scatter, which its core has: to run them takes a browser most of
    the second that plotly holds up a page. And the style sheet of its maps, which a browser would report as a
    violation of the page's policy. Of a version that is written otherwise, all of it is served.
    """
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        return None
    script = (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_bytes()
    return _TRACES.sub(b"register([])", _IF_NO_STYLE.sub(b"if(false)", script))


@lru_cache(maxsize=1)
def asset_names() -> frozenset[str]:
    return frozenset({PLOTLY, *(path.name for path in STATIC.iterdir() if path.suffix in TYPES)})


def report(run: DirectoryRun, chain: Chain) -> str:
    """The page of a run as one HTML document that needs no server."""
    data = json.dumps(_data(run, chain), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    drawing, icon = (plotly_script() or b"").decode().replace("</script", "<\\/script"), _address("icon.svg")
    style = (STATIC / "page.css").read_text()
    # Relative imports cannot be resolved from a data: address; names in the import map can.
    scripts = {f"replicast/{path.name}": _address(path.name) for path in sorted(STATIC.glob("*.js"))}
    parts = {
        '<meta charset="utf-8">': '<meta charset="utf-8">\n  '
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<link rel="stylesheet" href="static/page.css">': f"<style>{style}</style>",
        '<link rel="modulepreload" href="static/plotly.js">': f"<script>{drawing}</script>",
        '<script src="static/main.js" type="module"></script>': (
            f'<script type="importmap">{json.dumps({"imports": scripts})}</script>\n'
            f'<script type="application/json" id="report-data">{data}</script>\n'
            '<script type="module">import "replicast/main.js";</script>'
        ),
        "static/icon.svg": icon,
        'href="./"': 'href="#main"',
    }
    html = (STATIC / PAGE).read_text()
    for part, inlined in parts.items():
        html = html.replace(part, inlined)
    return html


def _data(run: DirectoryRun, chain: Chain) -> dict[str, Any]:
    """What the page reads, by the paths at which it asks a server for it; and the chain of the journal."""

    def told(row: str, **arguments: Any) -> Any:
        return OPERATIONS[row].encoded(getattr(run, row)(**arguments))

    return {
        "status": told("status"),
        "chain": {"length": chain.length, "last": chain.last, "problems": list(chain.problems)},
        "changes": [change.to_json() for change in changes(run.path)],
        "answers": {
            "api/runs": [{"name": run.path.name, "actions": False, **told("brief")}],
            "metrics": told("metrics"),
            "metrics?of=workers&points=400": told("metrics", of="workers", points=400),
            "updates": OPERATIONS["log"].encoded(run.with_histograms()),
            "audits": told("audits", last=_MOST_AUDITS),
            "checkpoints": told("checkpoints"),
        },
    }


def _address(name: str) -> str:
    content = (STATIC / name).read_text().replace('from "./', 'from "replicast/')
    return f"data:{TYPES[Path(name).suffix]};base64,{base64.b64encode(content.encode()).decode()}"
