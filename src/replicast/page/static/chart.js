// What was measured, a panel for each quantity over one common axis, and what happened as marks above it.

import { el, setText, unlessPressed } from "./dom.js";
import { count, number, seconds, size } from "./format.js";
import { Marks } from "./marks.js";
import { report } from "./report.js";

const MOST_POINTS = 3000; // Of a series that grows; then the server is asked for a thinner one again.
const MOST_PANELS = 8, MOST_LINES = 8; // Of metrics; of one panel.
const LEAST_SMOOTHED = 50, SMOOTHED_POINTS = 1200; // Of a line: smoothing is by such a part of what is visible.
const HEIGHTS = { loss: 210, metric: 110, system: 76 };
const LANE = 30, TITLE = 24, BOTTOM = 46;
const RATE = "learning_rate";
const SYSTEM = { step_secs: ["step time", "s"], memory_bytes: ["memory", "B"] };

let loading, tell;
const told = new Promise((resolve) => { tell = resolve; });
const MOST_WAIT_MS = 3000;

/** What is known of the run is on the screen: from now on, plotly may hold up the page. */
export function pictureIsThere() {
  requestAnimationFrame(() => setTimeout(tell));
}

/** Plotly. To run its 5 MB takes a browser a second, in which the page stands still: only where a chart is drawn, after all else. */
async function plotly() {
  loading ??= report ? window.Plotly ?? new Promise(() => {}) : (async () => {
    await Promise.race([told, new Promise((resolve) => setTimeout(resolve, MOST_WAIT_MS))]);
    await import("./plotly.js");
    await new Promise((resolve) => setTimeout(resolve)); // The first drawing is a task of its own.
    return window.Plotly;
  })();
  return loading;
}

// Plotly reads a little HTML in texts.
const harmless = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isLoss = (name) => /loss/i.test(name);
const isDerived = (name) => /^(val_|evaluator )/.test(name);
const isVisible = (node) => node.checkVisibility?.() ?? true;
const finite = (value) => (Number.isFinite(Number(value)) && value !== null ? Number(value) : null);

