// Several runs side by side: their metrics in one chart, with their updates as marks, and in what their starts differ.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { card, el, setText } from "./dom.js";
import { count, duration, editsText, number, plain } from "./format.js";
import { startFacts } from "./starts.js";

const POINTS = 1200, UPDATES = 200;
const EVERY_MS = 5000;

/** A chart in which each line is a run. Times are those since the run began, so that runs of different days lie on each other. */
class RunsChart extends Chart {
  setRuns(runs) {
    this.runs = runs;
    const first = runs.find((run) => run.series.size);
    const wait = this.plot.querySelector(".wait");
    if (wait) setText(wait, !first && runs.every((run) => run.read) ? "No metrics yet" : "Loading …");
    this.training = first?.series ?? new Map();
    if (runs.some((run) => run.read)) this.position = 0; // There is something to draw.
    this.marks.set(runs.flatMap((run) => run.marks));
    this.soon();
  }

  panels() {
    const found = new Map();
    const all = this.runs.flatMap((run, place) => [...run.series].map(([name, one]) => ({ run, place, name, one })));
    const isLoss = (name) => /loss/i.test(name);
    for (const { run, place, name, one } of all.sort((a, b) => Number(isLoss(b.name)) - Number(isLoss(a.name)))) {
      const title = isLoss(name) ? "loss" : name.replace(/^val_/, "").replace("_", " ");
      const panel = found.get(title) ?? { title, kind: isLoss(name) ? "loss" : "metric", lines: [] };
      const isOwn = name === "loss" || !isLoss(name) && !name.startsWith("val_");
      panel.lines.push({ name: isOwn ? run.name : `${run.name} ${name}`, one: { ...one, run: run.name }, place, smooth: isOwn && name !== "learning_rate", dash: name.startsWith("val_") ? "dot" : "solid" });
      found.set(title, panel);
    }
    const panels = [...found.values()].slice(0, 6);
    this.choose(panels.map((panel) => panel.title));
    const shown = panels.filter((panel) => !this.hidden.has(panel.title));
    return shown.length ? shown : panels.slice(0, 1);
  }

  /** Without means, so that a zoom does not read one run again in more detail than the others. */
  main() {
    const one = super.main();
    return one && { ...one, means: undefined };
  }

  line(panel, line, at) {
    return super.line(panel, line, at, line.place);
  }

  x(step, time) {
    return this.axis.value === "time" ? time / 60 : step;
  }

  layout(panels) {
    const layout = super.layout(panels);
    if (this.axis.value !== "time") return layout;
    const axis = { ...layout.xaxis, type: "linear", title: { ...layout.xaxis.title, text: "minutes since the run began" }, hoverformat: ".1f" };
    return { ...layout, xaxis: axis };
  }
}

export class Comparison {
  constructor() {
    this.known = new Map();
    this.chart = new RunsChart();
    this.chart.setRuns([]);
    this.legend = el("ul", { class: "compared" });
    this.differs = el("input", { type: "checkbox", checked: true, onchange: () => this.showStarts() });
    this.starts = el("div", { class: "scroll" });
    this.node = card("comparison", "Compared", this.legend, this.chart.controls, el("div", { class: "body" }, this.chart.node), this.chart.key,
      el("div", { class: "body stack" }, el("div", { class: "hero-line" }, el("h3", {}, "What was started"), el("label", { class: "check small" }, this.differs, "Only what differs")), this.starts));
    this.node.hidden = true;
    setInterval(() => !document.hidden && this.read(), EVERY_MS);
  }

  /** @param runs as the list has them; `leave` is called with the name of one that is taken out. */
  show(runs, leave) {
    const names = runs.map((run) => run.name).join("/");
    this.runs = runs;
    this.node.hidden = runs.length === 0;
    if (this.names === names) return;
    this.names = names;
    this.legend.replaceChildren(...runs.map((run, at) => el("li", { class: `series-${(at % 6) + 1}` }, el("span", { class: "swatch", "aria-hidden": "true" }), el("a", { href: encodeURIComponent(run.name) }, run.name),
      el("button", { type: "button", class: "quiet tiny", "aria-label": `Do not compare ${run.name}`, onclick: () => leave(run.name) }, "×"))));
    this.draw();
    this.read();
  }

