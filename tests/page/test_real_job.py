"""The page beside a real job of two workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, expect

from replicast.client import connect
from tests.page.browser import Watched, chromium

TOKEN = "0123456789abcdef-the-token"
SECS = 120_000
TRAIN = """
import time
import keras, numpy as np, replicast

strategy = replicast.Strategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
replicas = replicast.Replicas(model)
x, y = np.ones((64, 4), "float32"), np.ones((64, 3), "float32")  # One sample: the loss only decreases.
paced = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.02))
model.fit(x, y, batch_size=16, epochs=100_000, verbose=0, callbacks=[replicas.callback(), paced])
"""


def test_a_real_job_is_followed_and_takes_what_the_page_pushes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "replicast", "run", "-n", "2", "--run-dir", "first", "--serve", "0"]
    command += ["train.py", "--secret-key", "abc"]
    environ = {**os.environ, "REPLICAST_TOKEN": TOKEN}
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"http://127\.0\.0\.1:\d+/", process.stderr.readline())
            assert found is not None
            threading.Thread(target=process.stderr.read, daemon=True).start()
            _steer(found[0], process)
        finally:
            process.kill()
    loss = connect(tmp_path / "first").metrics(points=10_000).series["loss"]
    assert loss.steps.tolist() == [*range(1, len(loss) + 1)], "every step"
    assert all(np.diff(loss.values[:20]) < 0), "a mean over an epoch jumps at its end"
    rate = connect(tmp_path / "first").metrics(points=10_000).series["learning_rate"]
    assert list(dict.fromkeys(rate.values.tolist())) == [0.01, 0.0005]
    view, row = connect(tmp_path / "first").log()
    (start,) = connect(tmp_path / "first").status().starts
    assert (start.command[0].rpartition("/")[2], start.command[1:]) == ("train.py", ("--secret-key", "…"))
    assert start.versions.keys() == {"python", "replicast", "tensorflow", "keras", "numpy"}
    assert rate.steps[rate.values == 0.0005][0] == view.step + 1, "the first step with it"
    notes = connect(tmp_path / "first").metrics(of="workers").series
    assert {"step_secs/0", "step_secs/1", "memory_bytes/0", "memory_bytes/1"} <= notes.keys()
    assert (view.author, view.note, len(view.receipts[0].digests)) == ("ana", "slower", 2)
    assert (row.author, len(row.receipts[0].digests)) == ("ana", 2)


def _steer(address: str, process: subprocess.Popen[str]) -> None:
    expect.set_options(timeout=SECS)
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(SECS)
        watched = Watched(page)
        page.goto(address)
        expect(page.locator("#workers tbody tr").nth(1)).to_contain_text("training")
        expect(page.locator("#workers")).to_contain_text(re.compile(r"\d ms"))
        expect(page.locator("#workers")).to_contain_text("MB")
        expect(page.locator(".facts")).to_contain_text("of 100,000")
        expect(page.locator(".chart .main-svg").first).to_be_visible()
        page.get_by_role("button", name="Enter the token …").click()
        page.get_by_role("textbox", name="Token").fill(TOKEN)
        page.get_by_role("button", name="Use it").click()
        page.get_by_role("button", name="Learning rate …").click()
        expect(page.locator("#value-hint")).to_contain_text(re.compile(r"Now 0\.01, at step \d"))
        page.get_by_label("New learning rate").fill("0.0005")
        page.get_by_label("Why").fill("slower")
        page.get_by_label("Your name").fill("ana")
        page.get_by_role("button", name="Check", exact=True).click()
        page.get_by_role("button", name="Push to all workers").click()
        expect(page.locator("#receipt")).to_contain_text("the same on 2 workers")
        page.get_by_role("button", name="Close").click()
        _correct_a_row(page)
        assert watched.complaints == []
        process.send_signal(signal.SIGTERM)
        expect(page.locator("#banner")).to_contain_text("The server does not answer")
        assert process.wait(120) == 128 + signal.SIGTERM


def _correct_a_row(page: Page) -> None:
    page.locator("#rows summary").click()
    rows = page.locator("#rows")
    rows.get_by_label("Table", exact=True).select_option("sequential/dense/kernel")
    rows.get_by_role("textbox", name="Rows").fill("2,0")
    rows.get_by_role("button", name="Look up").click()
    expect(rows).to_contain_text(re.compile(r"2 rows of 4, at step \d.*, the same on every worker"))
    rows.locator('td[data-row="1"][data-column="2"]').focus()
    page.keyboard.type("0.25")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Check and push …").click()
    page.get_by_label("Try it first").uncheck()
    page.get_by_role("button", name="Check", exact=True).click()
    page.get_by_role("button", name="Push to all workers").click()
    expect(page.locator("#receipt")).to_contain_text("assign rows sequential/dense/kernel 1 row of 4×3")
    expect(page.locator("#receipt")).to_contain_text("the same on 2 workers")
    page.get_by_role("button", name="Close").click()