export class Chart {
  /** @param read gets the metrics between two moments */
  constructor(read) {
    this.read = read;
    const changed = () => this.soon(0);
    this.plot = el("div", { class: "chart", role: "img", "aria-label": "Metrics by step" }, el("p", { class: "wait empty" }, report && !window.Plotly ? "No chart: plotly was not installed where this report was made" : "Loading …"));
    this.marks = new Marks(this.plot, (first, last) => this.zoom(first, last));
    this.node = el("div", { class: "chart-area" }, this.plot, this.marks.node);
    this.key = this.marks.key;
    this.smoothing = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0.9, oninput: changed });
    this.logarithmic = el("input", { type: "checkbox", onchange: () => { this.held.clear(); changed(); } });
    this.whole = el("input", { type: "checkbox", onchange: changed });
    this.wholeLabel = el("label", { class: "check small", hidden: true }, this.whole, "Show all values");
    this.held = new Map(); // By the titles of panels: ranges that the reader has given to their axes.
    this.axis = el("select", { onchange: () => { this.detail = null; this.held.clear(); changed(); } }, el("option", { value: "step" }, "steps"), el("option", { value: "time" }, "time"));
    this.reset = el("button", { type: "button", class: "tiny", hidden: true, onclick: () => this.zoom(null) }, "Reset zoom");
    this.shown = el("div", { class: "panels", role: "group", "aria-label": "Panels" });
    this.controls = el("div", { class: "controls" },
      el("label", { class: "check small" }, "Smoothing", this.smoothing), el("label", { class: "check small" }, this.logarithmic, "Losses on a log scale"), this.wholeLabel,
      el("label", { class: "check small" }, "Over", this.axis), this.shown, this.reset);
    this.training = new Map();
    this.evaluations = new Map();
    this.workers = new Map();
    this.hidden = new Set();
    this.position = null;
    this.detail = null; // What was read of the part that the reader has zoomed to.
    this.changed = false;
    this.drawn = unlessPressed(() => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
    document.addEventListener("visibilitychange", () => this.changed && this.soon());
  }

  /** Shows everything that the server has, and behind it what has come since: on a slow connection, events overtake the answer. */
  setAll(metrics) {
    const known = this.training;
    this.training = new Map(Object.entries(metrics.series));
    if (metrics.position < this.position) for (const [name, one] of known) this.training.set(name, joined(this.training.get(name), after(one, this.training.get(name)?.times.at(-1))));
    this.position = Math.max(this.position, metrics.position);
    const wait = this.plot.querySelector(".wait");
    if (wait && !this.training.size) setText(wait, "No metrics yet");
    this.soon();
  }

  setWorkers(metrics) {
    this.workers = new Map(Object.entries(metrics.series));
    this.soon();
  }

  /** Adds new points; returns false when some are missing, and everything has to be asked for again. */
  add(metrics) {
    if (this.position === null || metrics.since === null || metrics.since > this.position) return false;
    this.position = metrics.position;
    for (const [name, later] of Object.entries(metrics.series)) {
      this.training.set(name, joined(this.training.get(name), later));
      if (this.training.get(name).steps.length > MOST_POINTS) return false;
    }
    this.soon();
    return true;
  }

  /** Adds what the workers say now. */
  addNotes(notes) {
    for (const note of notes.filter((one) => one.training)) {
      for (const name of Object.keys(SYSTEM)) {
        const known = this.workers.get(`${name}/${note.rank}`), value = note[name];
        if (finite(value) === null || (known && (known.times.at(-1) >= note.time || known.steps.length > MOST_POINTS))) continue;
        this.workers.set(`${name}/${note.rank}`, joined(known, { steps: [note.step], times: [note.time], values: [value] }));
      }
    }
    this.soon();
  }

  /** Series of their own for what the evaluator has found: it is behind the training. */
  setEvaluations(found) {
    if (JSON.stringify(found) === this.evaluated) return;
    this.evaluated = JSON.stringify(found);
    const names = [...new Set(found.flatMap((one) => Object.keys(one.values)))];
    this.evaluations = new Map(names.map((name) => {
      const with_it = found.filter((one) => name in one.values).sort((a, b) => a.step - b.step);
      return [`evaluator ${name}`, { steps: with_it.map((one) => one.step), times: with_it.map((one) => one.time), values: with_it.map((one) => one.values[name]) }];
    }));
    this.soon();
  }

  /** @param marks [{key, kind, step or time, text, href}] */
  setMarks(marks, left = "") {
    const main = this.main();
    if (!main) return;
    const placed = marks.map((mark) => ({ ...mark, step: mark.step ?? between(main.times, main.steps, mark.time), time: mark.time ?? between(main.steps, main.times, mark.step) }));
    if (this.marks.set(placed.filter((mark) => mark.step !== null && mark.time !== null), left)) {
      if (this.plot._fullLayout) this.placeMarks();
      this.soon();
    }
  }

  main() {
    return this.training.get("loss") ?? [...this.training.values()][0];
  }

  /** Metrics of the training that a trial can have. */
  names() {
    return [...this.training.keys()].filter((name) => name !== RATE);
  }

  last(name) {
    return this.training.get(name)?.values.at(-1);
  }

  /** Draws, and for what has come from the job not often: the slower drawing is here, the less, so that the page answers in between. */
  soon(wait = Math.max(120, 8 * (this.took ?? 0))) {
    this.changed = true;
    if ((this.planned && wait) || document.hidden || !isVisible(this.node)) return;
    clearTimeout(this.planned);
    this.planned = setTimeout(() => { this.planned = null; plotly().then(this.drawn); }, wait);
  }

  /** Called when the chart is shown again. */
  async resized() {
    this.soon(0);
    if (this.plot._fullLayout) (await plotly()).Plots.resize(this.plot);
  }

  async zoom(first, last) {
    const library = await plotly();
    if (!this.plot._fullLayout) return;
    this.held.clear();
    await library.relayout(this.plot, first === null ? { "xaxis.autorange": true } : { "xaxis.range": [this.x(first.step, first.time), this.x(last.step, last.time)] });
  }

  /** Zooms to so many steps around one. */
  async look(step, around) {
    const main = this.main();
    if (!main) return;
    await (await plotly()).react && this.draw();
    const time = (at) => between(main.steps, main.times, at) ?? main.times.at(-1);
    const [first, last] = [Math.max(0, step - around), step + around];
    await this.zoom({ step: first, time: time(first) }, { step: last, time: time(last) });
  }

  x(step, time) {
    return this.axis.value === "time" ? localTime(time) : step;
  }

  /** What is drawn: each panel with its lines. */
  panels() {
    const training = [...this.training].map(([name, one]) => [name, this.detailed(name, one)]);
    const metrics = new Map(), all = [...training, ...this.evaluations].filter(([name]) => name !== RATE);
    for (const [name, one] of all.sort(([a], [b]) => Number(isLoss(b)) - Number(isLoss(a)))) {
      const title = isLoss(name) ? "loss" : name.replace(/^(val_|evaluator )/, "");
      const panel = metrics.get(title) ?? [...metrics.values()][MOST_PANELS - 1] ?? { title, kind: isLoss(name) ? "loss" : "metric", lines: [] };
      panel.lines.push({ name, one, smooth: !isDerived(name), dash: name.startsWith("val_") ? "dot" : "solid" });
      metrics.set(panel.title, panel);
    }
    const found = [...metrics.values()];
    const rate = this.training.get(RATE);
    if (rate) found.push({ title: "learning rate", kind: "system", lines: [{ name: "learning rate", one: lasting(rate, this.main()), shape: "hv" }] });
    for (const [field, [title, unit]] of Object.entries(SYSTEM)) {
      const lines = [...this.workers].filter(([name]) => name.startsWith(`${field}/`)).map(([name, one]) => ({ name: `worker ${name.split("/")[1]}`, one }));
      if (lines.length) found.push({ title, unit, kind: "system", lines });
    }
    for (const panel of found) panel.lines = panel.lines.slice(0, MOST_LINES);
    this.choose(found.map((panel) => panel.title));
    const shown = found.filter((panel) => !this.hidden.has(panel.title));
    return shown.length ? shown : found.slice(0, 1);
  }

  /** A box for each panel, to hide it. */
  choose(titles) {
    if (this.shown.dataset.titles === titles.join()) return;
    this.shown.dataset.titles = titles.join();
    const box = (title) => el("input", { type: "checkbox", checked: !this.hidden.has(title), onchange: (event) => { if (event.target.checked) this.hidden.delete(title); else this.hidden.add(title); this.soon(0); } });
    this.shown.replaceChildren(...titles.map((title) => el("label", { class: "check small" }, box(title), title)));
  }

  async draw() {
    const library = await plotly();
    const all = this.panels(), panels = this.watched ? all : all.slice(0, 1); // All panels at once, at first, would freeze the page.
    if (this.position === null || !panels.length || !isVisible(this.node)) return; // Until the metrics are there, it says "Loading".
    this.changed = false;
    this.plot.querySelector(".wait")?.remove();
    const began = performance.now();
    const lines = panels.flatMap((panel, at) => panel.lines.flatMap((line, place) => this.line(panel, line, at, place)));
    await library.react(this.plot, lines, this.layout(panels), { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: false, scrollZoom: false, showTips: false }); // Its tips are markup, which the page's policy forbids.
    this.took = performance.now() - began;
    this.watch();
    this.reset.hidden = !this.range() && !this.held.size;
    if (panels.length < all.length) this.soon(0);
    this.placeMarks();
    this.plot.setAttribute("aria-label", summary(panels));
  }

  watch() {
    if (this.watched) return;
    this.watched = true;
    this.plot.on("plotly_afterplot", () => this.placeMarks());
    this.plot.on("plotly_relayout", (changed) => this.zoomed(changed));
    this.plot.on("plotly_doubleclick", () => this.zoom(null));
  }

  /** The first and the last place of the x axis, if the reader has zoomed; of another axis, they say nothing. */
  range() {
    const { xaxis, uirevision } = this.plot._fullLayout ?? {};
    return xaxis && !xaxis.autorange && uirevision === this.axis.value ? xaxis.range.map((one) => xaxis.r2l(one)) : null;
  }

  zoomed(changed) {
    for (const [at, title] of this.titles.entries()) {
      const name = `yaxis${at ? at + 1 : ""}`;
      if (`${name}.range[0]` in changed || `${name}.range[1]` in changed) this.held.set(title, [...this.plot._fullLayout[name].range]);
    }
    this.soon(0); // The axes of the panels follow what is visible.
    this.placeMarks();
    clearTimeout(this.asking);
    const main = this.main(), range = this.range();
    if (!range || report || !main?.means) {
      if (this.detail) { this.detail = null; this.soon(); }
      return;
    }
    const [first, last] = range;
    const known = this.axis.value === "time" ? main.times.map(localTime) : main.steps;
    const time = (value) => between(known, main.times, value) ?? main.times.at(-1);
    const before = Math.max(0, known.findLastIndex((one) => one <= first));
    this.asking = setTimeout(() => this.readDetail(main.times[before], time(last)), 200);
  }

  /** Of what the reader has zoomed to, every step. */
  async readDetail(start, end) {
    const found = await this.read(start, end).catch(() => null);
    if (!found || !this.range()) return;
    this.detail = found.series;
    this.soon(0);
  }

  /** The series with what was read of a part of it. */
  detailed(name, one) {
    const part = this.detail?.[name];
    if (!part?.steps.length || !one.means) return one;
    const first = one.steps.findIndex((step) => step >= part.steps[0]), last = one.steps.findLastIndex((step) => step <= part.steps.at(-1));
    const with_ = (field) => [...one[field].slice(0, Math.max(0, first)), ...(part[field] ?? part.values), ...one[field].slice(last + 1)];
    return { steps: with_("steps"), times: with_("times"), values: with_("values"), means: with_("means") };
  }

  placeMarks() {
    const { xaxis, _size: size, height } = this.plot._fullLayout;
    this.marks.place((mark) => {
      const place = xaxis.d2p(this.x(mark.step, mark.time));
      return place >= -1 && place <= xaxis._length + 1 ? size.l + place : null;
    }, height - BOTTOM);
  }

  line(panel, line, at, place) {
    const { one, name } = line;
    const values = one.values.map(finite);
    const measured = {
      x: one.steps.map((step, index) => this.x(step, one.times[index])), y: values, name: harmless(name), type: "scatter", mode: one.steps.length < 3 ? "lines+markers" : "lines",
      line: { color: css(`--series-${(place % 6) + 1}`), width: 1.8, dash: line.dash ?? "solid", shape: line.shape ?? "linear" }, yaxis: at ? `y${at + 1}` : "y",
      legend: at ? `legend${at + 1}` : "legend", showlegend: panel.lines.length > 1, legendgroup: name,
      hovertemplate: `${panel.unit ? `${panel.title}, ` : ""}${harmless(name)}  %{y:${panel.unit ? ".3~s" : ".4~g"}}${panel.unit ?? ""}<extra></extra>`,
    };
    const keep = Number(this.smoothing.value);
    if (!line.smooth || !keep || values.length < LEAST_SMOOTHED) return [measured];
    return [
      { ...measured, opacity: 0.3, line: { ...measured.line, width: 1 }, showlegend: false },
      { ...measured, ...this.smoothed(one, values, keep), hovertemplate: measured.hovertemplate.replace("  ", ", smoothed  ") },
    ];
  }

  /**
   * The mean of the last steps, the later ones counting more. It begins again at each update, and where one was reverted: their
   * effects must not be smoothed away. Of a series with points left out, the means of what was left out are used: those of the
   * extremes that are kept differ. Each counts as all the steps up to the next one, so that the curve is equally smooth where
   * points were left out, and at its end, where they were not yet.
   */
  smoothed(one, values, keep) {
    const updates = this.marks.all.filter((mark) => (mark.kind === "update" || mark.kind === "trial") && mark.run === one.run).flatMap((mark) => [mark.step, mark.ended ?? mark.step]).sort((a, b) => a - b);
    const means = one.means ? one.means.map(finite) : values, places = [...means.keys()].filter((place) => means[place] !== null);
    const [from, to] = this.visible(one) ?? [0, values.length - 1], kept = keep ** (Math.min(to - from, SMOOTHED_POINTS) / (one.steps[to] - one.steps[from]) || 1); // For each step.
    const x = [], y = [];
    let sum = 0, weight = 0, at = 0;
    for (const [number_, place] of places.entries()) {
      const next = one.steps[places[number_ + 1]] ?? one.steps.at(-1) + 1, rest = kept ** (next - one.steps[place]);
      for (; at < updates.length && updates[at] < one.steps[place]; at += 1) sum = weight = 0;
      [sum, weight] = [rest * sum + (1 - rest) * means[place], rest * weight + (1 - rest)];
      x.push(this.x(one.steps[place], one.times[place]));
      y.push(sum / weight);
    }
    return { x, y };
  }

  /** The places of the first and the last point of a series that the x axis shows; of those on both sides, if it shows none; else null. */
  visible(one) {
    const range = this.range(), x = (at) => this.x(one.steps[at], one.times[at]), all = [...one.steps.keys()];
    if (!range) return [0, all.length - 1];
    const from = all.findIndex((at) => x(at) >= range[0]), to = all.findLastIndex((at) => x(at) <= range[1]);
    return from < 0 || to < 0 ? null : [Math.min(from, to), Math.max(from, to)];
  }

  /** What the axis of a panel has to show of the part that the reader has zoomed to. */
  fit(panel, logarithmic) {
    const seen = panel.lines.flatMap(({ one }) => { const [from, to] = this.visible(one) ?? [0, -1]; return one.values.slice(from, to + 1).map(finite); });
    const values = seen.filter((value) => value !== null && (!logarithmic || value > 0)).map((value) => (logarithmic ? Math.log10(value) : value));
    if (!values.length) return null;
    if (panel.kind === "system") values.push(0);
    const [least, most] = [Math.min(...values), Math.max(...values)], margin = (most - least || Math.abs(most) || 1) / 16;
    return [panel.kind === "system" && least === 0 ? 0 : least - margin, most + margin];
  }

  layout(panels) {
    const ink = css("--dim"), line = css("--line");
    const narrow = this.plot.clientWidth < 560;
    const inner = panels.reduce((sum, panel) => sum + TITLE + HEIGHTS[panel.kind] * (narrow ? 0.85 : 1), 0);
    const axis = { gridcolor: line, zeroline: false, linecolor: line, tickfont: { color: ink, size: 11 }, exponentformat: "e" };
    const layout = {
      height: LANE + inner + BOTTOM, margin: { l: narrow ? 44 : 56, r: 12, t: LANE, b: BOTTOM }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, family: getComputedStyle(document.body).fontFamily, size: 12 }, uirevision: this.axis.value, dragmode: narrow ? false : "zoom",
      hovermode: "x unified", hoversubplots: "axis", hoverdistance: -1,
      hoverlabel: { bgcolor: css("--card"), bordercolor: line, font: { color: css("--ink"), size: 12 } }, showlegend: true, annotations: [],
      xaxis: {
        ...axis, title: { text: this.axis.value === "time" ? "" : "step", font: { size: 11 }, standoff: 6 }, nticks: narrow ? 4 : 8, anchor: panels.length === 1 ? "y" : `y${panels.length}`, spikecolor: ink, spikethickness: 1, spikedash: "solid", spikemode: "across", showspikes: true,
        ...(this.axis.value === "time" ? { type: "date", hoverformat: "%b %-d, %H:%M:%S" } : { type: "linear", tickformat: ",d", hoverformat: ",d" }),
      },
    };
    let top = 1;
    const clipped = panels.map((panel) => (panel.kind === "system" || (panel.kind === "loss" && this.logarithmic.checked) ? null : clip(panel.lines.map((line) => line.one.values))));
    this.wholeLabel.hidden = clipped.every((one) => one === null);
    this.titles = panels.map((panel) => panel.title);
    for (const [at, panel] of panels.entries()) {
      const number_ = at ? at + 1 : "", share = (pixels) => pixels / inner;
      const high = top - share(TITLE), low = high - share(HEIGHTS[panel.kind] * (narrow ? 0.85 : 1));
      const logarithmic = panel.kind === "loss" && this.logarithmic.checked;
      layout[`yaxis${number_}`] = { ...axis, anchor: "x", domain: [Math.max(0, low), high], type: logarithmic ? "log" : "linear", nticks: panel.kind === "loss" ? 6 : 4, rangemode: panel.kind === "system" ? "tozero" : "normal", ...(panel.unit ? { tickformat: "~s", ticksuffix: panel.unit } : {}) };
      const cut = this.whole.checked || this.range() || this.held.has(panel.title) ? null : clipped[at];
      const range = this.held.get(panel.title) ?? (this.range() ? this.fit(panel, logarithmic) : cut?.range);
      const note = { xref: "paper", yref: "paper", x: 0, y: high, xanchor: "left", yanchor: "bottom", showarrow: false, align: "left", borderpad: 0 };
      // Said each time: plotly takes what is left out from the drawing before, and an axis that was cut would keep no range at all.
      Object.assign(layout[`yaxis${number_}`], { uirevision: false, autorange: !range }, range ? { range: [...range] } : {});
      if (cut) {
        layout.annotations.push({ ...note, text: outside(cut), xshift: 14 + 7 * panel.title.length, font: { size: 11, color: ink } });
      }
      layout[`legend${number_}`] = { orientation: "h", x: 1, xanchor: "right", y: high, yanchor: "bottom", font: { color: ink, size: 11 }, bgcolor: "rgba(0,0,0,0)" };
      layout.annotations.push({ ...note, text: harmless(panel.title), font: { size: 12, weight: 600, color: css("--ink") } });
      top = low;
    }
    return layout;
  }
}

