// One run: the first line, the chart, workers, updates, audits, checkpoints, logs; kept up to date by events.

import { Actions } from "./actions.js";
import { follow, get } from "./api.js";
import { Chart } from "./chart.js";
import { byId, card, el, setText, unlessPressed } from "./dom.js";
import { count, duration, editsText, number, plain, setServerTime } from "./format.js";
import { Audits, Checkpoints } from "./history.js";
import { banner, link } from "./link.js";
import { Logs } from "./logs.js";
import { report, reportCards } from "./report.js";
import { stateChip } from "./state.js";
import { askForToken, hasToken, onToken, showTokenButton } from "./token.js";
import { Updates } from "./updates.js";
import { Workers } from "./workers.js";

const MORE = 200; // Updates at first, and with each click; the server lists 1,000.
const SLOW_MS = 15_000; // How often what is not in the events is read again in any case.

export async function showRun(run) {
  const base = `api/runs/${encodeURIComponent(run.name)}`;
  const page = new RunPage(run, base);
  page.build();
  onToken(() => page.render());
  await page.refresh();
  if (report) {
    await page.readMetrics();
    page.event("status", report.status);
    link.report();
    return;
  }
  setInterval(() => page.status && !document.hidden && page.render(), 5000);
  setInterval(() => !document.hidden && page.refresh(), SLOW_MS);
  for (;;) {
    await follow(`${base}/events`, {
      open: () => { link.live(); page.reload(); },
      lost: () => link.lost(),
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
    this.most = MORE;
    this.audits = [];
    this.checkpoints = [];
    this.seen = {};
  }

  build() {
    showTokenButton();
    setText(byId("run-name"), this.run.name);
    byId("token-button").hidden = !this.run.actions && !hasToken();
    this.chart = new Chart();
    this.workers = new Workers();
    this.auditList = new Audits();
    this.checkpointList = new Checkpoints();
    this.logs = new Logs(this.base);
    this.actions = new Actions(this.base, { run: this.run, metrics: () => this.chart.names().filter((name) => !name.startsWith("evaluator ")), changed: () => this.refresh(), status: () => this.status });
    this.updates = new Updates({
      allowed: () => this.actions.allowed(),
      withdraw: (view) => this.actions.withdraw(view),
      revert: (view) => this.actions.revert(view),
      more: () => { this.most += MORE; this.refresh(); },
    });
    this.chip = el("span");
    this.sentence = el("h1", { id: "sentence", "aria-live": "polite" }, this.run.sentence);
    this.failure = el("pre", { class: "failure", id: "failure", tabIndex: 0, hidden: true, "aria-label": "Last lines of the worker that failed" });
    this.facts = Object.fromEntries(["step", "epoch", "time left", "loss", "replicas", "last update"].map((name) => [name, el("dd", {}, "–")]));
    const facts = el("dl", { class: "facts" }, Object.entries(this.facts).map(([name, node]) => el("div", {}, el("dt", {}, name), node)));
    const metrics = card("metrics", "Metrics", this.chart.controls, el("div", { class: "body" }, this.chart.plot), this.chart.key);
    byId("main").replaceChildren(
      el("div", { class: "hero" }, el("div", { class: "hero-line" }, this.chip, this.sentence), this.failure, facts),
      el("div", { class: "columns" },
        el("div", { class: "stack" }, metrics, this.updates.node, report ? reportCards() : this.logs.node),
        el("div", { class: "stack" }, this.workers.node, report ? null : this.actions.node, this.auditList.node, this.checkpointList.node)));
  }

  /** Called when the stream is open again: everything may have changed. */
  async reload() {
    this.seen = {};
    await Promise.all([this.readMetrics(), this.refresh()]);
  }

  async readMetrics() {
    await quietly(async () => this.chart.setAll(await get(`${this.base}/metrics?points=2000`)));
  }

  /** Reads what is not in the events. */
  async refresh() {
    await Promise.all([
      quietly(async () => { this.applied = (await get(`${this.base}/updates?last=${this.most}`)).updates; }),
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
    this.logs.setSize(status.size);
    this.actions.show(status);
    this.chart.setEvaluations(status.evaluations ?? []);
    this.chart.setMarks(this.marks());
  }

  head(status) {
    if (this.chip.textContent !== status.state) this.chip.replaceChildren(stateChip(status.state, true));
    setText(this.sentence, capital(status.sentence));
    const lines = status.state === "failed" ? (status.changes ?? []).at(-1)?.last_lines ?? [] : [];
    this.failure.hidden = lines.length === 0;
    setText(this.failure, lines.join("\n"));
    setText(this.facts.step, count(status.step));
    const first = status.workers.find((note) => note.rank === 0) ?? {};
    setText(this.facts.epoch, first.epoch === null || first.epoch === undefined ? "–" : `${first.epoch + 1}${first.epochs ? ` of ${first.epochs}` : ""}`);
    setText(this.facts["time left"], timeLeft(status, first));
    this.lastMetric(status.metrics);
    setText(this.facts.replicas, equality(status));
    setText(this.facts["last update"], lastUpdate(status));
    document.title = `${status.running ? `step ${count(status.step)}` : status.state} · ${this.run.name}`;
  }

  /** The loss, or else the first metric, as the workers last wrote it. */
  lastMetric(metrics) {
    const name = Object.keys(metrics?.values ?? {}).sort((a, b) => Number(b === "loss") - Number(a === "loss"))[0];
    const node = this.facts.loss;
    setText(node.previousElementSibling, name ?? "loss");
    setText(node, name ? number(metrics.values[name]) : "–");
  }

  marks() {
    const who = (view) => [view.author, view.note].filter(Boolean).join(": ");
    const marks = [
      ...this.applied.map((view) => ({ kind: view.trial ? "trial" : "update", step: view.step, text: `update ${view.sequence}${who(view) ? `, ${who(view)}` : ""}${view.outcome ? `, ${view.outcome.outcome}` : ""}` })),
      ...this.status.starts.slice(1).map((one) => ({ ...restartMark(this.status, one), step: this.chart.stepAfter(one.at) })),
      ...this.checkpoints.map((one) => ({ kind: "checkpoint", step: one.step, text: `checkpoint of step ${count(one.step)}` })),
    ];
    return marks.map((mark) => ({ ...mark, text: plain(mark.text) }));
  }
}

const capital = (text) => (text ? text[0].toUpperCase() + text.slice(1) : "");

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

/** "#3 at step 1,200: assign optimizer/learning_rate 0.001 → 0.0005". */
function lastUpdate(status) {
  const view = status.updates.at(-1);
  if (!view) return status.running ? "none yet" : "none";
  return `#${view.sequence} at step ${count(view.step)}${view.texts?.length ? `: ${editsText(view, 1)}` : ""}`;
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
