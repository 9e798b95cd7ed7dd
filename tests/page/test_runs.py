"""The list of runs, their comparison, and notes, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from replicast.client import connect
from replicast.storage.run_files import Change, JobState, write_change
from replicast.update.update import Update
from tests.page.browser import Watched
from tests.page.live import Serving
from tests.page.played_run import PlayedRun
from tests.page.test_browser import SECS, TOKEN, UNNAMED, browser, context, serving

__all__ = ["browser", "context", "serving"]


@pytest.fixture(scope="module")
def runs(serving: Serving) -> Iterator[None]:
    """One that failed, one that has ended with an update, a note and a tag, and one that trains."""
    failed, baseline = PlayedRun(serving.path / "failed"), PlayedRun(serving.path / "baseline", steps=5)
    for run in (failed, baseline):
        run.prepare()
        run.moment()
    connect(baseline.path).push(Update(id="fix", author="ana").add("dense/bias", np.ones(3, np.float32)))
    for run in (failed, baseline):
        for _ in range(20):
            run.moment()
        run.end()
    write_change(failed.path, Change(JobState.FAILED, 0, worker=1, reason="ValueError: no data"))
    connect(baseline.path).annotate(note="of May", tags=["paper"], author="ana")
    with PlayedRun(serving.path / "current"):
        yield


@pytest.fixture
def page(browser: Browser, serving: Serving, runs: None) -> Iterator[Page]:
    """The list of runs."""
    opened = browser.new_page(viewport={"width": 1200, "height": 900})
    opened.set_default_timeout(SECS)
    expect.set_options(timeout=SECS)
    watched = Watched(opened)
    opened.goto(serving.address)
    expect(opened.locator(".run-list tr")).to_have_count(3)
    yield opened
    opened.close()
    assert watched.complaints == []
    assert all(url.startswith((serving.address, "data:", "blob:")) for url in watched.requests)


def names(page: Page) -> Locator:
    return page.locator(".run-list td.first > a")


def row(page: Page, name: str) -> Locator:
    return page.locator(".run-list tr", has=page.get_by_role("link", name=name, exact=True))


def test_runs_are_listed_with_what_matters_the_failed_ones_first_sorted_and_searched(page: Page) -> None:
    expect(names(page)).to_have_text(["failed", "current", "baseline"])
    expect(row(page, "failed")).to_contain_text("ValueError: no data")
    expect(row(page, "baseline")).to_contain_text("#paperof May")
    expect(row(page, "baseline")).to_contain_text(re.compile(r"1\.\d+"))  # The loss.
    expect(row(page, "baseline").locator(".spark path")).to_have_attribute("d", re.compile(r"^M[\d. L]+$"))
    page.get_by_role("button", name="run", exact=True).click()
    expect(names(page)).to_have_text(["baseline", "current", "failed"])
    expect(page.get_by_role("columnheader", name="run", exact=True)).to_have_attribute(
        "aria-sort", "ascending"
    )
    page.get_by_role("button", name="run", exact=True).press("Enter")
    expect(names(page)).to_have_text(["failed", "current", "baseline"])
    search = page.get_by_role("searchbox", name="Search")
    search.fill("#paper MAY")
    expect(names(page)).to_have_text(["baseline"])
    search.fill("nothing")
    expect(page.get_by_text("No run matches.")).to_be_visible()
    search.fill("")
    page.get_by_role("button", name="failed 1").click()
    expect(names(page)).to_have_text(["failed"])
    assert page.evaluate(UNNAMED) == 0


def test_runs_are_compared_in_one_chart_with_their_updates_and_what_they_were_started_with(
    page: Page, serving: Serving
) -> None:
    for name in ("baseline", "current"):
        page.get_by_label(f"Compare {name}", exact=True).press("Space")
        expect(page.get_by_label(f"Compare {name}", exact=True)).to_be_focused()
    chart = page.locator("#comparison .chart")
    expect(chart).to_have_attribute("aria-label", re.compile(r"baseline \d.*current \d"))
    mark = page.locator("#comparison .mark")
    expect(mark).to_have_attribute("aria-label", re.compile("^baseline: update 1 at step"))
    assert mark.get_attribute("href") == "baseline#/updates/fix"
    table = page.locator("#comparison .starts")
    expect(table.locator("tr", has_text="updates").locator("td")).to_have_text(["1", "0"])
    expect(table).not_to_contain_text("--lr")
    page.get_by_label("Only what differs").uncheck()
    expect(table.locator("tr", has_text="--lr").locator("td")).to_have_text(["0.1", "0.1"])
    expect(table).to_contain_text("0123456789, with changed files")
    page.get_by_label("Over").select_option("time")
    expect(chart).to_contain_text("minutes since the run began")
    page.reload()
    expect(page.get_by_label("Compare current", exact=True)).to_be_checked()
    page.get_by_role("button", name="Do not compare current").click()
    expect(chart).to_have_attribute("aria-label", re.compile("^(?!.*current)"))
    assert page.evaluate(UNNAMED) == 0
    for width in (1100, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_while_compared_runs_are_read_the_page_says_so_and_a_run_that_is_not_there_is_named(
    page: Page, serving: Serving
) -> None:
    held: list[Route] = []
    page.route("**/static/plotly.js", lambda route: held.append(route))
    page.goto(f"{serving.address}/#/compare/baseline/nobody/current")
    page.reload()
    expect(page.locator("#comparison .starts tr", has_text="updates")).to_be_visible()  # Both are read.
    expect(page.locator("#comparison .chart")).to_have_text("Loading …")
    expect(page.get_by_role("status")).to_contain_text(
        "“nobody” is not compared: this server has no such run."
    )
    for route in held:
        route.continue_()
    page.get_by_role("button", name="Do not compare current").click()
    expect(page.locator(".note.careful")).to_be_hidden()
    assert page.url.endswith("#/compare/baseline")


def test_the_note_and_the_tags_of_a_run_are_changed_on_its_page(page: Page, serving: Serving) -> None:
    page.evaluate(f"sessionStorage.setItem('replicast-token', '{TOKEN}')")
    row(page, "current").get_by_role("link").click()
    page.get_by_role("button", name="Add a note …").click()
    page.get_by_label("Note", exact=True).fill("<b>wider</b>")
    page.get_by_label("Tags", exact=True).fill("wide, #try-2")
    page.get_by_label("Your name").fill("ana")
    page.get_by_role("button", name="Keep").click()
    expect(page.locator(".hero .noted")).to_have_text("#wide#try-2<b>wider</b>")
    expect(page.locator("#starts")).to_contain_text("train.py --lr 0.1")
    found = connect(serving.path / "current").brief().annotation
    assert (found.note, found.tags, found.author) == ("<b>wider</b>", ("wide", "try-2"), "ana")
    page.get_by_role("button", name="Edit note …").click()
    page.get_by_label("Note", exact=True).fill("")
    page.get_by_label("Tags", exact=True).fill("")
    page.get_by_role("button", name="Keep").click()
    expect(page.locator(".hero .noted")).to_have_count(0)


def test_a_note_is_kept_with_an_update_and_shown_in_its_list_and_its_own_view(
    page: Page, serving: Serving
) -> None:
    page.evaluate(f"sessionStorage.setItem('replicast-token', '{TOKEN}')")
    page.goto(f"{serving.address}/baseline#/updates/fix")
    page.get_by_role("button", name="Add a note …").last.click()
    page.get_by_label("Note", exact=True).fill("too large")
    page.get_by_label("Tags", exact=True).fill("regretted")
    page.get_by_role("button", name="Keep").click()
    expect(page.locator("#update .noted")).to_have_text("#regrettedtoo large")
    page.goto(f"{serving.address}/baseline")
    expect(page.locator("#updates .noted")).to_have_text("#regrettedtoo large")
    assert connect(serving.path / "baseline").show("fix").annotation.tags == ("regretted",)
