"""`replicast report` in a real browser: the page of a run in one file."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from playwright.sync_api import expect

from replicast.client import connect
from replicast.storage.run_files import Change, JobState, append_audit, write_change
from replicast.update.update import Update
from tests.page.browser import Watched, chromium
from tests.page.played_run import PlayedRun
from tests.page.prompt_run import equal_report
from tests.unit.played_job import invoke

SECS = 120_000
HOSTILE = "<img src=x onerror=\"document.title='taken'\">"


def test_a_report_shows_the_run_without_a_server_and_asks_nobody(tmp_path: Path) -> None:
    with PlayedRun(tmp_path / "first") as played:
        update = Update(id="fix-1", author="ana", note=HOSTILE).add("dense/bias", np.ones(3, np.float32))
        receipt = connect(played.path).push(update).result(120)
        write_change(played.path, Change(JobState.RESTARTING, 1, worker=1, reason=HOSTILE))
        file = tmp_path / "report.html"
        assert invoke("report", played.path, "-o", file).exit_code == 0
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(SECS)
        expect.set_options(timeout=SECS)
        watched = Watched(page)
        page.goto(file.as_uri())
        expect(page.locator("#run-name")).to_have_text("first")
        entry = page.locator("#updates .entry").first
        expect(entry).to_contain_text("verified")
        expect(entry).to_contain_text("ana")
        expect(entry).to_contain_text(HOSTILE)
        expect(page.locator("#chain")).to_contain_text("are as they were written")
        expect(page.locator("#receipts")).to_contain_text(f"0: {receipt.digests[0]}")
        expect(page.locator("#changes")).to_contain_text(HOSTILE)
        expect(page.locator(".chart .main-svg").first).to_be_visible()
        expect(page.locator("#actions, #logs, #token-button:visible")).to_have_count(0)
        entry.locator("summary").click()
        entry.get_by_role("link", name="Histogram").click()
        expect(page.locator("#update-title")).to_contain_text("Update 1: add model/dense/bias")
        expect(page.locator("#changes-made").get_by_role("img")).to_be_visible()
        expect(page.locator("#on-workers")).to_contain_text("equal")
        page.get_by_role("link", name="← The run").click()
        expect(page.locator("#chain")).to_be_visible()
        assert "taken" not in page.title()
        assert watched.complaints == []
        assert {url.partition(":")[0] for url in watched.requests} <= {"file", "data", "blob"}


def test_in_a_report_audits_in_a_row_that_found_the_same_are_one_with_all_their_steps(tmp_path: Path) -> None:
    played = PlayedRun(tmp_path / "first")
    played.prepare()
    played.moment()
    for at in range(1, 901):
        found = equal_report(
            number=at, step=100 * at, time=time.time(), workers=2, variables=7 if at == 400 else 6
        )
        append_audit(played.path, found)
    played.end()
    file = tmp_path / "report.html"
    assert invoke("report", played.path, "-o", file).exit_code == 0
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(SECS)
        expect.set_options(timeout=SECS)
        page.goto(file.as_uri())
        rows = page.locator("#audits tbody tr")
        expect(rows).to_have_count(3)
        expect(rows.first.locator("td").first).to_have_text("40,100 to 90,000")
        expect(rows.first.locator("summary")).to_have_text("500 audits")
        rows.last.locator("summary").click()
        expect(rows.last).to_contain_text("At the steps 100; 200; 300;")
        assert page.evaluate("document.documentElement.scrollHeight") < 5000
