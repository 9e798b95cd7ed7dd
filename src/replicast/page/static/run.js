// One run: the first line, the chart, workers, updates, audits, checkpoints, logs; kept up to date by events.

import { Actions } from "./actions.js";
import { follow, get } from "./api.js";
import { Chart, pictureIsThere } from "./chart.js";
import { byId, card, el, setText, unlessPressed } from "./dom.js";
import { count, duration, editsText, number, plain, seconds, setServerTime } from "./format.js";
import { Audits, Checkpoints } from "./history.js";
import { banner, link } from "./link.js";
import { Logs } from "./logs.js";
import { editNote, noteView } from "./notes.js";
import { report, reportCards } from "./report.js";
import { Rows } from "./rows.js";
import { Starts } from "./starts.js";
import { stateChip } from "./state.js";
import { askForToken, hasToken, onToken, showTokenButton } from "./token.js";
import { addressOf, UpdatePage, verdict } from "./update.js";
import { Updates } from "./updates.js";
import { Workers } from "./workers.js";

const MORE = 50; // Updates at first, and with each click; the server lists 1,000.
const MOST = 1000;
const POINTS = 1200; // Of a series: about as many as a chart has pixels.
const SLOW_MS = 15_000; // How often what is not in the events is read again in any case.

export async function showRun(run) {
  const base = `api/runs/${encodeURIComponent(run.name)}`;
  const page = new RunPage(run, base);
  page.build();
  onToken(() => page.render());
  if (report) {
    await page.reload();
    page.event("status", report.status);
    page.route();
    link.report();
    return;
  }
  page.readSample(); // The first picture waits for nothing else.
  page.route();
  setInterval(() => page.status && !document.hidden && page.render(), 5000);
  setInterval(() => !document.hidden && page.refresh(), SLOW_MS);
  for (;;) {
    await follow(`${base}/events`, {
      open: () => { link.live(); page.reload(); },
      lost: () => { link.lost(); page.chart.position &&= 0; }, // A server that comes back counts anew.
      denied: () => link.lost(),
      event: (name, data) => page.event(name, data),
    });
    await askForToken("This server shows its runs to those who have its token.");
  }
}

class RunPage {
  constructor(run, base) {
    this.render = unlessPressed(() => this.draw());
    this.run = run;
    this.base = base;
    this.status = null;
    this.applied = [];
    this.known = new Map(); // All updates that were listed once, for the marks of the chart.
    this.most = MORE;
    this.audits = [];
    this.checkpoints = [];
    this.seen = {};
  }

  build() {
    showTokenButton();
    setText(byId("run-name"), this.run.name);
    byId("token-button").hidden = !this.run.actions && !hasToken();
    this.chart = new Chart((start, end) => get(`${this.base}/metrics?points=${POINTS}&start=${start}&end=${end}`));
    this.workers = new Workers();
    this.auditList = new Audits();
    this.checkpointList = new Checkpoints();
    this.startList = new Starts();
    this.logs = new Logs(this.base);
    this.actions = new Actions(this.base, { run: this.run, metrics: () => this.chart.names().filter((name) => !this.status?.metrics?.running?.includes(name)), rate: () => this.rate(), changed: () => this.refresh(), status: () => this.status });
    this.rows = new Rows(this.base, this.actions);
    this.updates = new Updates({
      allowed: () => this.actions.allowed(),
      withdraw: (view) => this.actions.withdraw(view),
      revert: (view) => this.actions.revert(view),
      more: () => { this.most += MORE; this.refresh(); },
    });
    this.updatePage = new UpdatePage(this.base, {
      allowed: () => this.actions.allowed(),
      withdraw: (view) => this.actions.withdraw(view),
      revert: (view) => this.actions.revert(view),
      locate: (view) => this.locate(view),
      annotate: (view) => editNote(this.base, `Note and tags of update ${view.sequence ?? view.id}`, view.annotation, view.id, this.actions.author(), () => this.refresh()),
    });
    this.chip = el("span");
    this.sentence = el("h1", { id: "sentence", "aria-live": "polite" }, this.run.sentence);
    this.noted = el("div", { class: "hero-line" });
    this.failure = el("pre", { class: "failure", id: "failure", tabIndex: 0, hidden: true, "aria-label": "Last lines of the worker that failed" });
    this.facts = Object.fromEntries(["step", "epoch", "time left", "loss", "learning rate", "replicas", "last update"].map((name) => [name, el("dd", {}, "–")]));
    this.factList = el("dl", { class: "facts" }, Object.entries(this.facts).map(([name, node]) => el("div", {}, el("dt", {}, name), node)));
    this.done = el("progress", { class: "done", hidden: true, max: 1, "aria-label": "Part of the training that is done" });
    const metrics = card("metrics", "Charts", this.chart.controls, el("div", { class: "body" }, this.chart.node), this.chart.key);
    this.columns = el("div", { class: "columns" },
        el("div", { class: "stack" }, metrics, this.updates.node, report ? reportCards() : [this.rows.node, this.logs.node]),
        el("div", { class: "stack" }, this.workers.node, report ? null : this.actions.node, this.auditList.node, this.checkpointList.node, this.startList.node));
    byId("main").replaceChildren(
      el("div", { class: "hero" }, el("div", { class: "hero-line" }, this.chip, this.sentence), this.noted, this.failure, this.factList, this.done),
      this.updatePage.node, this.columns);
    addEventListener("hashchange", () => this.route());
  }

