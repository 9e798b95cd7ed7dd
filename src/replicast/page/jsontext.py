"""JSON that every browser reads: in one line, without NaN and infinity, which become text."""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.responses import JSONResponse


def dumped(value: Any) -> str:
    """A value as JSON."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


class Json(JSONResponse):
    """An answer in JSON."""

    def render(self, content: Any) -> bytes:
        """The bytes of the answer."""
        return dumped(content).encode()


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {name: _finite(one) for name, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return value
