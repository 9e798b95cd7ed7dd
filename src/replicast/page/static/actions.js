// What can be done to a run. Each action asks, shows where it stands, and ends with its receipt or the reason.

import { get, newId, post, Refused, upload } from "./api.js";
import { card, el } from "./dom.js";
import { Dialog, examinationView, field, receiptView, stagesView } from "./dialogs.js";
import { count, number, seconds } from "./format.js";
import { auditSentence } from "./history.js";
import { isFinal } from "./state.js";
import { numberFile } from "./tables.js";
import { askForToken, hasToken } from "./token.js";

const OPERATIONS = { "": "a saved update: the file says it", add: "add to the variables", assign: "replace the variables", scale: "multiply by numbers", blend: "move towards, by a weight", add_rows: "add to rows", assign_rows: "replace rows", add_low_rank: "add a product of low rank" };
const NAME = "replicast-author";

export class Actions {
  /** @param context {run, metrics(), changed(), status()} */
  constructor(base, context) {
    this.base = base;
    this.context = context;
    const button = (label, act, tone = "") => el("button", { type: "button", class: tone, onclick: act }, label);
    this.live = [
      button("Learning rate …", () => this.learningRate()), button("Upload an update …", () => this.upload()),
      button("Audit now …", () => this.audit()), button("Checkpoint now …", () => this.checkpoint()),
      button("Stop the job …", () => this.stop(), "danger"),
    ];
    this.locked = el("div", { class: "stack" },
      el("p", { class: "dim small" }, context.run.actions ? "Change the learning rate, upload an update, audit, save or stop. This needs the token of this server." : "Actions are off: this server was started without a token (--token-file)."),
      context.run.actions ? el("div", { class: "buttons" }, el("button", { type: "button", onclick: () => askForToken() }, "Enter the token …")) : null);
    this.open = el("div", { class: "actions" }, this.live);
    this.node = card("actions", "Actions", el("div", { class: "body" }, this.locked, this.open));
    this.show(null);
  }

  allowed() {
    return this.context.run.actions && hasToken();
  }

  show(status) {
    this.locked.hidden = this.allowed();
    this.open.hidden = !this.allowed();
    const running = status ? status.running : true;
    for (const button of this.live) button.disabled = !running;
  }

  author() {
    return field("author", "Your name", el("input", { id: "author", name: "author", maxLength: 200, value: sessionStorage.getItem(NAME) ?? "", autocomplete: "name" }), "Goes into the journal.");
  }

  note(text) {
    return field("note", "Why", el("input", { id: "note", name: "note", maxLength: 1000 }), text ?? "Readers of the journal see it.");
  }

  force() {
    return el("label", { class: "check", for: "force" }, el("input", { type: "checkbox", id: "force", name: "force" }), "Also if later updates have changed the same variables");
  }

  trial(checked) {
    const names = [...new Set(["loss", ...this.context.metrics()])];
    const box = el("input", { type: "checkbox", id: "trial", name: "trial", checked });
    const rows = el("div", { class: "row" },
      field("trial_steps", "for steps", el("input", { id: "trial_steps", name: "trial_steps", type: "number", min: 1, max: 1000000, value: 50, required: true })),
      field("trial_metric", "metric", el("select", { id: "trial_metric", name: "trial_metric" }, names.map((name) => el("option", { value: name }, name)))),
      field("trial_worse", "at most % worse", el("input", { id: "trial_worse", name: "trial_worse", type: "number", step: "any", value: 5, required: true })),
      field("trial_mode", "better is", el("select", { id: "trial_mode", name: "trial_mode" }, el("option", { value: "min" }, "smaller"), el("option", { value: "max" }, "larger"))));
    const toggle = () => { rows.hidden = !box.checked; for (const input of rows.querySelectorAll("input, select")) input.disabled = !box.checked; };
    box.addEventListener("change", toggle);
    toggle();
    return el("fieldset", {}, el("legend", {}, "Trial"), el("label", { class: "check", for: "trial" }, box, "Try it first, then keep or revert it on all workers"), rows);
  }

