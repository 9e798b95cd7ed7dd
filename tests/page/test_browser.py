"""The page in a real browser."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Route, expect

from replicast.client import connect
from replicast.errors import UpdateRefused
from replicast.storage import inbox
from replicast.storage.journal import load_update
from replicast.storage.run_files import EVALUATIONS, Change, JobState, append_metrics, write_change
from replicast.update.schema import Schema
from replicast.update.trial import Trial
from replicast.update.update import Update
from tests.page.browser import Watched, chromium
from tests.page.live import Serving
from tests.page.played_run import WORKERS, PlayedRun
from tests.threads import eventually
from tests.unit.played_job import SCHEMA

TOKEN = "0123456789abcdef-the-token"
SECS = 120_000
UNNAMED = """[...document.querySelectorAll("button, a, input, select, section")].filter((one) => !(
    one.ariaLabel || one.getAttribute("aria-labelledby") || one.labels?.length || one.textContent.trim()
)).length"""
MARK_CROSSES_ALL_PANELS = """() => {
    const mark = document.querySelector(".mark[data-kind=restart]");
    const panels = document.querySelector(".chart")._fullLayout._size.h;
    return mark && parseFloat(getComputedStyle(mark, "::after").height) >= panels;
}"""
HOSTILE = "<img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    root = tmp_path_factory.mktemp("served")
    token = root / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    (root / "runs").mkdir()
    with Serving(root / "runs", "--token-file", str(token)) as process:
        yield process


@pytest.fixture
def run(serving: Serving, request: pytest.FixtureRequest) -> Iterator[PlayedRun]:
    """A job that trains, and is served under the name of the test."""
    with PlayedRun(serving.path / re.sub(r"[^a-z0-9-]", "-", request.node.name)) as played:
        yield played


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """One for all tests, so that the browser loads plotly once; what a tab keeps ends with the tab."""
    opened = browser.new_context(viewport={"width": 1200, "height": 900})
    opened.set_default_timeout(SECS)
    expect.set_options(timeout=SECS)
    yield opened
    opened.close()


@pytest.fixture
def page(context: BrowserContext, run: PlayedRun, serving: Serving) -> Iterator[Page]:
    """The page of the run, following it."""
    opened = context.new_page()
    watched = Watched(opened)
    opened.goto(f"{serving.address}/{run.path.name}")
    expect(opened.locator("#link-text")).to_have_text("live")
    yield opened
    opened.close()
    assert watched.complaints == []
    assert all(url.startswith((serving.address, "data:", "blob:")) for url in watched.requests)


def step_on(page: Page) -> Locator:
    return page.locator(".facts dd").first


def axis_becomes(page: Page, axis: str, kind: str) -> None:
    """Waits until the chart is drawn with an axis of this kind."""
    eventually(lambda: page.evaluate(f"document.querySelector('.chart').layout.{axis}.type") == kind)


def unlock(page: Page) -> None:
    """Types the token into the page."""
    page.get_by_role("button", name="Enter the token …").click()
    page.get_by_role("textbox", name="Token").fill(TOKEN)
    page.get_by_role("button", name="Use it").click()
    expect(page.get_by_role("button", name="Audit now …")).to_be_visible()


def tensors(path: Path, **values: np.ndarray) -> Path:
    safetensors.numpy.save_file({name.replace("__", "/"): value for name, value in values.items()}, path)
    return path


def choose(page: Page, file: Path) -> None:
    """Opens the dialog for an update, and chooses a file."""
    page.get_by_role("button", name="Upload an update …").click()
    page.get_by_label("File (.safetensors)").set_input_files(file)


def test_the_page_follows_the_job_without_reloading_and_marks_who_is_slow(page: Page, run: PlayedRun) -> None:
    expect(page.locator("#sentence")).to_contain_text("step")
    before = step_on(page).inner_text()
    expect(step_on(page)).not_to_have_text(before)
    expect(page.locator(".facts")).to_contain_text(re.compile(r"epoch\d+ of 10"))
    expect(page.locator("#workers")).to_contain_text("gpu-2, pid 4101")
    expect(page.locator("#workers")).to_contain_text("443 MB")
    expect(page.locator(".chart .scatterlayer .trace path.js-line").first).to_be_visible()
    expect(page.locator(".chart")).to_have_attribute("aria-label", re.compile("at step .*: loss "))
    lines = page.locator(".chart .scatterlayer .trace path.js-line")
    # Two metrics as measured and smooth, one of a validation, the rate; step time and memory of the workers.
    expect(lines).to_have_count(6 + 2 * WORKERS)
    page.get_by_label("Losses on a log scale").check()
    axis_becomes(page, "yaxis", "log")
    page.get_by_label("Smoothing").fill("0")
    expect(lines).to_have_count(4 + 2 * WORKERS)
    page.get_by_label("memory", exact=True).uncheck()
    page.get_by_label("step time", exact=True).uncheck()
    expect(lines).to_have_count(4)
    evaluated = [(step, time.time(), {"loss": 0.5 - step / 100}) for step in (1, 9)]
    append_metrics(run.path, *evaluated, file=EVALUATIONS)
    expect(lines).to_have_count(5)
    expect(page.locator(".chart .legend").first).to_contain_text("evaluator loss")
    expect(page.locator(".facts")).to_contain_text("none yet")
    connect(run.path).push(Update().assign("learning_rate", 0.0005)).result(120)
    expect(page.locator(".facts")).to_contain_text(
        re.compile(r"#1 at step \d+: assign optimizer/learning_rate")
    )
    expect(page.locator(".facts")).to_contain_text("learning rate0.0005")
    run.slow_worker = 1
    slow = page.locator("#workers tbody tr").nth(1)
    expect(slow).to_contain_text("slowfor 4 min: needs 80 ms per step, the others 31 ms")
    expect(page.locator("#workers tbody tr").first).to_contain_text("training")


def test_a_revert_says_what_it_means_and_is_shown_at_what_it_reverts(page: Page, run: PlayedRun) -> None:
    connect(run.path).push(Update(id="fix").add("dense/bias", np.ones(3, np.float32))).result(120)
    unlock(page)
    entry = page.locator("#updates details").first
    expect(entry.locator("[data-focus=act-fix]")).to_have_count(1)
    entry.locator("summary").click()
    entry.get_by_role("button", name="Revert").click()
    page.get_by_label("Your name").fill("ana")
    page.get_by_role("button", name="Check", exact=True).click()
    expect(page.locator("dialog")).to_contain_text("model/dense/bias: subtracts what was added")
    page.get_by_role("button", name="Revert on all workers").click()
    expect(page.locator("#receipt")).to_contain_text("Verified at step")
    assert connect(run.path).log()[-1].author == "ana"
    page.get_by_role("button", name="Close").click()
    reverted = page.locator("#updates details").last
    expect(reverted).to_contain_text("reverted by update 2")
    expect(reverted.locator("[data-focus=act-fix]")).to_have_count(0)


def test_a_click_is_not_lost_when_the_list_changes_under_it(page: Page, run: PlayedRun) -> None:
    client = connect(run.path)
    client.push(Update(id="first").add("dense/bias", np.ones(3, np.float32))).result(120)
    unlock(page)
    entries = page.locator("#updates details")
    expect(entries.locator("[data-focus=act-first]")).to_have_count(1)  # the page knows the token
    expect(page.locator(".chart .scatterlayer .trace path.js-line").first).to_be_visible()
    entries.first.locator("summary").hover()
    page.mouse.down()
    expect(page.locator("#updates summary:active")).to_have_count(1)
    with page.expect_response(lambda response: response.url.partition("?")[0].endswith("/updates")):
        client.push(Update(id="second").add("dense/bias", np.ones(3, np.float32))).result(120)
    page.mouse.up()
    expect(entries).to_have_count(2)
    expect(page.locator("details[open] [data-focus=act-first]")).to_be_visible()


def test_an_entry_stays_open_when_its_update_is_applied(page: Page, run: PlayedRun) -> None:
    run.kill()
    pushed = connect(run.path).push(Update(id="fix").add("dense/bias", np.ones(3, np.float32)))
    unlock(page)
    page.locator("#updates summary").click()
    held: list[Route] = []
    page.route("**/updates?last=*", lambda route: held.append(route))
    run.start()
    pushed.result(120)
    expect(page.locator("#updates summary")).to_have_count(0)  # what was applied is not read yet
    for route in held:
        route.continue_()
    page.unroute("**/updates?last=*")
    expect(page.locator("details[open] [data-focus=act-fix]")).to_be_visible()


def test_a_push_by_mouse_ends_with_its_receipt(page: Page, run: PlayedRun, tmp_path: Path) -> None:
    unlock(page)
    choose(page, tensors(tmp_path / "delta.safetensors", dense__bias=np.ones(3, np.float32)))
    page.get_by_label("Why").fill("fix drifted bias")
    page.get_by_label("Your name").fill("ana")
    expect(page.get_by_label("Try it first, then keep or revert it on all workers")).to_be_checked()
    page.get_by_role("button", name="Check", exact=True).click()
    expect(page.locator("dialog")).to_contain_text("model/dense/bias")
    expect(page.locator("dialog")).to_contain_text("1.732")
    page.get_by_role("button", name="Push to all workers").click()
    receipt = page.locator("#receipt")
    expect(receipt).to_contain_text("Verified at step")
    expect(receipt).to_contain_text("the same on 2 workers")
    expect(receipt).to_contain_text("kept: loss was 0.412 before the update")
    page.get_by_role("button", name="Close").click()
    entry = page.locator("#updates details").first
    expect(entry).to_contain_text("ana · “fix drifted bias”")
    entry.locator("summary").click()
    expect(entry).to_contain_text("loss 0.5 → 0.398 in the trial")
    (view,) = connect(run.path).log()
    assert (view.author, view.note, str(view.stage)) == ("ana", "fix drifted bias", "verified")


def test_a_trial_is_about_a_mean_and_a_refused_one_keeps_its_terms(page: Page, run: PlayedRun) -> None:
    run.kill()
    line = (run.step + 1, time.time(), {"loss": 0.5, "accuracy": 0.75, "auc": 0.9}, ["auc"])
    append_metrics(run.path, line, (run.step + 1, time.time(), {"val_loss": 0.5}))
    run.write_notes(time.time())
    unlock(page)
    expect(page.locator(".chart")).to_contain_text("auc")
    expect(page.locator(".facts")).to_contain_text("loss0.5")  # The dialog offers what the status has told.
    page.get_by_role("button", name="Upload an update …").click()
    offered = page.get_by_label("metric", exact=True).locator("option")
    expect(offered).to_have_text(["loss", "accuracy", "val_loss"])
    page.keyboard.press("Escape")
    update = Update(id="fix").add("dense/bias", np.ones(3, np.float32))
    connect(run.path).push(update, trial=Trial(20, "auc"), next_start=True)
    (waiting,) = inbox.waiting(run.path)
    inbox.refuse(run.path, waiting.path, UpdateRefused("Not a mean"))
    page.goto(f"{page.url.partition('#')[0]}#/updates/fix")
    expect(page.locator("#effect")).to_contain_text("On trial: 20 steps, auc, no worse.")


def test_a_wrong_file_is_refused_with_its_reason(page: Page, run: PlayedRun, tmp_path: Path) -> None:
    unlock(page)
    choose(page, tensors(tmp_path / "wrong.safetensors", dense__bias=np.ones(4, np.float32)))
    page.get_by_role("button", name="Check", exact=True).click()
    reason = page.locator("dialog .note.bad")
    expect(reason).to_contain_text("model/dense/bias")
    expect(reason).to_contain_text("expected")
    expect(page.get_by_role("button", name="Push to all workers")).to_have_count(0)
    page.get_by_role("button", name="Change it").click()
    text = tmp_path / "text.safetensors"
    text.write_text("this is no file of tensors")
    page.get_by_label("File (.safetensors)").set_input_files(text)
    page.get_by_role("button", name="Check", exact=True).click()
    expect(page.locator("dialog .note.bad")).to_contain_text("safetensors")
    page.get_by_role("button", name="Close").click()
    assert connect(run.path).log() == []


def test_the_learning_rate_is_changed_with_the_keyboard_alone_and_not_to_one_below_0(
    page: Page, run: PlayedRun
) -> None:
    unlock(page)
    page.get_by_role("button", name="Learning rate …").focus()
    page.keyboard.press("Enter")
    rate = page.get_by_label("New learning rate")
    expect(rate).to_be_focused()
    page.keyboard.type("-3")
    page.keyboard.press("Enter")
    assert rate.evaluate("input => input.validationMessage") == "Enter a number above 0."
    expect(page.get_by_role("button", name="Push to all workers")).to_have_count(0)
    rate.fill("0.0005")
    with page.expect_request("**/learning-rate") as asked:
        page.keyboard.press("Enter")
    assert asked.value.post_data_json["variable"] == "optimizer/learning_rate", "also if it is refused"
    expect(page.get_by_role("button", name="Push to all workers")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#receipt")).to_contain_text("assign optimizer/learning_rate")
    page.keyboard.press("Enter")
    expect(page.locator("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Learning rate …")).to_be_focused()


def test_a_schedule_of_the_learning_rate_is_shown_scaled_and_given_the_rate_back(
    page: Page, run: PlayedRun
) -> None:
    run.tables["optimizer/learning_rate"] = np.array(-1, np.float32)
    run.describe(Schema(SCHEMA, {"optimizer/learning_rate": "a schedule computes it"}))
    unlock(page)
    for number, (choice, typed, sent) in enumerate(
        (("the schedule, scaled", "0.5", -0.5), ("the schedule", "", -1))
    ):
        page.get_by_role("button", name="Learning rate …").click()
        expect(page.locator("#value-hint")).to_contain_text("Now 0.0005, computed by a schedule, at step")
        page.get_by_label("Use", exact=True).select_option(choice)
        if typed:
            page.get_by_label("Factor of the schedule").fill(typed)
        page.get_by_role("button", name="Check", exact=True).click()
        expect(page.locator("dialog td").first).to_have_text("optimizer/learning_rate")
        page.get_by_role("button", name="Push to all workers").click()
        expect(page.locator("#receipt")).to_contain_text("Verified at step")
        page.get_by_role("button", name="Close").click()
        (edit,) = load_update(run.path, number + 1).edits
        assert (edit.variable, float(edit.arrays["value"])) == ("optimizer/learning_rate", sent)


def test_a_wrong_token_is_told_and_not_kept_and_with_the_right_one_an_audit_is_answered(
    page: Page, run: PlayedRun
) -> None:
    page.get_by_role("button", name="Enter the token …").click()
    page.get_by_role("textbox", name="Token").fill("not the token at all")
    page.get_by_role("button", name="Use it").click()
    expect(page.locator("dialog .note.bad")).to_have_text("The token is wrong")
    page.get_by_role("button", name="Cancel").click()
    assert page.evaluate("sessionStorage.length + localStorage.length + document.cookie.length") == 0
    unlock(page)
    page.get_by_role("button", name="Audit now …").click()
    page.get_by_role("button", name="Audit", exact=True).click()
    expect(page.locator("dialog .note.good")).to_contain_text("6 variables equal on 2 workers")
    page.get_by_role("button", name="Close").click()
    expect(page.locator(".facts")).to_contain_text("equal as of step")
    expect(page.locator("#audits")).to_contain_text("6 variables equal on 2 workers")


def test_a_killed_job_is_told_and_the_page_goes_on_when_it_is_back(page: Page, run: PlayedRun) -> None:
    run.kill(silent_secs=2 * 86_400)
    expect(page.get_by_role("alert")).to_contain_text("The job is lost")
    expect(page.locator("#workers")).to_contain_text("not seen")
    run.start()
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator("#workers tbody tr").first).to_contain_text("training")
    expect(page.locator("#metrics .key")).to_contain_text("restart")


def test_of_very_many_updates_the_page_says_how_many_it_lists_and_lists_more(
    page: Page, run: PlayedRun
) -> None:
    def listed(route: Route) -> None:
        last = int(route.request.url.rpartition("=")[2])
        views = [
            {"id": f"u{n}", "sequence": n, "step": n, "stage": "verified"} for n in range(2001 - last, 2001)
        ]
        route.fulfill(json={"updates": views})

    held: list[Route] = []
    page.route("**/updates?last=*", listed)
    page.route("**/metrics?points=*", lambda route: held.append(route))
    page.reload()
    expect(page.locator(".chart")).to_contain_text("Loading")
    title = page.locator("#updates .group-title").get_by_text("applied")
    expect(title).to_have_text("applied: the last 50 of 2,000")
    assert page.locator("#updates li").count() <= 60, "no more are drawn than are asked for"
    page.get_by_role("button", name="Show more").click()
    expect(title).to_have_text("applied: the last 100 of 2,000")
    series = {"steps": [1, 2000], "times": [time.time() - 2000, time.time()], "values": [1.0, 0.5]}
    for route in held:
        route.fulfill(json={"series": {"loss": series}, "position": 0, "since": None})
    expect(page.locator("#metrics .key")).to_contain_text("the last 1,000 of 2,000 updates")
    assert page.locator(".mark").count() < 100, "those that are close to each other are one mark"
    many = page.locator("button.mark").first
    marked = many.get_attribute("aria-label")
    many.click()
    expect(page.get_by_role("button", name="Reset zoom")).to_be_visible()
    expect(page.locator(".mark").first).not_to_have_attribute("aria-label", str(marked))


def test_the_first_picture_waits_neither_for_all_metrics_nor_for_the_updates(
    page: Page, run: PlayedRun
) -> None:
    held: list[Route] = []
    page.route("**/metrics?points=1200", lambda route: held.append(route))
    page.route("**/updates?last=*", lambda route: held.append(route))
    page.reload()
    expect(page.locator(".chart .scatterlayer path").first).to_be_attached()
    expect(page.locator("#sentence")).to_contain_text("Training")
    assert held
    for route in held:
        route.continue_()
    expect(page.locator("#updates")).to_contain_text("No update yet")


def test_metrics_that_came_before_the_first_event_are_read_later(page: Page, run: PlayedRun) -> None:
    run.kill()
    chart, told = page.locator(".chart"), "at step {}: loss"
    path = f"api/runs/{run.path.name}/metrics?points=1200"
    old = page.evaluate("async (path) => (await fetch(path)).text()", path)  # Perhaps a step behind the run.
    last = json.loads(old)["series"]["loss"]["steps"][-1]
    append_metrics(run.path, (run.step + 5, time.time(), {"loss": 0.5}))
    expect(chart).to_have_attribute("aria-label", re.compile(told.format(run.step + 5)))
    page.route("**/metrics?points=1200*", lambda route: route.fulfill(body=old))  # As kept by the server.
    page.clock.install()
    page.reload()
    expect(chart).to_have_attribute("aria-label", re.compile(told.format(last)))
    page.unroute("**/metrics?points=1200*")
    for _ in range(2):
        page.clock.fast_forward(15_000)
    expect(chart).to_have_attribute("aria-label", re.compile(told.format(run.step + 5)))


def test_a_chart_of_fewer_points_counts_also_when_events_have_overtaken_it(page: Page) -> None:
    known = page.evaluate("""async () => {
        const { Chart } = await import("/static/chart.js");
        const loss = (first, count, every) => {
            const steps = Array.from({ length: count }, (_, at) => first + every * at);
            return { loss: { steps, times: steps.map((step) => 1e9 + step), values: steps } };
        };
        const chart = new Chart(), isEnough = [];
        chart.setAll({ position: 10, series: loss(0, 1000, 1) });
        isEnough.push(chart.add({ since: 10, position: 20, series: loss(1000, 2001, 1) }));
        isEnough.push(chart.add({ since: 20, position: 30, series: loss(3001, 2, 1) }));
        chart.setAll({ position: 20, series: loss(0, 31, 100) });
        isEnough.push(chart.add({ since: 30, position: 40, series: loss(3003, 1, 1) }));
        return { isEnough, ...chart.main() };
    }""")
    assert known["isEnough"] == [False, False, True], "which ask for fewer points"
    assert known["steps"] == [*range(0, 3001, 100), 3001, 3002, 3003]
    assert known["values"] == known["steps"]


def test_what_is_known_of_the_run_does_not_wait_for_plotly(page: Page, run: PlayedRun) -> None:
    held: list[Route] = []
    page.route("**/static/plotly.js", lambda route: held.append(route))
    page.reload()
    expect(page.locator("#workers")).to_contain_text("gpu-2, pid 4101")
    expect(page.locator(".facts")).to_contain_text(re.compile(r"loss\d"))
    assert held
    for route in held:
        route.continue_()
    expect(page.locator(".chart .scatterlayer path").first).to_be_attached()


def test_one_hover_tells_the_values_of_all_panels(page: Page, run: PlayedRun) -> None:
    eventually(lambda: run.step > 20)
    page.reload()
    expect(page.locator(".chart .legend").first).to_be_attached()
    plot = page.locator(".chart .nsewdrag").first

    def told() -> bool:
        box = plot.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] / 2)
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2)
        said = " ".join(page.locator(".chart .hoverlayer text").all_text_contents())
        return all(
            name in said
            for name in ("loss", "accuracy", "learning rate", "step time, worker 0", "memory, worker 1")
        )

    eventually(told)


def test_a_bad_trial_does_not_flatten_the_axis_and_the_picture_says_what_lies_outside(
    page: Page, run: PlayedRun
) -> None:
    run.kill()
    expect(page.locator(".chart .legend").first).to_be_attached()  # Drawn with every value in the picture.
    moments = [(step, time.time() - 1000 + step) for step in range(run.step + 1, run.step + 501)]
    for place, (step, moment) in enumerate(moments):
        loss = 90.0 if 300 < place < 320 else 0.3 + 0.01 * (place % 7)
        append_metrics(run.path, (step, moment, {"loss": loss}))
    axis = "document.querySelector('.chart')?._fullLayout?.yaxis.range ?? [0, 99]"
    eventually(lambda: page.evaluate(axis)[1] < 4)
    expect(page.locator(".chart")).to_contain_text("values not shown: ▲ up to 90")
    expect(page.get_by_role("button", name="Reset zoom")).to_be_hidden()
    page.get_by_label("Show all values").check()
    eventually(lambda: page.evaluate(axis)[1] > 80)
    expect(page.locator(".chart")).not_to_contain_text("▲")
    page.get_by_label("Show all values").uncheck()
    eventually(lambda: page.evaluate(axis)[1] < 4)


def test_a_zoom_shows_every_step_of_it_on_axes_that_fit_and_a_double_click_ends_it(
    page: Page, run: PlayedRun
) -> None:
    run.kill()
    moments = [(step, time.time() - 1000 + step) for step in range(run.step + 1, run.step + 501)]
    for place, (step, moment) in enumerate(moments):
        loss = 90.0 if 300 < place < 320 else 0.3 + 0.01 * (place % 7)
        append_metrics(run.path, (step, moment, {"loss": loss, "accuracy": 1 - loss / 100}))
    shown = "document.querySelector('.chart')?._fullLayout?.{}.range ?? [0, 99]"
    eventually(lambda: page.evaluate(shown.format("xaxis"))[1] >= moments[-1][0])
    reset, plot = page.get_by_role("button", name="Reset zoom"), page.locator(".chart .nsewdrag").first
    for scale, (least, most) in (("linear", (0.29, 0.37)), ("log", (-0.54, -0.43))):
        page.get_by_label("Losses on a log scale").set_checked(scale == "log")
        axis_becomes(page, "yaxis", scale)
        drag(page, plot, (0.2, 0.5), (0.4, 0.5))  # Steps without the trial.
        expect(reset).to_be_visible()
        eventually(lambda least=least, most=most: inside(page.evaluate(shown.format("yaxis")), least, most))
        eventually(lambda: inside(page.evaluate(shown.format("yaxis2")), 0.9955, 0.9975))  # Of the accuracy.
        plot.dblclick()
        expect(reset).to_be_hidden()
    page.get_by_label("Losses on a log scale").uncheck()
    axis_becomes(page, "yaxis", "linear")
    drag(page, plot, (0.2, 0.2), (0.4, 0.6))  # A box: the reader says what this axis shows.
    expect(reset).to_be_visible()
    low, high = page.evaluate(shown.format("yaxis"))
    page.get_by_label("Smoothing").fill("0")
    expect(page.locator(".chart .scatterlayer .trace path.js-line")).to_have_count(4 + 2 * WORKERS)
    assert page.evaluate(shown.format("yaxis")) == [low, high]
    reset.click()
    expect(reset).to_be_hidden()
    drag(page, plot, (0.2, 0.5), (0.4, 0.5))
    expect(reset).to_be_visible()
    page.get_by_label("Over").select_option("time")  # Of which the steps that were zoomed to say nothing.
    axis_becomes(page, "xaxis", "date")
    expect(reset).to_be_hidden()


def drag(page: Page, plot: Locator, *places: tuple[float, float]) -> None:
    """Presses the mouse at a place of a panel, in parts of its size, and lets go at another."""
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    for at, (x, y) in enumerate(places):
        page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=4)
        page.mouse.up() if at else page.mouse.down()


def inside(shown: list[float], least: float, most: float) -> bool:
    return least <= shown[0] < shown[1] <= most


def test_a_curve_is_equally_smooth_where_points_are_left_out_and_at_its_end(page: Page) -> None:
    rough = page.evaluate("""async () => {
        const { Chart } = await import("/static/chart.js");
        let seed = 1;
        const noise = () => (seed = (seed * 48271) % 2147483647) / 2147483647 - 0.5;
        const loss = { steps: [], times: [], values: [], means: [] };
        const add = (...point) => Object.values(loss).forEach((one, at) => one.push(point[at]));
        for (let step = 0; step < 40000; step += 200) {  // Of 200 steps, five points and the mean of all.
            const all = Array.from({ length: 200 }, noise), mean = all.reduce((sum, one) => sum + one) / 200;
            for (const at of [0, 50, 100, 150, 199]) add(step + at, step, all[at], at ? null : mean);
        }
        for (let step = 40000; step < 41500; step += 1) {
            const value = noise();
            add(step, step, value, value);
        }
        const { x, y } = new Chart().smoothed(loss, loss.values, 0.9);
        const far = (within) => Math.max(...y.filter((_, at) => within(x[at])).map(Math.abs));
        return [far((step) => step > 2000 && step < 40000), far((step) => step >= 40000)];
    }""")
    assert rough[1] < 2 * rough[0], "the mean of all is 0"


def test_what_an_update_did_is_told_in_plain_words(page: Page) -> None:
    told = page.evaluate("""async () => {
        const { sample, verdict } = await import("/static/update.js");
        const one = (mean, steps = 20, spread = 0.01) => ({ mean, spread, steps });
        const verdicts = [[1, 1.05], [1, 1.001], [0.5, 1e15]].map(([a, b]) => verdict(one(a), one(b)));
        return [...verdicts, verdict(one(1, 2), one(2)), sample(one(1)), sample(one(1, 1, 0))];
    }""")
    assert told == [
        "higher by 0.05 (5 %), more than the noise",
        "higher by 0.001 (0.1 %), within the noise",
        "higher by 1e15 (2e15 times the value before), more than the noise",
        "higher by 1 (100 %); too few steps to compare it with the noise",
        "1 ± 0.01",
        "1",
    ]


def test_a_failed_job_is_told_once_with_the_last_lines_of_its_worker(page: Page, run: PlayedRun) -> None:
    run.kill()
    lines = ("Traceback (most recent call last):", "ValueError: \x1b[31mno data\x1b[0m")
    write_change(
        run.path, Change(JobState.FAILED, 0, worker=1, reason="ValueError: no data", last_lines=lines)
    )
    expect(page.locator("#failure")).to_have_text(f"{lines[0]}\nValueError: no data")
    expect(page.get_by_role("alert")).to_have_text("The job has failed.")
    expect(page.locator("#sentence")).to_contain_text("ValueError: no data")


def test_of_a_job_that_has_ended_the_page_tells_its_last_epoch_and_offers_no_update(
    page: Page, run: PlayedRun
) -> None:
    saved = {"step": 5, "epoch": 1, "batch": 3, "nbytes": 1, "attempt": 0, "created_at": time.time()}
    saved["metrics"] = {"accuracy": 0.5, "auc": 0.75, "mse": 0.25, "loss": 1.5}
    page.route("**/checkpoints", lambda route: route.fulfill(json={"checkpoints": [saved]}))
    run.end()
    page.reload()
    expect(page.locator(".facts")).to_contain_text("epoch2 at step 5")
    expect(page.locator("#checkpoints tbody")).to_contain_text("loss 1.5, accuracy 0.5, auc 0.75")
    expect(page.locator("#updates")).to_contain_text("No update was made")
    page.goto(f"{page.url.partition('#')[0]}#/updates/999")
    expect(page.locator(".update-page .note")).to_have_text("This run has no update 999.")


def test_what_reads_and_changes_nothing_is_not_listed_as_an_update(page: Page, run: PlayedRun) -> None:
    names = ("id", "kind", "stage", "step", "waits_for", "trial_until", "author", "note")
    pull = ("p" * 32, "pull", "prepared", None, "the trial of u1", None, "", "")
    leave = ("s" * 32, "leave", "proposed", None, "an evaluation", None, "", "")
    operations = [dict(zip(names, one, strict=True)) for one in (pull, leave, ("u1", "update", *pull[2:]))]
    (run.path / "operations.json").write_text(json.dumps({"step": run.step, "operations": operations}))
    expect(page.locator("#updates")).to_contain_text("update u1")
    asked = "reading values waits for the trial of u1 · a stop waits for an evaluation"
    expect(page.locator("#workers")).to_contain_text(asked)
    expect(page.locator("#updates")).not_to_contain_text(re.compile("pull|leave"))


def test_a_start_by_hand_is_not_marked_as_a_restart(page: Page, run: PlayedRun) -> None:
    run.kill()
    write_change(run.path, Change(JobState.STARTING, 1))
    run.start()
    key = page.locator("#metrics .key")
    expect(key.get_by_text("start", exact=True)).to_be_visible()
    expect(key).not_to_contain_text("restart")


def test_on_a_phone_numbers_are_whole_names_break_at_a_slash_and_several_runs_are_listed(
    page: Page, run: PlayedRun, serving: Serving, tmp_path: Path
) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    unlock(page)
    choose(page, tensors(tmp_path / "delta.safetensors", dense__bias=np.ones(3, np.float32)))
    page.get_by_role("button", name="Check", exact=True).click()
    name = page.locator("dialog td").first
    expect(name).to_have_text("model/dense/bias")
    assert name.locator("wbr").count() == 2
    expect(name).to_have_css("overflow-wrap", "normal")
    PlayedRun(serving.path / "another").prepare()  # of a single run, the page would show that one
    page.goto(serving.address)
    row = page.locator("tbody tr", has_text=run.path.name)
    expect(row).to_contain_text("training")
    expect(row.locator("td").nth(3)).to_have_css("white-space", "nowrap")  # Asked again if it is redrawn.
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    row.get_by_role("link").click()
    expect(page.locator("#run-name")).to_have_text(run.path.name)


def test_a_killed_server_is_told_and_the_page_goes_on_when_it_is_back(
    page: Page, run: PlayedRun, serving: Serving
) -> None:
    serving.kill()
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer")
    expect(page.locator("#link-text")).to_have_text("no server")
    before = step_on(page).inner_text()
    serving.start()
    expect(page.locator("#link-text")).to_have_text("live")
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(step_on(page)).not_to_have_text(before)


def test_what_a_job_says_is_text_and_never_markup(page: Page, run: PlayedRun) -> None:
    log = run.path / "logs" / "attempt-0" / "worker-0.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"{HOSTILE}\n\x1b[31mred\x1b[0m\x1b]0;title\x07 end\n")
    update = Update(author=HOSTILE, note=f"\x1b[31m{HOSTILE}\x1b]0;title\x07\x08").add(
        "dense/bias", np.ones(3, np.float32)
    )
    connect(run.path).push(update).result(120)
    page.locator("#logs summary").click()
    expect(page.locator(".log")).to_contain_text(f"{HOSTILE}\nred end")
    expect(page.locator("#updates")).to_contain_text(f"{HOSTILE} · “{HOSTILE}”")
    page.locator("#metrics .key").get_by_text("update").wait_for()
    page.mouse.move(*centre_of(page, ".chart .nsewdrag"))
    page.locator(".mark[data-kind=update]").hover()
    expect(page.locator("#mark-tip")).to_contain_text(HOSTILE)
    page.goto(f"{page.url.partition('#')[0]}#/updates/1")
    expect(page.locator("#update")).to_contain_text(HOSTILE)
    assert page.locator("main img, .chart img, .chart image").count() == 0
    assert "taken" not in page.title()


def centre_of(page: Page, selector: str) -> tuple[float, float]:
    box = page.locator(selector).first.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_it_fits_a_phone_and_a_wide_screen_by_day_and_by_night(page: Page, run: PlayedRun) -> None:
    page.locator(".chart .main-svg").first.wait_for()
    for width in (390, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    for scheme, is_dark in (("light", False), ("dark", True)):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", paper))) < 200) == is_dark


def test_a_screen_reader_finds_its_way(page: Page, run: PlayedRun) -> None:
    unlock(page)
    assert page.locator("main, header").count() == 2
    assert page.locator("h1").count() == 1
    assert page.evaluate(UNNAMED) == 0
    for name in ("Learning rate …", "Upload an update …", "Stop the job …"):
        page.get_by_role("button", name=name).click()
        assert page.evaluate(UNNAMED) == 0
        page.keyboard.press("Escape")
        expect(page.locator("dialog")).to_have_count(0)
    page.keyboard.press("Tab")
    assert page.locator("#sentence").get_attribute("aria-live") == "polite"


def test_a_mark_opens_its_update_by_keyboard_with_the_change_the_effect_and_every_digest(
    page: Page, run: PlayedRun
) -> None:
    update = Update(id="fix", author="ana", note="drift").add("dense/bias", np.ones(3, np.float32))
    connect(run.path).push(update).result(120)
    connect(run.path).push(Update().assign("learning_rate", 0.0005)).result(120)
    unlock(page)
    marks = page.locator(".mark")
    expect(page.locator(".mark[data-kind=update]").last).to_be_visible()
    page.locator(".mark[tabindex='0']").focus()
    page.keyboard.press("Home")
    expect(marks.first).to_be_focused()
    expect(page.locator("#mark-tip")).to_contain_text("update 1 at step")
    page.goto(f"{page.url.partition('#')[0]}#/updates/fix")  # An address that can be sent to others.
    expect(page.locator("#update-title")).to_contain_text("Update 1: add model/dense/bias")
    expect(page.locator("#update-title")).to_be_focused()
    made = page.locator("#changes-made")
    expect(made).to_contain_text("norm before2norm of the change1 (50 % of it)")
    expect(made.get_by_role("img")).to_have_attribute(
        "aria-label", re.compile("change of 3 values, from -1 to 2")
    )
    expect(made.locator("rect title").first).to_contain_text("1 of 3 values")
    expect(page.locator("#effect")).to_contain_text("loss")
    expect(page.locator("#effect")).to_contain_text("accuracy")
    expect(page.locator("#on-workers tbody tr")).to_have_count(WORKERS)
    expect(page.locator("#on-workers tbody tr").last).to_contain_text("equal")
    page.get_by_role("button", name="Revert …").click()
    page.get_by_role("button", name="Check", exact=True).click()
    page.get_by_role("button", name="Revert on all workers").click()
    expect(page.locator("#receipt")).to_contain_text("Verified at step")
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#update")).to_contain_text("It was reverted by update 3.")
    page.get_by_role("button", name="Show it in the charts").click()
    expect(page.get_by_role("button", name="Reset zoom")).to_be_visible()
    page.get_by_role("button", name="Reset zoom").click()
    expect(page.get_by_role("button", name="Reset zoom")).to_be_hidden()


def test_marks_are_links_and_their_lines_cross_all_panels_also_on_a_log_axis(
    page: Page, run: PlayedRun
) -> None:
    run.kill()
    write_change(run.path, Change(JobState.RESTARTING, 1, worker=1, reason="exit code 1"))
    run.start()
    mark = page.locator(".mark[data-kind=restart]")
    expect(mark).to_have_attribute("aria-label", re.compile("restarted: attempt 1, exit code 1"))
    for scale in ("linear", "log"):
        page.get_by_label("Losses on a log scale").set_checked(scale == "log")
        axis_becomes(page, "yaxis", scale)
        page.wait_for_function(MARK_CROSSES_ALL_PANELS)  # The chart may be drawn again at any moment.
    page.get_by_label("Over").select_option("time")
    axis_becomes(page, "xaxis", "date")
    expect(mark).to_be_visible()
    mark.click()
    expect(page.locator("#log-attempt")).to_have_value("0")
    assert page.locator("#logs details").get_attribute("open") is not None


def test_logs_are_searched_followed_and_chosen_by_worker_and_attempt(page: Page, run: PlayedRun) -> None:
    run.kill()
    run.start()
    for attempt, worker in ((0, 1), (1, 0), (1, 1)):
        log = run.path / "logs" / f"attempt-{attempt}" / f"worker-{worker}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"line {n} of {worker} in {attempt}\n" for n in range(1000))
        log.write_text(f"The Needle\n{lines}")
    page.locator("#logs summary").click()
    log = page.locator(".log")
    expect(log).to_contain_text("line 999 of 0 in 1")
    page.get_by_label("Worker", exact=True).select_option("1")
    expect(log).to_contain_text("line 999 of 1 in 1")
    page.get_by_label("Search").fill("needle")
    expect(log).to_have_text(re.compile("^The Needle\\s*$"))
    expect(log.locator("mark")).to_have_text("Needle")
    expect(page.locator("#logs")).to_contain_text("1 line of the last 1,001")
    page.get_by_label("Attempt", exact=True).select_option("0")
    expect(log).to_contain_text("The Needle")
    page.get_by_label("Search").fill("")
    expect(log).to_contain_text("line 999 of 1 in 0")
    page.get_by_label("Attempt", exact=True).select_option("")
    path = run.path / "logs" / "attempt-1" / "worker-1.log"
    with path.open("a") as file:
        file.write("printed later\n")
    expect(log).to_contain_text("printed later")
    assert log.evaluate("(one) => one.scrollHeight - one.scrollTop - one.clientHeight") < 8