  /** Shows what the address names: #/updates/ID, #/logs/ATTEMPT/WORKER, #/checkpoints, or the whole run. */
  route() {
    const [, place, ...parts] = location.hash.split("/").map(decoded);
    const id = place === "updates" && parts[0] ? parts[0] : null;
    const was = this.updatePage.id;
    this.columns.hidden = this.factList.hidden = id !== null;
    this.updatePage.open(id).then(() => id !== null && id !== was && byId("update-title")?.focus());
    if (id !== null) { if (id !== was) scrollTo(0, 0); return; }
    if (was !== null) this.chart.resized();
    if (place === "logs" && !report) this.logs.show(...parts);
    else if (place === "checkpoints") this.checkpointList.node.scrollIntoView();
  }

  /** Shows the part of the charts around an update. */
  async locate(view) {
    location.hash = "#/";
    this.route();
    const around = view.around ? 4 * (view.around.before.steps + view.around.after.steps) : 200;
    await this.chart.resized();
    await this.chart.look(view.step, around);
    this.chart.node.scrollIntoView({ block: "center" });
  }

  /** Called when the stream is open again: everything may have changed. */
  async reload() {
    this.seen = {};
    await Promise.all([this.readMetrics(), this.refresh()]);
  }

  /** Shows a part of a long file until all of it is read, which takes the server seconds. */
  readSample() {
    return quietly(async () => {
      const found = await get(`${this.base}/metrics?points=${POINTS}&sample=true`);
      if (this.chart.position === null) this.chart.setAll(found);
    });
  }

  async readMetrics() {
    await Promise.all([
      quietly(async () => this.chart.setAll(await get(`${this.base}/metrics?points=${POINTS}`))),
      quietly(async () => this.chart.setWorkers(await get(`${this.base}/metrics?of=workers&points=400`))),
    ]);
  }

  /** Reads the updates that are listed; the first time, when there are more, also those that the charts mark. */
  async readUpdates() {
    this.applied = (await get(`${this.base}/updates?last=${this.most}`)).updates;
    const all = Math.max(0, ...this.applied.map((view) => view.sequence)); // They are numbered from 1.
    for (const view of this.applied) this.known.set(view.id, view);
    if (all <= this.applied.length || this.known.size >= Math.min(all, MOST)) return;
    if (this.status) this.render(); // What is listed does not wait for what is marked.
    for (const view of (await get(`${this.base}/updates?last=${MOST}`)).updates) this.known.set(view.id, view);
  }

  /** Reads what is not in the events; and the metrics, if the last of them came between what was read and the first event. */
  async refresh() {
    const { position } = this.chart;
    const isBehind = this.status?.metrics && position === this.position && this.status.metrics.step > (this.chart.main()?.steps.at(-1) ?? -1);
    this.position = position;
    await Promise.all([
      isBehind ? this.readMetrics() : null,
      quietly(() => this.readUpdates()),
      quietly(() => this.updatePage.read()),
      quietly(async () => { this.audits = (await get(`${this.base}/audits?last=20`)).audits; }),
      quietly(async () => { this.checkpoints = (await get(`${this.base}/checkpoints`)).checkpoints; }),
    ]);
    if (this.status) this.render();
  }