  /** A rate below 0 is that many times what the schedule computes (training/tensorflow_state.py): offered where there is one. */
  learningRate() {
    const id = newId(), { rate, hadSchedule } = this.context.rate(), hows = { value: "a constant rate", scale: "the schedule, scaled", schedule: "the schedule" };
    const value = el("input", { id: "value", name: "value", type: "number", step: "any", required: true, inputMode: "decimal" });
    value.addEventListener("input", () => value.setCustomValidity(Number(value.value) > 0 || !value.value ? "" : "Enter a number above 0."));
    const asked = field("value", "New learning rate", value, rate === undefined ? "Asking for the current one …" : `Now ${number(rate)}.`);
    const how = el("select", { id: "how", name: "how" }, Object.entries(hows).map(([name, text]) => el("option", { value: name }, text)));
    const choice = field("how", "Use", how);
    how.addEventListener("change", () => {
      asked.querySelector("label").textContent = how.value === "scale" ? "Factor of the schedule" : "New learning rate";
      asked.hidden = value.disabled = how.value === "schedule";
    });
    choice.hidden = !hadSchedule;
    const dialog = new Dialog("Change the learning rate", "All workers use it from the same step on.", [choice, asked, this.note(), this.author(), this.trial(false)]);
    get(`${this.base}/variables/learning_rate?timeout=60`).then(({ step, values }) => {
      const factor = Number(values);
      if (factor < 0) choice.hidden = false;
      const by = factor === -1 ? ", computed by a schedule" : factor < 0 ? `, ${number(-factor)} × what a schedule computes` : "";
      asked.querySelector(".hint").textContent = `Now ${number(factor < 0 ? rate ?? "unknown" : factor)}${by}, at step ${count(step)}.`;
    }).catch((error) => {
      if (rate === undefined) asked.querySelector(".hint").textContent = `The current one is not known: ${error.message}`;
    });
    const send = async (data, more) => {
      const names = (await get(`${this.base}/schema`)).variables.map((one) => one.name).filter((name) => name.endsWith("/learning_rate"));
      const variable = names.length === 1 ? names[0] : "learning_rate"; // By its full name, as the command line records it.
      const chosen = data.get("how"), factor = chosen === "schedule" ? 1 : Number(data.get("value"));
      if (chosen === "value") return post(`${this.base}/learning-rate`, { ...proposal(data), id, variable, value: factor, ...more });
      return upload(this.address(data, { operation: "assign", id, ...more }), numberFile(variable, -factor), (part) => dialog.progress(part));
    };
    this.propose(dialog, id, (data) => send(data, { dry_run: true }), (data) => send(data, {}));
  }

  upload() {
    const id = newId();
    const weight = field("weight", "Weight, from 0 to 1", el("input", { id: "weight", name: "weight", type: "number", min: 0, max: 1, step: "any", value: 0.1, required: true }));
    const operation = el("select", { id: "operation", name: "operation", onchange: showWeight }, Object.entries(OPERATIONS).map(([value, text]) => el("option", { value }, text)));
    function showWeight() { weight.hidden = operation.value !== "blend"; weight.querySelector("input").disabled = weight.hidden; }
    operation.value = "add";
    showWeight();
    const step = field("at_step", "At step", el("input", { id: "at_step", name: "at_step", type: "number", min: 0 }), "Empty: as soon as possible.");
    const dialog = new Dialog("Upload an update", "It is checked first; nothing changes before you have seen what it would do.", [
      field("file", "File (.safetensors)", el("input", { id: "file", name: "file", type: "file", required: true, accept: ".safetensors" })),
      field("operation", "What to do with its tensors", operation), weight, this.note(), el("div", { class: "row" }, this.author(), step), this.trial(true),
    ]);
    const send = (data, more) => {
      const named = data.get("operation") ? { operation: data.get("operation"), id, ...(data.get("operation") === "blend" ? { weight: data.get("weight") } : {}) } : {};
      const address = this.address(data, { ...named, ...(data.get("at_step") ? { at_step: data.get("at_step") } : {}), ...more });
      return upload(address, data.get("file"), (part) => dialog.progress(part));
    };
    this.propose(dialog, id, (data) => send(data, { dry_run: "1" }), (data) => send(data, {}));
  }

  /** Where a file with an update is sent. */
  address(data, more) {
    return `${this.base}/updates?${new URLSearchParams({ ...proposal(data), ...more })}`;
  }

  /** Dry run, question, push, stages, receipt; then `ended`, with the update as it is. */
  propose(dialog, id, examine, push, ended) {
    dialog.ask("Check", async (data) => {
      dialog.busy("Checking what it would do …");
      const examined = await examine(data);
      dialog.show(examinationView(examined, data.get("trial")));
      if (examined.problems.length) dialog.back("Change it", "Close");
      else dialog.confirm("Push to all workers", async () => this.pushed(dialog, await push(data), ended));
    });
  }

