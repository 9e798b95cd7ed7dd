// Audits and checkpoints.

import { card, el, setText, showList } from "./dom.js";
import { ago, count, counted, number, size } from "./format.js";
import { report } from "./report.js";

export function auditSentence(report) {
  const on = report.workers === 1 ? "on the only worker" : `on ${report.workers} workers`;
  if (report.equal) return `${counted(report.variables, "variable")} equal ${on}`;
  const first = report.differences[0]?.variable ?? "a variable";
  const done = report.outcome === "healed" && report.healed.length ? `healed by update ${report.healed.join(", ")}` : report.outcome;
  return `${report.differences.length} of ${counted(report.variables, "variable")} differed ${on} (${first}); ${done}`;
}

/** In a report, which lists all: those that follow each other and found the same, all equal, are one, with all their steps. */
function folded(audits) {
  const found = [];
  for (const one of audits) {
    const last = found.at(-1);
    if (report && one.equal && last?.equal && auditSentence(one) === auditSentence(last)) found[found.length - 1] = { ...last, steps: [...last.steps ?? [last.step], one.step] };
    else found.push(one);
  }
  return found;
}

export class Audits {
  constructor() {
    this.list = el("tbody");
    this.empty = el("p", { class: "empty", hidden: true });
    this.node = card("audits", "Audits", el("div", { class: "body scroll" }, this.empty,
      el("table", {}, head(["step", "found", "when"]), this.list)));
  }

  show(audits, running) {
    const shown = audits.slice(report ? 0 : -5).reverse();
    setText(this.empty, running ? "No audit yet" : "No audit was made");
    this.empty.hidden = shown.length > 0;
    this.list.parentElement.hidden = shown.length === 0;
    showList(this.list, folded(shown).map((one) => ({ ...one, ago: ago(one.time) })), (one) => `${one.attempt}-${one.number}-${one.time}`, (one) => el("tr", {},
      el("td", { class: "keep" }, one.steps ? `${count(one.steps.at(-1))} to ${count(one.step)}` : count(one.step)),
      el("td", {}, one.steps ? el("details", {}, el("summary", {}, `${count(one.steps.length)} audits`), el("p", { class: "dim small" }, `At the steps ${one.steps.slice().reverse().map(count).join("; ")}`)) : null, el("span", { class: `chip ${one.equal ? "good" : one.outcome === "healed" ? "careful" : "bad"}` }, one.equal ? "equal" : one.outcome), " ",
        el("span", { class: "dim small" }, auditSentence(one))),
      el("td", { class: "dim keep" }, one.ago)));
  }
}

export class Checkpoints {
  constructor() {
    this.list = el("tbody");
    this.empty = el("p", { class: "empty", hidden: true });
    this.node = card("checkpoints", "Checkpoints", el("div", { class: "body scroll" }, this.empty,
      el("table", {}, head(["step", "position", "size", "when"]), this.list)));
  }

  show(checkpoints, running) {
    const shown = checkpoints.slice(report ? 0 : -5).reverse();
    setText(this.empty, running ? "No checkpoint yet" : "No checkpoint was made");
    this.empty.hidden = shown.length > 0;
    this.list.parentElement.hidden = shown.length === 0;
    showList(this.list, shown.map((one) => ({ ...one, ago: ago(one.created_at) })), (one) => `${one.attempt}-${one.step}-${one.created_at}`, (one) => el("tr", {},
      el("td", { class: "keep" }, count(one.step)),
      el("td", {}, one.epoch && !one.batch ? `end of epoch ${count(one.epoch)}` : `epoch ${count(one.epoch + 1)}, batch ${count(one.batch)}`, el("div", { class: "dim small" }, metricsText(one))),
      el("td", { class: "keep" }, size(one.nbytes)),
      el("td", { class: "dim keep" }, one.ago)));
  }
}

function metricsText(one) {
  const values = Object.entries(one.metrics ?? {}).sort(([a], [b]) => Number(b === "loss") - Number(a === "loss")).slice(0, 3).map(([name, value]) => `${name} ${number(value)}`);
  return [...values, one.patched_by ? `patched by ${one.patched_by}` : ""].filter(Boolean).join(", ");
}

function head(columns) {
  return el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name))));
}
