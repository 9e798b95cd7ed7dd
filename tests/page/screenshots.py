"""The pictures in docs/images, of a job that is played: `make screenshots`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import safetensors.numpy
from playwright.sync_api import Browser, Page

from replicast.client import connect
from replicast.storage.checkpoints import CheckpointStore
from replicast.update.trial import Trial
from replicast.update.update import Update
from tests.page.browser import chromium
from tests.page.live import Serving
from tests.page.played_run import PlayedRun
from tests.unit.checkpoint.samples import written

TOKEN = "0123456789abcdef-the-token"
IMAGES = Path(__file__).parents[2] / "docs" / "images"


def main() -> None:
    """Makes all pictures."""
    images = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = PlayedRun(Path(folder) / "runs" / "first", every_secs=0.2)
        _train(run)
        token = Path(folder) / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        run.play()
        with Serving(run.path.parent, "--token-file", str(token)) as serving, chromium() as browser:
            for scheme in ("light", "dark"):
                _shoot(browser, serving.address, images / f"page-wide-{scheme}.png", 1600, 1180, scheme)
                _shoot(browser, serving.address, images / f"page-phone-{scheme}.png", 390, 1500, scheme)
            _shoot_a_push(browser, serving.address, images / "page-push.png", Path(folder))
        run.kill()


def _train(run: PlayedRun) -> None:
    """Some history: updates, a trial, checkpoints, a restart."""
    run.prepare()
    client = connect(run.path)
    for step in range(1, 1240):
        run.moment()
        if step in (400, 800, 1200):
            written(
                CheckpointStore(run.path, run.job.fence),
                step,
                epoch=step // 200,
                batch=0,
                created_at=time.time(),
            )
        if step == 310:
            fix = Update(author="ana@gpu-1", note="fix drifted bias")
            client.push(fix.add("dense/bias", np.array([0.1, 0.2, 0.3], np.float32)))
        if step == 640:
            slower = Update(author="li@laptop", note="warm restart")
            client.push(slower.assign("learning_rate", 0.0005), trial=Trial(50, max_increase=0.05))
        if step == 900:
            run.kill()
            run.prepare()


def _shoot(browser: Browser, address: str, path: Path, width: int, height: int, scheme: str) -> None:
    page = _opened(browser, address, width, height, scheme)
    page.screenshot(path=path)
    page.close()


def _shoot_a_push(browser: Browser, address: str, path: Path, folder: Path) -> None:
    file = folder / "delta.safetensors"
    safetensors.numpy.save_file({"dense/bias": np.full(3, 0.01, np.float32)}, file)
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
    page.wait_for_timeout(1500)
    return page


if __name__ == "__main__":
    main()