  async pushed(dialog, { id, number, warning }, ended) {
    if (number) dialog.add(el("div", { class: "note careful" }, `It is in the journal already, as number ${number}: nothing was pushed.`));
    if (warning) dialog.add(el("div", { class: "note careful" }, warning));
    dialog.closable();
    this.context.changed();
    const began = Date.now();
    for (let last = ""; ;) {
      let view = null;
      try {
        view = await get(`${this.base}/updates/${encodeURIComponent(id)}/stage?thoroughly=${Date.now() - began > 10_000 ? 1 : 0}`);
      } catch (error) {
        if (error instanceof Refused && error.status !== 503) throw error;
        dialog.busy("The server does not answer; trying again …");
      }
      if (view && view.stage !== last) {
        last = view.stage;
        dialog.busy(view.waits_for ? `It is ${view.stage}, and waits for ${view.waits_for}.` : `It is ${view.stage}.`, stagesView(view));
      }
      if (view && isFinal(view.stage)) {
        const whole = await get(`${this.base}/updates/${encodeURIComponent(id)}`).catch(() => view);
        dialog.done(receiptView({ ...whole, stage: view.stage }), view.stage === "verified");
        this.context.changed();
        ended?.(view);
        return;
      }
      if (!dialog.isOpen()) return;
      await new Promise((resolve) => setTimeout(resolve, 500));
    }
  }

  withdraw(view) {
    const dialog = new Dialog("Withdraw this update?", "It is not committed yet. It will not be applied, on any worker.", []);
    dialog.ask("Withdraw it", async () => {
      dialog.busy("Asking the job …");
      await post(`${this.base}/updates/${encodeURIComponent(view.id)}/withdraw`);
      dialog.done(el("div", { class: "note good" }, "Withdrawn: it will not be applied."), true);
      this.context.changed();
    }, "danger");
  }

  revert(view) {
    const dialog = new Dialog(`Revert update ${view.sequence}?`, "A new update undoes it, on every worker at the same step. What that means for each variable is shown first.", [this.note(), this.author(), this.force()]);
    const path = `${this.base}/updates/${encodeURIComponent(view.id)}/revert`;
    const body = (data) => ({ note: data.get("note"), force: Boolean(data.get("force")), ...author(data) });
    dialog.ask("Check", async (data) => {
      dialog.busy("Checking what it would do …");
      const examined = await post(path, { ...body(data), dry_run: true });
      dialog.show(examinationView(examined));
      if (examined.problems.length) dialog.back("Change it", "Close");
      else dialog.confirm("Revert on all workers", async () => this.pushed(dialog, await post(path, body(data))));
    });
  }

  audit() {
    this.waitFor("Audit now?", "All workers compare their replicas, bit for bit, at the next step.", "Audit", "audit",
      (report) => el("div", { class: `note ${report.equal ? "good" : "bad"}` }, `Audit ${report.number} at step ${count(report.step)}: ${auditSentence(report)}. It took ${seconds(report.digest_secs)}.`));
  }

  checkpoint() {
    this.waitFor("Save a checkpoint now?", "The whole state of the next step is written in the background.", "Save it", "checkpoint",
      (saved) => el("div", { class: "note good" }, `The checkpoint of step ${count(saved.step)} is complete.`));
  }

  stop() {
    this.waitFor("Stop the job?", "All workers save a checkpoint together and exit. Started again, the job goes on from there.", "Save and stop", "stop",
      (left) => el("div", { class: "note good" }, `The job has saved step ${count(left.step)} and has ended.`), "danger");
  }

  waitFor(title, text, label, path, receipt, tone = "main") {
    const dialog = new Dialog(title, text, [this.author()]);
    dialog.ask(label, async (data) => {
      dialog.busy("The job was asked. It answers at its next step …");
      const answer = await post(`${this.base}/${path}`, { timeout: 120, ...author(data) });
      dialog.done(receipt(answer), true);
      this.context.changed();
    }, tone);
  }
}

/** The name that was given, which the next dialog offers again. */
function author(data) {
  const name = data.get("author") ?? "";
  sessionStorage.setItem(NAME, name);
  return name ? { author: name } : {};
}

function proposal(data) {
  const chosen = data.get("trial") ? { trial_steps: Number(data.get("trial_steps")), trial_metric: data.get("trial_metric"), trial_max_increase: Number(data.get("trial_worse")) / 100, trial_mode: data.get("trial_mode") } : {};
  return { ...(data.get("note") ? { note: data.get("note") } : {}), ...author(data), ...chosen };
}

