// A dialog that asks, shows where something stands, and ends with a receipt or the reason.

import { breakable, el, pairs, say } from "./dom.js";
import { count, counted, editsText, number, seconds, shape, size } from "./format.js";

export function field(id, label, input, hint = "") {
  if (hint) input.setAttribute("aria-describedby", `${id}-hint`);
  return el("div", { class: "field" }, el("label", { for: id }, label), input, hint ? el("span", { class: "hint", id: `${id}-hint` }, hint) : null);
}

export class Dialog {
  constructor(title, text, fields) {
    this.opener = document.activeElement;
    this.fields = el("div", { class: "stack" }, fields);
    this.result = el("div", { class: "stack", "aria-live": "polite" });
    this.buttons = el("div", { class: "buttons" });
    this.form = el("form", { method: "dialog", onsubmit: (event) => { event.preventDefault(); this.submit?.(); } },
      el("h2", { id: "dialog-title" }, title), el("p", { class: "dim" }, text), this.fields, this.result, this.buttons);
    this.dialog = el("dialog", { "aria-labelledby": "dialog-title" }, this.form);
    this.dialog.addEventListener("close", () => { this.dialog.remove(); this.opener?.isConnected && this.opener.focus(); });
    this.dialog.addEventListener("cancel", (event) => this.working && event.preventDefault());
    document.body.append(this.dialog);
    this.dialog.showModal();
  }

  isOpen() {
    return this.dialog.open;
  }

  close() {
    this.dialog.close();
  }

  /** Shows the question with a button for `act`, which gets the data of the form. */
  ask(label, act, tone = "main") {
    this.question = [label, act, tone];
    this.fields.hidden = false;
    for (const input of this.fields.querySelectorAll("[data-was]")) { input.disabled = false; delete input.dataset.was; }
    this.setButtons(el("button", { type: "submit", class: tone === "danger" ? "danger main" : "main" }, label), this.closeButton("Cancel"));
    this.submit = () => this.attempt(() => act(new FormData(this.form)));
  }

  /** Shows a second question after what `show` has shown. */
  confirm(label, act) {
    const yes = el("button", { type: "submit", class: "main" }, label);
    this.setButtons(yes, el("button", { type: "button", onclick: () => this.again() }, "Change it"), this.closeButton("Cancel"));
    this.submit = () => this.attempt(act);
    yes.focus();
  }

  back(label, close) {
    const again = el("button", { type: "button", class: "main", onclick: () => this.again() }, label);
    this.setButtons(again, this.closeButton(close));
    this.submit = null;
    again.focus();
  }

  again() {
    this.result.replaceChildren();
    this.ask(...this.question);
    this.fields.querySelector("input, select")?.focus();
  }

  async attempt(act) {
    this.working = true;
    this.submit = null;
    for (const button of this.buttons.querySelectorAll("button")) button.disabled = true;
    try {
      await act();
    } catch (error) {
      if (!error.fields) console.error(error);
      this.show(problemView(error.fields ?? { problem: "The server does not answer", remedy: "Nothing more is known here. Look at the list of updates when it is back" }));
      this.back("Change it", "Close");
    } finally {
      this.working = false;
    }
  }

  busy(text, more = null) {
    this.fields.hidden = true;
    this.bar = el("progress", { "aria-label": text, hidden: true, max: 1 });
    this.result.replaceChildren(...[el("p", {}, text), this.bar, more].filter(Boolean));
  }

  progress(part) {
    if (!this.bar) return;
    this.bar.hidden = false;
    this.bar.value = part;
  }

  show(...nodes) {
    this.fields.hidden = true;
    this.result.replaceChildren(...nodes);
    this.working = false;
  }

  add(node) {
    this.result.append(node);
  }

  /** From here on the dialog may be closed, although something goes on. */
  closable() {
    this.working = false;
    this.setButtons(this.closeButton("Close, it goes on"));
  }

  done(node, good) {
    this.show(node);
    const close = this.closeButton("Close");
    this.setButtons(close);
    this.submit = () => this.close();
    close.focus();
    say(good ? "Done" : "It has ended");
  }

