// Rows of a table: looked up by id, edited like a spreadsheet, pushed as one update. Only the rows that were asked for travel.

import { get, newId, upload } from "./api.js";
import { el, say, setText } from "./dom.js";
import { Dialog, field, problemView } from "./dialogs.js";
import { count, counted, number } from "./format.js";
import { brief, fileOf, parsed, pastedRows, rowsOf, rowsText, shown } from "./tables.js";
import { askForToken } from "./token.js";

const CELLS_SHOWN = 3000; // On one leaf of the grid, and at most so many rows:
const ROWS_SHOWN = 50;
const CHANGES_SHOWN = 12; // Before a push.

export class Rows {
  /** @param actions see actions.js */
  constructor(base, actions) {
    this.base = base;
    this.actions = actions;
    this.tables = new Map();
    this.table = null;
    this.rows = [];
    this.leaf = 0;
    this.select = el("select", { id: "rows-table", onchange: () => this.showHint() });
    this.wanted = el("input", { id: "rows-wanted", value: "0:10", spellcheck: false, autocomplete: "off", required: true });
    this.wanted.addEventListener("input", () => this.wanted.setCustomValidity(""));
    const wanted = field("rows-wanted", "Rows", this.wanted, "Such as 1,5,10:20, where 20 is not included.");
    this.hint = wanted.querySelector(".hint");
    this.lookUpButton = el("button", { type: "submit", class: "main" }, "Look up");
    this.problem = el("div", { "aria-live": "polite" });
    this.said = el("p", { class: "dim small", "aria-live": "polite" });
    this.message = el("p", { class: "reason small", id: "rows-message", role: "alert" });
    this.grid = el("div", { class: "scroll grid", hidden: true });
    this.pager = el("div", { class: "buttons pager", hidden: true });
    this.changes = el("p", { class: "small" });
    this.push = el("button", { type: "button", class: "main", onclick: () => this.propose() }, "Check and push …");
    this.undo = el("button", { type: "button", onclick: () => this.restore() }, "Undo the changes");
    this.foot = el("div", { class: "buttons", hidden: true }, this.push, this.undo, this.changes);
    this.open = el("form", { class: "stack", onsubmit: (event) => { event.preventDefault(); this.lookUp(); } },
      el("div", { class: "asked" }, el("div", { class: "field" }, el("label", { for: "rows-table" }, "Table"), this.select), wanted,
        el("div", { class: "buttons" }, this.lookUpButton, el("button", { type: "button", onclick: () => this.paste() }, "Paste rows …"))),
      this.problem, this.said, this.grid, this.pager, this.message, this.foot);
    this.locked = el("div", { class: "stack" });
    this.details = el("details", { class: "fold", ontoggle: () => this.details.open && this.readTables() },
      el("summary", {}, el("h2", { id: "rows-title" }, "Rows"), el("span", { class: "dim small" }, "look up and edit rows of a table")),
      el("div", { class: "body stack" }, this.locked, this.open));
    this.node = el("section", { class: "card", id: "rows", "aria-labelledby": "rows-title" }, this.details);
    this.grid.addEventListener("keydown", (event) => this.key(event));
    this.grid.addEventListener("focusin", (event) => this.focused(event.target.closest("td[data-column]")));
    this.grid.addEventListener("dblclick", (event) => this.edit(event.target.closest("td[data-column]")));
    this.grid.addEventListener("paste", (event) => this.pasted(event));
    this.grid.addEventListener("copy", (event) => this.copied(event));
  }

  /** What is allowed, and whether there is a job that takes an update. */
  show(status) {
    const allowed = this.actions.allowed();
    this.running = status.running;
    this.open.hidden = !allowed;
    this.locked.hidden = allowed;
    if (!allowed && !this.locked.firstChild) {
      const off = !this.actions.context.run.actions;
      this.locked.append(el("p", { class: "dim small" }, off ? "Off: this server was started without a token (--token-file)." : "Reading values needs the token of this server: all workers stop for a moment."),
        off ? "" : el("div", { class: "buttons" }, el("button", { type: "button", onclick: () => askForToken() }, "Enter the token …")));
    }
    this.push.disabled = !status.running;
    this.push.title = status.running ? "" : "The job is not running";
    if (this.details.open) this.readTables();
  }