/**
 * Where an axis ends if few values, as those of a bad trial, would flatten all others; null if none do. What the training began
 * with stays in the picture.
 */
function clip(lines) {
  const known = lines.map((values) => values.map(finite).filter((value) => value !== null));
  const sorted = Float64Array.from(known.flat()).sort();
  if (sorted.length < LEAST_SMOOTHED) return null;
  const begun = known.flatMap((values) => values.slice(0, Math.ceil(values.length / 20)));
  const [low, high] = [0.2, 0.8].map((part) => sorted[Math.floor(part * (sorted.length - 1))]), far = 4 * (high - low);
  const [bottom, top] = [Math.min(low - far, ...begun), Math.max(high + far, ...begun)];
  const inside = sorted.filter((value) => value >= bottom && value <= top);
  const [first, last] = [inside[0], inside.at(-1)], [least, most] = [sorted[0], sorted.at(-1)];
  if (!(last > first) || most - least < 1.5 * (last - first)) return null;
  const margin = (last - first) / 16;
  return { range: [first - margin, last + margin], least: least < first ? least : null, most: most > last ? most : null };
}

function outside({ least, most }) {
  return `values not shown: ${[most === null ? "" : `▲ up to ${number(most)}`, least === null ? "" : `▼ down to ${number(least)}`].filter(Boolean).join(", ")}`;
}