  closeButton(label) {
    return el("button", { type: "button", onclick: () => this.close() }, label);
  }

  setButtons(...buttons) {
    this.buttons.replaceChildren(...buttons);
  }
}

/** Why something was not done. */
export function problemView(error) {
  return el("div", { class: "note bad", role: "alert" }, el("p", {}, el("strong", {}, error.verdict ? error.message : error.problem)),
    pairs([["variable", error.variable], ["worker", error.worker], ["expected", error.expected], ["received", error.received], ["what to do", error.remedy]]));
}

/** What an update would do. */
export function examinationView(examined, trial = false) {
  const parts = examined.problems.map((problem) => problemView(problem));
  parts.push(...(examined.warnings ?? []).map((text) => el("div", { class: "note careful" }, text)));
  parts.push(...(examined.notes ?? []).map((text) => el("p", { class: "small" }, text)));
  const rows = examined.edits.slice(0, 50).map((edit) => el("tr", {},
    el("td", { class: "name" }, breakable(edit.variable)), el("td", { class: "keep" }, `${edit.operation.replaceAll("_", " ")}${edit.factor === null ? "" : ` ${number(edit.factor)}`}`),
    el("td", { class: "keep" }, shape(edit.shape)), el("td", { class: "right keep" }, edit.nbytes ? size(edit.nbytes) : ""),
    el("td", { class: "right keep" }, edit.values ? number(edit.values.size === 1 && edit.values.nonfinite === 0 ? edit.values.minimum : edit.values.norm) : "")));
  const head = ["variable", "operation", "shape", "size", "norm or value"].map((name, at) => el("th", { scope: "col", class: at > 2 ? "right" : "" }, name));
  if (rows.length) parts.push(el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows))));
  if (!examined.problems.length) {
    const nbytes = examined.edits.reduce((sum, edit) => sum + edit.nbytes, 0);
    parts.push(el("p", { class: "dim small" }, `${counted(examined.edits.length, "edit")}, ${size(nbytes)} of values. All checks have passed. ${trial ? "The update is tried first: the metrics of the job decide whether it stays. " : ""}If the job has a guard, the guard may still refuse it.`));
  }
  return el("div", { class: "stack" }, parts);
}

const STAGES = ["proposed", "prepared", "scheduled", "committed", "applied", "verified"];

/** How far an update is. */
export function stagesView(view) {
  const shown = STAGES.filter((stage) => stage !== "scheduled" || view.stage === "scheduled");
  const at = shown.indexOf(view.stage);
  return el("ol", { class: "stages" }, shown.map((stage, number_) => el("li", { class: number_ < at ? "done" : number_ === at ? "now" : "" }, stage)));
}

/** The end of an update: the receipt, or why there is none. */
export function receiptView(view) {
  if (view.stage === "refused") return problemView(view.refusal ?? { problem: "It was refused" });
  if (view.stage === "withdrawn") return el("div", { class: "note" }, "It was withdrawn: nothing has changed.");
  if (view.stage === "failed") return problemView({ problem: `It was applied at step ${count(view.step)}, and the replicas are not equal`, received: view.reason });
  const digests = Object.entries(view.digests ?? {});
  const reverted = view.stage === "reverted";
  return el("div", { class: `note ${reverted ? "careful" : "good"}`, id: "receipt" },
    el("p", {}, el("strong", {}, reverted ? `Reverted at step ${count(view.outcome?.step ?? view.step)}: all replicas are back at their state before it.` : `Verified at step ${count(view.step)}: all replicas are equal.`)),
    pairs([
      ["number", view.sequence ? String(view.sequence) : null], ["id", el("span", { class: "mono" }, view.id)], ["what", editsText(view)],
      ["digest", digests.length ? el("span", { class: "mono" }, `${digests[0][1]}, ${digests.length > 1 ? `the same on ${digests.length} workers` : "on the only worker"}`) : null],
      ["trial", view.outcome ? `${view.outcome.outcome}: ${view.outcome.reason}` : null],
      ["took", view.propose_to_applied_secs ? `${seconds(view.propose_to_applied_secs)}; training paused for ${seconds(view.stall_secs)}` : null],
    ]));
}