  event(name, data) {
    if (name === "metrics") {
      if (!this.chart.add(data)) this.readMetrics();
      return;
    }
    this.status = { ...(this.status ?? {}), ...data };
    if (data.time) setServerTime(data.time);
    if (data.workers) this.chart.addNotes(data.workers);
    const lists = { updates: data.updates, audit: data.audit, refused: data.refused, attempt: data.attempt };
    if (Object.values(lists).some((part) => part !== undefined)) this.refresh();
    this.render();
  }

  draw() {
    const status = this.status;
    if (!status) return;
    banner("unreadable", status.unreadable ? `The run cannot be read: ${status.unreadable.message ?? status.unreadable.problem}` : "", true);
    if (!status.workers) return;
    banner("journal", status.problem ?? "");
    banner("job", jobBanner(status), status.state !== "failed");
    this.head(status);
    this.workers.show(status);
    this.updates.show(status, this.applied);
    this.auditList.show(this.audits, status.running);
    this.checkpointList.show(this.checkpoints, status.running);
    this.logs.setJob(status.size, status.attempt);
    this.actions.show(status);
    this.rows.show(status);
    this.startList.show(status.starts);
    this.showNote(status.annotation);
    this.chart.setEvaluations(status.evaluations ?? []);
    const all = Math.max(0, ...[...this.known.values()].map((view) => view.sequence));
    pictureIsThere();
    this.chart.setMarks(this.marks(), all > this.known.size ? `the last ${count(this.known.size)} of ${count(all)} updates` : "");
  }

  head(status) {
    if (this.chip.textContent !== status.state) this.chip.replaceChildren(stateChip(status.state, true));
    setText(this.sentence, capital(status.sentence));
    const lines = status.state === "failed" ? (status.changes ?? []).at(-1)?.last_lines ?? [] : [];
    this.failure.hidden = lines.length === 0;
    setText(this.failure, lines.join("\n"));
    setText(this.facts.step, count(status.step));
    const first = status.workers.find((note) => note.rank === 0) ?? {};
    setText(this.facts.epoch, epochText(first, status.running ? null : this.checkpoints.at(-1), status.step));
    setText(this.facts["time left"], timeLeft(status, first));
    this.lastMetric(status.metrics?.values ?? {});
    const left = first.steps_left;
    this.done.hidden = !status.running || !left;
    if (left) this.done.value = status.step / (status.step + left);
    setText(this.facts.replicas, equality(status));
    this.lastUpdate(status);
    document.title = `${status.running ? `step ${count(status.step)}` : status.state} · ${this.run.name}`;
  }

  showNote(annotation) {
    const allowed = this.actions.allowed(), text = JSON.stringify([annotation, allowed]);
    if (this.noted.dataset.text === text) return;
    this.noted.dataset.text = text;
    const edit = () => editNote(this.base, "Note and tags of this run", this.status.annotation, null, this.actions.author(), () => this.refresh());
    this.noted.replaceChildren(...[noteView(annotation), allowed ? el("button", { type: "button", class: "quiet tiny", onclick: edit }, annotation.time ? "Edit note …" : "Add a note …") : null].filter(Boolean));
  }

  /** The learning rate as the workers last wrote it, and whether an update has replaced or scaled a schedule. */
  rate() {
    const texts = [...this.known.values()].flatMap((view) => view.texts ?? []);
    return { rate: this.status?.metrics?.values.learning_rate ?? this.chart.last("learning_rate"), hadSchedule: texts.some((text) => /\/learning_rate .*the schedule/.test(text)) };
  }

  /** The loss, or else the first metric, as the workers last wrote it. */
  lastMetric({ learning_rate: _, ...values }) {
    const name = Object.keys(values).sort((a, b) => Number(b === "loss") - Number(a === "loss"))[0];
    const node = this.facts.loss, known = this.rate().rate;
    setText(node.previousElementSibling, name ?? "loss");
    setText(node, name ? number(values[name]) : "–");
    setText(this.facts["learning rate"], known === undefined ? "–" : number(known));
  }