function summary(panels) {
  const text = { B: size, s: seconds };
  const said = panels.flatMap((panel) => panel.lines.map(({ name, one }) => `${panel.unit ? `${panel.title} of ` : ""}${name} ${(text[panel.unit] ?? number)(one.values.at(-1))}`));
  const steps = panels[0].lines[0].one.steps;
  return `Charts by step, at step ${count(steps.at(-1))}: ${said.join("; ")}`;
}

/** A series and what came later. A restarted job repeats steps: the earlier ones are dropped. */
function joined(known = { steps: [], times: [], values: [] }, later) {
  let kept = known.steps.length;
  while (kept > 0 && known.steps[kept - 1] >= later.steps[0]) kept -= 1;
  const fields = { steps: [known.steps, later.steps], times: [known.times, later.times], values: [known.values, later.values] };
  if (known.means || later.means) fields.means = [known.means ?? known.values, later.means ?? later.values];
  return Object.fromEntries(Object.entries(fields).map(([field, [before, after]]) => [field, [...before.slice(0, kept), ...after]]));
}

/** The points of a series that were measured after a moment, if there is one. */
function after(one, moment) {
  return Object.fromEntries(Object.entries(one).map(([field, values]) => [field, values.filter((_, at) => !(one.times[at] <= moment))]));
}

/** A value that lasts until it is told again, at each of the main series' steps too, so that it can be pointed at. */
function lasting(one, main) {
  const all = [...one.steps.map((step, at) => [step, one.times[at], one.values[at]]), ...(main?.steps ?? []).map((step, at) => [step, main.times[at], null])];
  const found = { steps: [], times: [], values: [] };
  for (const [step, time, value] of all.sort((a, b) => a[0] - b[0])) {
    if (value === null && (step === found.steps.at(-1) || !found.steps.length)) continue;
    found.steps.push(step);
    found.times.push(time);
    found.values.push(value ?? found.values.at(-1));
  }
  return found;
}

/** The `y` of the first `x` that is not below a value; null if there is none, or nothing to look for. */
function between(x, y, value) {
  if (value === null || value === undefined) return null;
  let low = 0, high = x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low < x.length ? y[low] : null;
}

/** Milliseconds that plotly, which knows no time zones, shows as the reader's clock. */
function localTime(secs) {
  return secs * 1000 - new Date(secs * 1000).getTimezoneOffset() * 60_000;
}