  async readTables() {
    if (this.tables.size || this.reading || !this.actions.allowed()) return;
    this.reading = true;
    try {
      const { variables } = await get(`${this.base}/schema`);
      const tables = variables.filter((one) => one.shape.length > 0 && one.shape[0] > 0);
      const first = (one) => Number(one.kind !== "trainable") + Number(one.shape.length < 2);
      tables.sort((a, b) => first(a) - first(b) || b.shape[0] - a.shape[0]);
      this.tables = new Map(tables.map((one) => [one.name, one]));
      this.select.replaceChildren(...tables.map((one) => el("option", { value: one.name }, `${one.name} (${one.shape.map(count).join(" × ")})`)));
      this.showHint();
    } catch (error) {
      this.tell(error);
    } finally {
      this.reading = false;
    }
  }

  showHint() {
    const table = this.tables.get(this.select.value);
    if (table) setText(this.hint, `Such as 1,5,10:20, where 20 is not included; 0 to ${count(table.shape[0] - 1)}.`);
  }

  tell(error) {
    this.problem.replaceChildren(...(error ? [problemView(error.fields ?? { problem: error.message || "The server does not answer" })] : []));
  }

  /** Reads the rows; true if they are there. */
  async lookUp() {
    const table = this.tables.get(this.select.value);
    if (!table) return false;
    let wanted;
    try {
      wanted = rowsText([...new Set(rowsOf(this.wanted.value, table.shape[0]))], table.shape[0]); // Each once.
    } catch (error) {
      this.wanted.setCustomValidity(error.message);
      this.wanted.reportValidity();
      return false;
    }
    if (this.edited().length && !window.confirm("Forget the changes that were not pushed?")) return false;
    this.tell(null);
    this.lookUpButton.disabled = true;
    setText(this.said, this.running ? "The job reads them at its next step …" : "Reading the last checkpoint …");
    try {
      const name = table.name.split("/").map(encodeURIComponent).join("/");
      const pulled = await get(`${this.base}/variables/${name}?${new URLSearchParams({ rows: wanted, timeout: 60 })}`);
      this.table = table;
      this.rows = pulled.rows.map((id, at) => ({ id, values: [pulled.values[at]].flat(Infinity).map(Number), changed: new Map() }));
      this.leaf = 0;
      const digests = new Set(Object.values(pulled.digests));
      const where = pulled.source === "job" ? `at step ${count(pulled.step)}, ${digests.size > 1 ? "which differ between workers: these are those of worker 0" : "the same on every worker"}` : `in ${pulled.source}`;
      setText(this.said, `${counted(this.rows.length, "row")} of ${count(table.shape[0])}, ${where}. Type to change a value; press Delete to undo a change. Copy and paste work as in a spreadsheet.`);
      this.draw();
      return true;
    } catch (error) {
      setText(this.said, "");
      this.tell(error);
      return false;
    } finally {
      this.lookUpButton.disabled = false;
    }
  }

  get width() {
    return this.rows[0]?.values.length ?? 0;
  }

  get rowsShown() {
    return Math.max(1, Math.min(ROWS_SHOWN, Math.floor(CELLS_SHOWN / Math.max(1, this.width))));
  }

  draw() {
    const from = this.leaf * this.rowsShown, rows = this.rows.slice(from, from + this.rowsShown);
    const columns = [...Array(this.width).keys()];
    const head = el("tr", {}, el("th", { scope: "col" }, "row"), columns.map((at) => el("th", { scope: "col", class: "right" }, String(at))), el("th", { scope: "col", class: "right" }, "norm"));
    const body = rows.map((row, at) => el("tr", {}, el("th", { scope: "row" }, count(row.id)),
      columns.map((column) => el("td", { role: "gridcell", tabIndex: -1, "data-row": from + at, "data-column": column })), el("td", { class: "right dim norm" })));
    const name = `Rows of ${this.table.name}`;
    this.grid.replaceChildren(el("table", { role: "grid", "aria-label": name, "aria-rowcount": this.rows.length + 1, "aria-colcount": this.width + 2 }, el("thead", {}, head), el("tbody", {}, body)));
    for (const cell of this.grid.querySelectorAll("td[data-column]")) this.fill(cell);
    for (const line of this.grid.querySelectorAll("tbody tr")) this.showNorm(line);
    const first = this.grid.querySelector("td[data-column]");
    if (first) first.tabIndex = 0;
    const leaves = Math.ceil(this.rows.length / this.rowsShown);
    const turn = (text, by) => el("button", { type: "button", class: "tiny", disabled: !(this.leaf + by in Array(leaves).fill(0)), onclick: () => { this.leaf += by; this.draw(); } }, text);
    this.pager.hidden = leaves < 2;
    this.pager.replaceChildren(turn("Earlier rows", -1), turn("Later rows", 1), el("span", { class: "dim small" }, `${count(from + 1)} to ${count(from + rows.length)} of ${count(this.rows.length)}`));
    this.grid.hidden = rows.length === 0;
    this.showChanges();
  }