  /** Reads what is not known yet, or has gone on. */
  async read() {
    if (this.reading || !this.runs?.length) return;
    this.reading = true;
    try {
      const old = this.runs.filter((run) => this.known.get(run.name)?.step !== run.step || !this.known.get(run.name)?.read);
      await Promise.all(old.map((run) => this.readOne(run)));
      if (old.length) this.draw();
    } finally {
      this.reading = false;
      if (this.runs.some((run) => !this.known.has(run.name))) this.read();
    }
  }

  async readOne(run) {
    const base = `api/runs/${encodeURIComponent(run.name)}`;
    try {
      const [metrics, status, { updates }] = await Promise.all([get(`${base}/metrics?points=${POINTS}`), get(`${base}/status`), get(`${base}/updates?last=${UPDATES}`)]);
      const began = run.began_at ?? status.starts[0]?.at ?? 0;
      const series = Object.entries(metrics.series).map(([name, one]) => [name, { ...one, times: one.times.map((time) => time - began) }]);
      this.known.set(run.name, { name: run.name, read: true, step: run.step, series: new Map(series), marks: updates.map((view) => mark(run, view, began)).filter((one) => one.time !== null), status, updates });
    } catch (error) {
      this.known.set(run.name, { ...empty(run), ...this.known.get(run.name), problem: error.message });
    }
  }

  draw() {
    this.chart.setRuns(this.runs.map((run) => this.known.get(run.name) ?? empty(run)));
    this.showStarts();
  }

  /** One column for each run, one line for each thing that was started with, or came of it. */
  showStarts() {
    const columns = this.runs.map((run) => factsOf(run, this.known.get(run.name)));
    const names = [...new Set(columns.flatMap((one) => [...one.keys()]))];
    const differ = (name) => new Set(columns.map((one) => one.get(name) ?? "")).size > 1;
    const listed = this.differs.checked && this.runs.length > 1 ? names.filter(differ) : names;
    const head = el("tr", {}, el("th", { scope: "col" }, el("span", { class: "visually-hidden" }, "what")), this.runs.map((run, at) => el("th", { scope: "col", class: `series-${(at % 6) + 1}` }, el("span", { class: "swatch", "aria-hidden": "true" }), run.name)));
    const lines = listed.map((name) => el("tr", {}, el("th", { scope: "row" }, name), columns.map((one) => el("td", {}, one.get(name) ?? "–"))));
    this.starts.replaceChildren(lines.length ? el("table", { class: "starts" }, el("thead", {}, head), el("tbody", {}, lines)) : el("p", { class: "dim small" }, "They were started in the same way."));
  }
}

const empty = (run) => ({ name: run.name, read: false, step: null, series: new Map(), marks: [], updates: [] });

function mark(run, view, began) {
  const at = view.committed_at ?? view.verified_at;
  const text = [`${run.name}: update ${view.sequence} at step ${count(view.step)}`, editsText(view, 1), [view.author, view.note].filter(Boolean).join(": "), view.outcome ? `trial ${view.outcome.outcome}` : ""].filter(Boolean).join(" · ");
  return { key: `${run.name} ${view.id}`, run: run.name, kind: view.trial ? "trial" : "update", step: view.step, ended: view.outcome?.outcome === "reverted" ? view.outcome.step : null, time: at ? at - began : null, text: plain(text), href: `${encodeURIComponent(run.name)}#/updates/${encodeURIComponent(view.id)}` };
}

function factsOf(run, known) {
  const start = known?.status?.starts.at(-1);
  const facts = new Map(start ? startFacts(start) : []);
  for (const [name, value] of Object.entries(run.metrics?.values ?? {})) facts.set(`last ${name}`, number(value));
  facts.set("state", run.state);
  facts.set("step", count(run.step));
  facts.set("workers", count(run.workers));
  if (run.began_at && run.heard_at) facts.set("ran", duration(run.heard_at - run.began_at));
  if (known?.status) facts.set("starts", count(known.status.starts.length));
  if (known?.read) facts.set("updates", known.updates.length < UPDATES ? count(known.updates.length) : `${UPDATES} or more`);
  return facts;
}
