// What the workers print: read only while the card is open.

import { get } from "./api.js";
import { el, setText } from "./dom.js";

const EVERY_MS = 3000;

export class Logs {
  constructor(base) {
    this.base = base;
    this.worker = el("select", { id: "log-worker", onchange: () => this.read() });
    this.text = el("pre", { class: "log", tabIndex: 0, role: "log", "aria-label": "Last lines", "aria-live": "off" });
    this.details = el("details", { class: "fold", ontoggle: () => this.details.open && this.read() },
      el("summary", {}, el("h2", { id: "logs-title" }, "Logs")),
      el("div", { class: "body stack" }, el("div", { class: "field" }, el("label", { for: "log-worker" }, "Worker"), this.worker), this.text));
    this.node = el("section", { class: "card", id: "logs", "aria-labelledby": "logs-title" }, this.details);
    setInterval(() => this.details.open && !document.hidden && this.read(), EVERY_MS);
  }

  setSize(size) {
    while (this.worker.options.length < size) this.worker.append(el("option", { value: String(this.worker.options.length) }, `worker ${this.worker.options.length}`));
  }

  async read() {
    if (!this.worker.value) return;
    try {
      const { lines } = await get(`${this.base}/logs/${this.worker.value}?lines=300`);
      const atEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40;
      setText(this.text, lines.join("\n") || "It has printed nothing yet.");
      if (atEnd) this.text.scrollTop = this.text.scrollHeight;
    } catch (error) {
      setText(this.text, error.message);
    }
  }
}
