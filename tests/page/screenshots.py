"""The pictures in docs/images, of a real run of two workers: `make screenshots`.

The run is that of the tutorial (`examples/first.py`): a learning rate that is too high is corrected,
a change is tried and reverted, a worker is killed, and the job restarts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import safetensors.numpy
from playwright.sync_api import Browser, Page

from replicast.client import Run, connect
from replicast.update.trial import Trial
from replicast.update.update import Update
from tests.page.browser import chromium
from tests.page.live import Serving

TOKEN = "0123456789abcdef-the-token"
ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
WAIT_SECS = 120.0


def main() -> None:
    """Makes all pictures."""
    images = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, _job(Path(folder)) as run:
        _steer(run)
        token = Path(folder) / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        with Serving(Path(folder) / "runs", "--token-file", str(token)) as serving, chromium() as browser:
            for scheme in ("light", "dark"):
                _shoot(browser, serving.address, images / f"page-wide-{scheme}.png", 1600, 1180, scheme)
                _shoot(browser, serving.address, images / f"page-phone-{scheme}.png", 390, 1500, scheme)
            _shoot_an_update(browser, serving.address, images / "page-update.png")
            _shoot_a_push(browser, serving.address, images / "page-push.png", Path(folder))


@contextlib.contextmanager
def _job(folder: Path) -> Iterator[Run]:
    """The tutorial's job, until the pictures are made; its log is printed if that fails."""
    script = (ROOT / "examples" / "first.py").read_text()
    (folder / "train.py").write_text(script.replace("epochs=2000", "epochs=20_000"))
    command = [sys.executable, "-m", "replicast", "run", "-n", "2", "--max-restarts", "1"]
    with (folder / "launcher.log").open("w+") as log:
        launcher = subprocess.Popen(
            [*command, "--run-dir", "runs/first", "train.py"], cwd=folder, stdout=log, stderr=log
        )
        try:
            _until(lambda: (folder / "runs" / "first" / "workers" / "1.json").exists())
            yield connect(folder / "runs" / "first")
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read())
            raise
        finally:
            launcher.terminate()
            try:
                launcher.wait(WAIT_SECS)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def _steer(run: Run) -> None:
    """A correction, a trial that is reverted, and a killed worker."""
    _until_step(run, 1200)
    slower = Update(author="ana@gpu-1", note="too high: the loss is noisy")
    run.push(slower.assign("optimizer/learning_rate", 0.001)).result(WAIT_SECS)
    _until_step(run, 2200)
    halved = Update(author="li@laptop", note="smaller weights?").scale("hidden/kernel", 0.5)
    run.push(halved, trial=Trial(50, max_increase=0.05)).result(WAIT_SECS)
    _until_step(run, 2800)
    os.kill(next(note.pid for note in run.status().workers if note.rank == 1), signal.SIGKILL)
    _until(lambda: run.status().attempt == 1 and run.brief().state == "training")
    _until_step(run, 3600)


def _until_step(run: Run, step: int) -> None:
    _until(lambda: (run.brief().step or 0) >= step)


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the job did not get there")
        time.sleep(0.2)


def _shoot(browser: Browser, address: str, path: Path, width: int, height: int, scheme: str) -> None:
    page = _opened(browser, address, width, height, scheme)
    page.screenshot(path=path)
    page.close()


def _shoot_an_update(browser: Browser, address: str, path: Path) -> None:
    """The view of the trial: what it changed, and what that did to the loss."""
    page = _opened(browser, address, 1100, 900, "light")
    page.locator("#updates summary").first.click()
    page.get_by_role("link", name="Histogram").first.click()
    page.locator("#on-workers tbody tr").first.wait_for()
    page.screenshot(path=path)
    page.close()


def _shoot_a_push(browser: Browser, address: str, path: Path, folder: Path) -> None:
    file = folder / "delta.safetensors"
    safetensors.numpy.save_file({"digits/bias": np.full(10, 0.01, np.float32)}, file)
    page = _opened(browser, address, 1100, 900, "light")
    page.get_by_role("button", name="Enter the token …").click()
    page.get_by_role("textbox", name="Token").fill(TOKEN)
    page.get_by_role("button", name="Use it").click()
    page.get_by_role("button", name="Upload an update …").click()
    page.get_by_label("File (.safetensors)").set_input_files(file)
    page.get_by_label("Why").fill("smaller step towards the mean")
    page.get_by_label("Your name").fill("ana")
    page.screenshot(path=path.with_name("page-upload.png"))
    page.get_by_role("button", name="Check", exact=True).click()
    page.get_by_role("button", name="Push to all workers").click()
    page.locator("#receipt").wait_for()
    page.screenshot(path=path)
    page.close()


def _opened(browser: Browser, address: str, width: int, height: int, scheme: str) -> Page:
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(f"{address}/first")
    page.locator("#metrics .key").get_by_text("restart").wait_for()
    page.get_by_label("Losses on a log scale").check()  # The first loss is 100 times the last one.
    page.wait_for_timeout(1500)
    return page


if __name__ == "__main__":
    main()
