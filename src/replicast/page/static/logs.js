// What the workers print: read only while the card is open.

import { get } from "./api.js";
import { el, setText } from "./dom.js";
import { count, counted } from "./format.js";

const EVERY_MS = 2000;
const LINES = 500, SEARCHED = 5000; // Of a log: the last ones; 5,000 is what the server allows.

export class Logs {
  constructor(base) {
    this.base = base;
    const read = () => this.read();
    this.worker = el("select", { id: "log-worker", onchange: read });
    this.attempt = el("select", { id: "log-attempt", onchange: read }, el("option", { value: "" }, "the last one"));
    this.search = el("input", { id: "log-search", type: "search", spellcheck: false, placeholder: "part of a line", oninput: () => this.searched() });
    this.follow = el("input", { type: "checkbox", checked: true, onchange: read });
    this.found = el("span", { class: "dim small", role: "status" });
    this.text = el("pre", { class: "log", tabIndex: 0, role: "log", "aria-label": "Last lines", "aria-live": "off", onscroll: () => this.scrolled() });
    this.details = el("details", { class: "fold", ontoggle: () => this.details.open && this.read() },
      el("summary", {}, el("h2", { id: "logs-title" }, "Logs")),
      el("div", { class: "body stack" },
        el("div", { class: "log-controls" }, labelled("Worker", this.worker), labelled("Attempt", this.attempt), labelled("Search", this.search), el("label", { class: "check small" }, this.follow, "Follow"), this.found),
        this.text));
    this.node = el("section", { class: "card", id: "logs", "aria-labelledby": "logs-title" }, this.details);
    setInterval(() => this.details.open && !document.hidden && this.follow.checked && this.attempt.value === "" && this.read(), EVERY_MS);
  }

  setJob(size, attempt) {
    while (this.worker.options.length < size) this.worker.append(el("option", { value: String(this.worker.options.length) }, `worker ${this.worker.options.length}`));
    while (this.attempt.options.length <= attempt + 1) this.attempt.append(el("option", { value: String(this.attempt.options.length - 1) }, `attempt ${this.attempt.options.length - 1}`));
  }

  /** Opens the log of an attempt, as a link of a restart does. */
  show(attempt, worker = "") {
    this.attempt.value = attempt;
    if (worker) this.worker.value = worker;
    if (this.details.open) this.read();
    this.details.open = true;
    this.node.scrollIntoView();
    this.details.querySelector("summary").focus();
  }

  searched() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.read(), 200);
  }

  async read() {
    if (!this.worker.value) return;
    const text = this.search.value, asked = `${this.worker.value}?lines=${text ? SEARCHED : LINES}${this.attempt.value ? `&attempt=${this.attempt.value}` : ""}`;
    this.asked = `${asked} ${text}`;
    try {
      const { lines } = await get(`${this.base}/logs/${asked}`);
      if (this.asked === `${asked} ${text}`) this.show_(lines, text);
    } catch (error) {
      this.fill([error.message]);
    }
  }

  show_(lines, text) {
    const wanted = text.toLowerCase();
    const kept = wanted ? lines.filter((line) => line.toLowerCase().includes(wanted)) : lines;
    setText(this.found, wanted ? `${counted(kept.length, "line")} of the last ${count(lines.length)}` : "");
    this.fill(kept.length ? kept : [wanted ? "No line has it." : "It has printed nothing yet."], kept.length ? wanted : "");
  }

  fill(lines, wanted = "") {
    const key = `${wanted}\n${lines.join("\n")}`;
    if (key === this.shown) return;
    this.shown = key;
    if (wanted) this.text.replaceChildren(...lines.flatMap((line) => [...marked(line, wanted), "\n"]));
    else setText(this.text, lines.join("\n"));
    if (this.follow.checked) this.text.scrollTop = this.text.scrollHeight;
  }

  /** Who scrolls up reads: what is new must not move it. At the end, it is followed again. */
  scrolled() {
    const atEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 8;
    if (atEnd !== this.follow.checked && this.text.scrollHeight > this.text.clientHeight) this.follow.checked = atEnd;
  }
}

function labelled(name, control) {
  return el("div", { class: "field" }, el("label", { for: control.id }, name), control);
}

/** A line in which each place of a text is marked. */
function marked(line, wanted) {
  const parts = [];
  for (let at = 0; ;) {
    const next = line.toLowerCase().indexOf(wanted, at);
    if (next < 0) return [...parts, line.slice(at)];
    parts.push(line.slice(at, next), el("mark", {}, line.slice(next, next + wanted.length)));
    at = next + wanted.length;
  }
}
