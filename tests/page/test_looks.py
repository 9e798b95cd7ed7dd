"""What can be said of the looks without a browser: contrast, and that nothing comes from outside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import replicast.page
from replicast.page.assets import plotly_script

STATIC = Path(replicast.page.__file__).parent / "static"
TEXT_ON = [
    ("ink", "ground"), ("ink", "card"), ("ink", "soft"), ("dim", "ground"), ("dim", "card"), ("dim", "soft"),
    ("accent", "card"), ("accent", "ground"), ("accent", "accent-soft"), ("accent-ink", "accent"),
    ("good", "good-soft"), ("careful", "careful-soft"), ("bad", "bad-soft"), ("bad", "card"), ("card", "bad"),
]  # fmt: skip
"""Which colour of text stands on which ground."""


def colours(scheme: str) -> dict[str, str]:
    light, dark = (STATIC / "page.css").read_text().split("@media (prefers-color-scheme: dark)")[:2]
    part = light if scheme == "light" else dark.partition("\n}\n")[0]
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", part))


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("text", "ground"), TEXT_ON)
def test_text_has_the_contrast_that_the_guidelines_ask_for(scheme: str, text: str, ground: str) -> None:
    named = colours(scheme)
    lighter, darker = sorted((luminance(named[text]), luminance(named[ground])), reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) >= 4.5


@pytest.mark.parametrize("path", sorted(STATIC.iterdir()), ids=lambda path: path.name)
def test_the_page_loads_nothing_from_outside_and_puts_no_data_into_markup(path: Path) -> None:
    content = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//cdn|@import|url\(", content)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", content
    )
    assert not re.search(r"\sstyle=|\son[a-z]+=\"", content)


def test_of_plotly_only_what_the_charts_use_is_run() -> None:
    script = plotly_script()
    assert script is not None
    assert b".register([])" in script, "plotly registers its kinds of traces in another way: see assets.py"
    assert not re.search(rb'if\(!document\.getElementById\("[0-9a-f]{64}"\)\)', script)
