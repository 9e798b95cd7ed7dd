"""Rows of a table on the page, in a real browser: looked up, edited, pasted, pushed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Locator, Page, expect

from replicast.client import connect
from replicast.storage.journal import load_update
from replicast.update.edits import BFLOAT16
from tests.page.played_run import PlayedRun
from tests.page.test_browser import UNNAMED, browser, context, page, run, serving, unlock

__all__ = ["browser", "context", "page", "run", "serving"]

KERNEL, TABLE = "model/dense/kernel", "model/table/embeddings"
PASTE = """(cell, text) => { const data = new DataTransfer(); data.setData("text/plain", text);
    const options = {clipboardData: data, bubbles: true, cancelable: true};
    cell.dispatchEvent(new ClipboardEvent("paste", options)); }"""


@pytest.fixture
def rows(page: Page, run: PlayedRun) -> Locator:
    """The open card of a page that has the token; two tables have values."""
    run.tables[KERNEL] = np.arange(12, dtype=np.float32).reshape(4, 3) / 10
    run.tables[TABLE] = np.arange(20).reshape(10, 2).astype(BFLOAT16)
    unlock(page)
    page.locator("#rows summary").click()
    expect(page.locator("#rows-wanted-hint")).to_contain_text("0 to 9")
    return page.locator("#rows")


def look_up(rows: Locator, table: str, wanted: str) -> None:
    rows.get_by_label("Table", exact=True).select_option(table)
    rows.get_by_role("textbox", name="Rows").fill(wanted)
    rows.get_by_role("button", name="Look up").click()


def cell(rows: Locator, row: int, column: int) -> Locator:
    """A cell by its place in the grid."""
    return rows.locator(f'td[data-row="{row}"][data-column="{column}"]')


def pushed(page: Page, run: PlayedRun, **chosen: str) -> np.ndarray:
    """Checks and pushes what was changed; the rows of the one update of the journal."""
    page.get_by_role("button", name="Check and push …").click()
    for label, value in chosen.items():
        page.get_by_label(label.replace("_", " "), exact=True).select_option(value)
    page.get_by_label("Try it first").uncheck()
    page.get_by_role("button", name="Check", exact=True).click()
    page.get_by_role("button", name="Push to all workers").click()
    expect(page.locator("#receipt")).to_contain_text("the same on 2 workers")
    page.get_by_role("button", name="Close").click()
    (view,) = connect(run.path).log()
    assert view.sequence is not None
    (edit,) = load_update(run.path, view.sequence).edits
    return np.column_stack([edit.arrays["indices"], edit.arrays["rows"].astype(np.float64)])


def test_rows_are_looked_up_edited_with_the_keyboard_alone_and_pushed(
    page: Page, run: PlayedRun, rows: Locator
) -> None:
    with page.expect_response(re.compile("/variables/")) as answered:
        look_up(rows, KERNEL, "3,0:2")
    assert answered.value.json()["rows"] == [3, 0, 1]
    assert "rows=3%2C0%3A2" in answered.value.url
    expect(rows.locator("tbody th")).to_have_text(["3", "0", "1"])
    expect(rows).to_contain_text(re.compile(r"3 rows of 4, at step \d+, the same on every worker"))
    assert page.evaluate(UNNAMED) == 0
    expect(rows.get_by_role("grid", name=f"Rows of {KERNEL}")).to_be_visible()
    cell(rows, 0, 0).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    expect(cell(rows, 1, 2)).to_be_focused()
    page.keyboard.type("x")
    page.keyboard.press("Enter")
    expect(cell(rows, 1, 2)).to_have_attribute("aria-invalid", "true")
    expect(cell(rows, 2, 2)).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(rows.get_by_role("alert")).to_have_text("Row 0, column 2: “x” is not a number")
    page.get_by_role("button", name="Check and push …").click()
    expect(cell(rows, 1, 2)).to_be_focused()
    page.keyboard.type("0.123456789")
    page.keyboard.press("Tab")
    cell(rows, 2, 0).focus()
    page.keyboard.press("Enter")
    page.keyboard.type("7")
    page.keyboard.press("Escape")
    expect(cell(rows, 2, 0)).to_have_text("0.3")
    expect(rows).to_contain_text("1 value changed in 1 row")
    cell(rows, 2, 0).focus()
    page.keyboard.press("Control+a")
    selected = page.evaluate("getSelection().toString()")
    assert "0.3" in selected
    assert "Look up" not in selected, "the grid, not the page"
    run.tables[KERNEL][0, 2] = 0.5
    assert pushed(page, run).tolist() == [[0, 0, np.float32(0.1), np.float32(0.123456789)]]
    expect(cell(rows, 1, 2)).to_have_text("0.5")  # Looked up again.
    expect(rows.get_by_text("changed in")).to_be_hidden()


def test_a_block_of_a_spreadsheet_is_pasted_and_its_errors_are_at_their_cells(
    page: Page, run: PlayedRun, rows: Locator
) -> None:
    look_up(rows, TABLE, "4:8, 5")
    expect(rows.locator("tbody th")).to_have_text(["4", "5", "6", "7"])
    start = cell(rows, 1, 0)
    start.focus()
    start.evaluate(PASTE, "1\t2\t3\t4")
    expect(rows.get_by_role("alert")).to_contain_text("does not fit")
    start.evaluate(PASTE, "8\t1\t2")
    expect(rows.get_by_role("alert")).to_contain_text("Row 8 is not among those that were looked up")
    start.evaluate(PASTE, "1,5\t2\n1e99\t0.1\n")
    expect(rows.locator("td.bad")).to_have_count(2)
    expect(rows.get_by_role("alert")).to_have_text("Row 5, column 0: “1,5” is not a number: write 1.5")
    assert cell(rows, 2, 0).get_attribute("title") == "1e99 is too large for bfloat16"
    start.evaluate(PASTE, "1.5\t2\n3\t0.1\n")
    expect(rows.locator("td.bad")).to_have_count(0)
    # The differences: 1.5 - 10, 2 - 11, 3 - 12, 0.1 - 13, as bfloat16 has them.
    assert pushed(page, run, How="add_rows").tolist() == [[5, -8.5, -9], [6, -9, -12.875]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("row;a;b\n9;1;2\n3;4;5\n", [[9, 1, 2], [3, 4, 5]]),
        ('{"9": [1, 2], "3": [4, 5]}', [[3, 4, 5], [9, 1, 2]]),
    ],
)
def test_whole_rows_with_their_ids_are_pasted_from_csv_and_json(
    page: Page, run: PlayedRun, rows: Locator, text: str, expected: list[list[int]]
) -> None:
    rows.get_by_label("Table", exact=True).select_option(TABLE)
    rows.get_by_role("button", name="Paste rows …").click()
    area = page.get_by_label(f"Rows of {TABLE}")
    for wrong, said in (
        ("10,1,2", "this table has no row “10”"),
        ("1 2\n3", "Look up the rows"),
        ("[1", "not JSON"),
    ):
        area.fill(wrong)
        page.get_by_role("button", name="Use them").click()
        expect(page.locator("dialog .note.bad")).to_contain_text(said)
        page.get_by_role("button", name="Change it").click()
    area.fill(text)
    page.get_by_role("button", name="Use them").click()
    expect(page.locator("dialog")).to_have_count(0)
    assert rows.get_by_role("textbox", name="Rows").input_value() == ",".join(str(row[0]) for row in expected)
    assert pushed(page, run).tolist() == expected


def test_rows_that_the_table_does_not_have_and_a_wrong_range_are_told_at_the_field(
    page: Page, rows: Locator
) -> None:
    wanted = rows.get_by_role("textbox", name="Rows")
    for text, said in (("5:3", "must not be empty"), ("10", "has the rows 0 to 9"), ("1-3", "3,5,10:20")):
        look_up(rows, TABLE, text)
        assert said in wanted.evaluate("input => input.validationMessage")
    expect(rows.get_by_role("grid")).to_have_count(0)


def test_without_the_token_no_value_is_read(page: Page, run: PlayedRun, tmp_path: Path) -> None:
    page.locator("#rows summary").click()
    expect(page.locator("#rows")).to_contain_text("needs the token")
    expect(page.get_by_role("button", name="Look up")).to_be_hidden()
