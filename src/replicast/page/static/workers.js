// The workers: where each is, how long its steps take, who holds up the others.

import { card, el, setText } from "./dom.js";
import { count, duration, seconds, size } from "./format.js";

const ENDED = "nothing: it has ended";
const ASKED = { audit: "an audit", save: "a checkpoint", pull: "reading values", sync: "a sync", leave: "a stop" }; // What changes no value.
const COLUMNS = ["worker", "step", "step time", "memory", "now"];

export class Workers {
  constructor() {
    this.body = el("tbody");
    const head = el("tr", {}, COLUMNS.map((name) => el("th", { scope: "col", class: ["step", "step time", "memory"].includes(name) ? "right" : "" }, name)));
    this.asked = el("p", { class: "dim small" });
    this.node = card("workers", "Workers", el("div", { class: "body scroll" }, el("table", {}, el("thead", {}, head), this.body), this.asked));
  }

  show(status) {
    const notes = new Map(status.workers.map((note) => [note.rank, note]));
    for (let rank = 0; rank < status.size; rank += 1) {
      this.body.children[rank] ?? this.body.append(row(rank));
      fill(this.body.children[rank], notes.get(rank), status);
    }
    while (this.body.children.length > status.size) this.body.lastChild.remove();
    setText(this.asked, status.operations.filter((one) => ASKED[one.kind] && one.waits_for).map((one) => `${ASKED[one.kind]} waits for ${one.waits_for}`).join(" · "));
    this.asked.hidden = !this.asked.textContent;
  }
}

function row(rank) {
  return el("tr", {},
    el("td", {}, el("strong", {}, String(rank)), el("div", { class: "dim small host" })),
    el("td", { class: "right keep" }), el("td", { class: "right keep" }), el("td", { class: "right keep" }),
    el("td", {}, el("span", { class: "chip" }), el("div", { class: "dim small waits" })));
}

function fill(node, note, status) {
  const [first, step, time, memory, now] = node.children;
  const said = doing(note, status);
  setText(first.querySelector(".host"), note ? `${note.host}, pid ${note.pid}` : "");
  setText(step, note ? count(note.step) : "");
  setText(time, note?.step_secs ? seconds(note.step_secs) : "–");
  setText(memory, note?.memory_bytes ? size(note.memory_bytes) : "–");
  const chip = now.querySelector(".chip");
  setText(chip, said.text);
  if (chip.className !== `chip ${said.tone}`) chip.className = `chip ${said.tone}`;
  setText(now.querySelector(".waits"), said.more);
}

function doing(note, status) {
  if (!note) return { text: "never seen", tone: "bad", more: "" };
  if (note.attempt < status.attempt) return { text: "not yet seen", tone: "", more: "in this attempt" };
  if (note.waiting_for === ENDED) return { text: "exited", tone: "", more: `${duration(note.age_secs)} ago` };
  if (note.absent) return { text: "not seen", tone: "bad", more: `for ${duration(note.age_secs)}` };
  const more = note.waiting_for ? `waits for ${note.waiting_for}` : "";
  if (note.slow) return { text: "slow", tone: "careful", more: `for ${duration(Math.max(0, status.time - note.slow.since))}: needs ${seconds(note.slow.own_secs)} per step, the others ${seconds(note.slow.others_secs)}` };
  return note.training ? { text: "training", tone: "good", more } : { text: "running", tone: "accent", more };
}