  at(cell) {
    return { row: this.rows[Number(cell.dataset.row)], column: Number(cell.dataset.column) };
  }

  cell(row, column) {
    return this.grid.querySelector(`td[data-row="${row}"][data-column="${column}"]`);
  }

  fill(cell) {
    const { row, column } = this.at(cell);
    const change = row.changed.get(column);
    cell.className = change ? (change.problem ? "bad" : "changed") : "";
    change?.problem ? cell.setAttribute("aria-invalid", "true") : cell.removeAttribute("aria-invalid");
    const exact = shown(row.values[column], this.table.dtype);
    cell.title = change ? change.problem || `was ${exact}` : exact;
    cell.replaceChildren(change ? change.text : brief(row.values[column]));
  }

  showNorm(line) {
    const row = this.rows[Number(line.querySelector("[data-row]").dataset.row)];
    const squares = this.valuesOf(row).reduce((sum, value) => sum + value * value, 0);
    setText(line.querySelector(".norm"), number(Math.sqrt(squares)));
  }

  valuesOf(row) {
    return row.values.map((value, column) => row.changed.get(column)?.value ?? value);
  }

  set(place, column, text) {
    const row = this.rows[place];
    const { value, problem } = parsed(text, this.table.dtype);
    if (!problem && value === row.values[column]) row.changed.delete(column);
    else row.changed.set(column, { text: text.trim(), value, problem });
    const cell = this.cell(place, column);
    if (cell) { this.fill(cell); this.showNorm(cell.parentElement); }
  }

  edited() {
    return this.rows.filter((row) => row.changed.size);
  }

  showChanges() {
    const rows = this.edited();
    const changes = rows.flatMap((row) => [...row.changed.values()]);
    const bad = changes.filter((change) => change.problem).length;
    this.foot.hidden = rows.length === 0;
    setText(this.changes, `${counted(changes.length, "value")} changed in ${counted(rows.length, "row")}${bad ? `; ${bad} of them cannot be used` : ""}${this.running ? "" : ". The job is not running: nothing can be pushed"}`);
    if (!bad) setText(this.message, "");
  }

  restore() {
    for (const row of this.rows) row.changed.clear();
    this.draw();
    this.wanted.focus();
  }

  // The grid: one stop for Tab; arrows move, typing edits.

  focused(cell) {
    if (!cell) return;
    for (const one of this.grid.querySelectorAll('td[tabindex="0"]')) one.tabIndex = -1;
    cell.tabIndex = 0;
    const { row, column } = this.at(cell);
    const problem = row.changed.get(column)?.problem;
    setText(this.message, problem ? `Row ${count(row.id)}, column ${column}: ${problem}` : "");
  }

  move(cell, rows, columns) {
    const next = this.cell(Number(cell.dataset.row) + rows, Number(cell.dataset.column) + columns);
    next?.focus();
    return Boolean(next);
  }