  /** "#3 at step 1,200: assign optimizer/learning_rate 0.001 → 0.0005", and what that did. */
  lastUpdate(status) {
    const view = status.updates.at(-1), node = this.facts["last update"];
    const text = JSON.stringify(view ?? status.running);
    if (node.dataset.text === text) return;
    node.dataset.text = text;
    if (!view) { setText(node, status.running ? "none yet" : "none"); return; }
    node.replaceChildren(
      el("a", { href: addressOf(view) }, `#${view.sequence} at step ${count(view.step)}${view.texts?.length ? `: ${editsText(view, 1)}` : ""}`), " ",
      el("small", {}, done(view)));
  }

  marks() {
    const who = (view) => [view.author, view.note].filter(Boolean).join(": ");
    const said = (view) => [`update ${view.sequence} at step ${count(view.step)}`, editsText(view, 1), who(view), view.outcome ? `trial ${view.outcome.outcome}` : ""].filter(Boolean).join(" · ");
    const marks = [
      ...[...this.known.values()].map((view) => ({ key: view.id, kind: view.trial ? "trial" : "update", step: view.step, ended: view.outcome?.outcome === "reverted" ? view.outcome.step : null, text: said(view), href: addressOf(view) })),
      ...this.status.starts.slice(1).map((one) => ({ key: `attempt ${one.attempt}`, time: one.at, href: report ? "#changes" : `#/logs/${Math.max(0, one.attempt - 1)}`, ...restartMark(this.status, one) })),
      ...this.checkpoints.map((one) => ({ key: `step ${one.step}`, kind: "checkpoint", step: one.step, time: one.created_at, text: `checkpoint of step ${count(one.step)}`, href: "#/checkpoints" })),
    ];
    return marks.map((mark) => ({ ...mark, text: plain(mark.text) }));
  }
}

/** What an update did, as far as that is known. */
function done(view) {
  if (view.outcome) return `trial ${view.outcome.outcome}: ${view.outcome.reason}`;
  if (view.reverted_by) return `reverted by update ${view.reverted_by}`;
  if (view.around) return `${view.around.metric} ${number(view.around.before.mean)} → ${number(view.around.after.mean)}, ${verdict(view.around.before, view.around.after)}`;
  return view.stage === "verified" ? `verified on all workers${view.stall_secs ? `; training paused for ${seconds(view.stall_secs)}` : ""}` : view.stage;
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

const capital = (text) => (text ? text[0].toUpperCase() + text.slice(1) : "");

/** The epoch that worker 0 is in; of a job that has ended, that of its last checkpoint. */
function epochText({ epoch, epochs }, saved, step) {
  if (Number.isInteger(epoch)) return `${count(epoch + 1)}${epochs ? ` of ${count(epochs)}` : ""}`;
  if (!saved) return "–";
  return `${count(saved.batch || !saved.epoch ? saved.epoch + 1 : saved.epoch)}${saved.step === step ? "" : ` at step ${count(saved.step)}`}`;
}

function timeLeft(status, first) {
  if (!status.running || !first.steps_left || !first.step_secs) return "–";
  return `about ${duration(first.steps_left * first.step_secs)}`;
}

function equality(status) {
  const audit = status.audit;
  if (!audit) return status.running ? "not compared yet" : "never compared";
  if (audit.equal) return `equal as of step ${count(audit.step)}`;
  if (audit.outcome === "healed") return `equal again since step ${count(audit.step)}`;
  return `differ since step ${count(audit.found_at)}`;
}

/** An attempt after the first: the launcher has restarted the job, or somebody has started it again. */
function restartMark(status, restart) {
  const changes = (status.changes ?? []).filter((one) => one.attempt === restart.attempt);
  const change = changes.find((one) => one.state === "restarting");
  if (!change && changes.some((one) => one.state === "starting")) return { kind: "start", text: `started again by hand: attempt ${restart.attempt}` };
  return { kind: "restart", text: `restarted: attempt ${restart.attempt}${change?.reason ? `, ${change.reason}` : ""}` };
}

/** What to say at the top when the job is gone. */
function jobBanner(status) {
  if (status.state === "failed") return "The job has failed.";
  if (report) return "";
  if (status.state === "lost") return "The job is lost: no worker has reported lately. This page follows it again when it is restarted.";
  return "";
}

/** Reads something; what goes wrong shows in the stream, which is the one to tell. */
async function quietly(read) {
  try {
    await read();
  } catch (error) {
    if (!(error.status === 0 || error.status || error.name === "TypeError" || error.name === "TimeoutError")) throw error;
  }
}