  key(event) {
    const cell = event.target.closest("td[data-column]");
    if (!cell || event.target !== cell) return;
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -Number(cell.dataset.column)], End: [0, this.width - 1 - Number(cell.dataset.column)] };
    const typed = event.key.length === 1 && !event.ctrlKey && !event.metaKey && !event.altKey;
    if (moves[event.key]) this.move(cell, ...moves[event.key]);
    else if (event.key === "Enter" || event.key === "F2") this.edit(cell);
    else if (event.key === "Delete" || event.key === "Backspace") this.takeBack(cell);
    else if ((event.ctrlKey || event.metaKey) && event.key === "a") getSelection().selectAllChildren(this.grid);
    else if (typed) this.edit(cell, event.key);
    else return;
    event.preventDefault();
  }

  takeBack(cell) {
    const { row, column } = this.at(cell);
    row.changed.delete(column);
    this.fill(cell);
    this.showNorm(cell.parentElement);
    this.showChanges();
  }

  edit(cell, typed = null) {
    if (!cell || cell.querySelector("input")) return;
    const { row, column } = this.at(cell);
    const before = row.changed.get(column)?.text ?? shown(row.values[column], this.table.dtype);
    const input = el("input", { value: typed ?? before, inputMode: "decimal", spellcheck: false, autocomplete: "off", "aria-label": `Row ${row.id}, column ${column}` });
    let over = false;
    const end = (keep, rows = 0, columns = 0) => {
      if (over) return;
      over = true;
      if (keep && input.value.trim() !== before) this.set(Number(cell.dataset.row), column, input.value);
      else this.fill(cell);
      this.showChanges();
      if (rows || columns) this.move(cell, rows, columns) || cell.focus();
      else if (!keep) cell.focus();
      this.focused(cell.ownerDocument.activeElement.closest("td[data-column]"));
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true, event.shiftKey ? -1 : 1, 0);
      else if (event.key === "Tab") end(true, 0, event.shiftKey ? -1 : 1);
      else if (event.key === "Escape") end(false);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    input.addEventListener("blur", () => end(true));
    cell.replaceChildren(input);
    input.focus();
    if (typed === null) input.select();
  }

  copied(event) {
    if (event.target.closest("input")) return;
    const lines = this.rows.map((row) => [row.id, ...this.valuesOf(row).map((value) => shown(value, this.table.dtype))].join("\t"));
    event.clipboardData.setData("text/plain", lines.join("\n"));
    event.preventDefault();
    say(`Copied ${counted(this.rows.length, "row")}`);
  }

  /** Text from a spreadsheet goes into the cells from the focused one on; whole rows with their ids go into these rows. */
  pasted(event) {
    const cell = event.target.closest("td[data-column]");
    if (!cell || event.target !== cell) return;
    event.preventDefault();
    try {
      const found = pastedRows(event.clipboardData.getData("text/plain"), this.width);
      if (found.ids) this.take(found);
      else this.takeFrom(Number(cell.dataset.row), Number(cell.dataset.column), found.lines);
    } catch (error) {
      setText(this.message, error.message);
    }
  }

  takeFrom(first, column, lines) {
    const widest = Math.max(...lines.map((line) => line.length));
    if (first + lines.length > this.rows.length || column + widest > this.width) {
      throw new Error(`What was pasted does not fit: it has ${counted(lines.length, "row")} and ${counted(widest, "column")}, and from here on there are ${this.rows.length - first} and ${this.width - column}.`);
    }
    lines.forEach((line, down) => line.forEach((text, right) => this.set(first + down, column + right, text)));
    this.afterPaste();
  }

  /** Whole rows: with their ids, or as many as are shown, in their order. */
  take({ ids, lines }) {
    const wrong = lines.findIndex((line) => line.length !== this.width);
    if (wrong >= 0) throw new Error(`Line ${wrong + 1}: a row of this table has ${counted(this.width, "value")}. Received: ${lines[wrong].length}.`);
    if (!ids && lines.length !== this.rows.length) throw new Error(`${counted(lines.length, "line")} without ids, and ${counted(this.rows.length, "row")} looked up: begin each line with the row that it is for.`);
    const places = new Map(this.rows.map((row, place) => [row.id, place]));
    const unknown = ids?.find((id) => !places.has(Number(id)));
    if (unknown !== undefined) throw new Error(`Row ${unknown} is not among those that were looked up: use “Paste rows …”.`);
    lines.forEach((line, at) => line.forEach((text, column) => this.set(ids ? places.get(Number(ids[at])) : at, column, text)));
    this.afterPaste();
  }

  afterPaste() {
    this.showChanges();
    say(this.changes.textContent);
    const bad = this.grid.querySelector("td.bad");
    if (!bad) return;
    bad.focus();
    this.focused(bad); // It may have had the focus before: then no event tells of it.
  }

  /** Asks for text with whole rows; the rows that it names are looked up first. */
  paste() {
    const area = el("textarea", { id: "pasted", name: "pasted", rows: 8, required: true, spellcheck: false, placeholder: "12\t0.25\t-0.5\t…" });
    const dialog = new Dialog("Paste rows", "One row per line: its id, then its values, separated by tabs, commas or semicolons; or JSON, {\"12\": [0.25, …]}. Without ids, the lines are for the rows that are looked up, in order.",
      [field("pasted", `Rows of ${this.select.value}`, area)]);
    dialog.ask("Use them", async (data) => {
      try {
        const table = this.tables.get(this.select.value);
        const found = pastedRows(String(data.get("pasted")), table.shape.slice(1).reduce((product, size) => product * size, 1));
        if (found.ids) {
          const text = rowsText(found.ids, table.shape[0]);
          dialog.busy("Looking up the rows …");
          this.wanted.value = text;
          if (!(await this.lookUp())) { dialog.close(); return; }
        } else if (this.table !== table) {
          throw new Error("Look up the rows that these lines are for, or begin each line with its row.");
        }
        this.take(found);
        dialog.close();
      } catch (error) {
        dialog.show(problemView({ problem: error.message }));
        dialog.back("Change it", "Close");
      }
    });
  }

  // Dry run, trial, push, receipt.

  propose() {
    const rows = this.edited();
    const wrong = rows.find((row) => [...row.changed.values()].some((change) => change.problem));
    if (wrong) {
      this.leaf = Math.floor(this.rows.indexOf(wrong) / this.rowsShown);
      this.draw();
      this.grid.querySelector("td.bad").focus();
      return;
    }
    const id = newId(), table = this.table;
    const operation = el("select", { id: "operation", name: "operation" },
      el("option", { value: "assign_rows" }, "replace these rows by what is shown"),
      table.dtype === "bool" ? null : el("option", { value: "add_rows" }, "add the differences: training since then stays"));
    const reset = el("label", { class: "check", for: "reset_slots" }, el("input", { type: "checkbox", id: "reset_slots", name: "reset_slots" }), "Also reset what the optimizer keeps for these rows");
    const dialog = new Dialog(`Change ${counted(rows.length, "row")} of ${table.name}`, "It is checked first; nothing changes before you have seen what it would do.", [
      this.preview(rows), field("operation", "How", operation), table.slots.length ? reset : null,
      this.actions.note(), this.actions.author(), this.actions.trial(true),
    ].filter(Boolean));
    const send = (data, more) => {
      const named = { operation: data.get("operation"), id, ...(data.get("reset_slots") ? { reset_slots: "1" } : {}), ...more };
      const values = (row) => (named.operation === "add_rows" ? row.values.map((value, column) => (row.changed.get(column)?.value ?? value) - value) : this.valuesOf(row));
      const file = fileOf(table, rows.map((row) => row.id), rows.map(values));
      return upload(this.actions.address(data, named), file, (part) => dialog.progress(part));
    };
    this.actions.propose(dialog, id, (data) => send(data, { dry_run: "1" }), (data) => send(data, {}), (view) => this.pushed(view));
  }

  preview(rows) {
    const all = rows.flatMap((row) => [...row.changed].map(([column, change]) => [row, column, change]));
    const lines = all.slice(0, CHANGES_SHOWN).map(([row, column, change]) => el("tr", {}, el("td", {}, count(row.id)), el("td", {}, String(column)),
      el("td", { class: "right keep" }, shown(row.values[column], this.table.dtype)), el("td", { class: "right keep" }, shown(change.value, this.table.dtype))));
    const head = ["row", "column", "as read", "becomes"].map((name, at) => el("th", { scope: "col", class: at > 1 ? "right" : "" }, name));
    return el("div", {}, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, lines)),
      all.length > lines.length ? el("p", { class: "dim small" }, `and ${counted(all.length - lines.length, "more value")}`) : null);
  }

  /** After the receipt: what is in the rows now. */
  pushed(view) {
    if (view.stage !== "verified") return;
    for (const row of this.rows) row.changed.clear();
    this.lookUp();
  }
}
