// Loss and metrics by step, with updates, trials, restarts and checkpoints marked on the curve.

import { el, setText, unlessPressed } from "./dom.js";
import { count } from "./format.js";
import { report } from "./report.js";

const MOST_POINTS = 6000; // Then the server is asked for a decimated series again.
const MOST_SERIES = 12;
const MOST_LINES = 60;
const LEAST_SMOOTHED = 50;
const KINDS = {
  update: { label: "update", symbol: "triangle-up", color: "--series-2", path: "M5 0 10 10H0Z" },
  trial: { label: "on trial", symbol: "diamond", color: "--series-3", path: "M5 0 10 5 5 10 0 5Z" },
  restart: { label: "restart", symbol: "x", color: "--bad", path: "M1 0 5 4 9 0 10 1 6 5 10 9 9 10 5 6 1 10 0 9 4 5 0 1Z" },
  start: { label: "start", symbol: "circle", color: "--series-4", path: "M5 0A5 5 0 0 1 5 10A5 5 0 0 1 5 0Z" },
  checkpoint: { label: "checkpoint", symbol: "square", color: "--series-6", path: "M1 1H9V9H1Z" },
};

/** Resolves when plotly is there; it is large, and the page does not wait for it. */
export const plotly = new Promise((resolve) => {
  const wait = () => (window.Plotly ? resolve(window.Plotly) : !report && setTimeout(wait, 50));
  wait();
});

// Plotly reads a little HTML in texts.
const harmless = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isLoss = (name) => /loss/i.test(name);

export class Chart {
  constructor() {
    this.plot = el("div", { class: "chart", role: "img", "aria-label": "Metrics by step" }, el("p", { class: "wait empty" }, report && !window.Plotly ? "No chart: plotly was not installed where this report was made" : "Loading …"));
    this.key = el("div", { class: "key" });
    this.smooth = el("input", { type: "checkbox", checked: true, onchange: () => this.soon() });
    this.logarithmic = el("input", { type: "checkbox", onchange: () => this.soon() });
    this.pace = el("input", { type: "checkbox", onchange: () => this.soon() });
    this.controls = el("div", { class: "controls" }, el("label", { class: "check small" }, this.smooth, "Smooth"), el("label", { class: "check small" }, this.logarithmic, "Losses on a log scale"), el("label", { class: "check small" }, this.pace, "Time of a step"));
    this.series = new Map();
    this.evaluations = [];
    this.position = null;
    this.marks = [];
    this.changed = false;
    this.drawn = unlessPressed(() => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.soon());
    document.addEventListener("visibilitychange", () => this.changed && this.soon());
  }

  /** Shows everything that the server has. */
  setAll(metrics) {
    this.series = new Map([...Object.entries(metrics.series), ...this.evaluations]);
    this.position = metrics.position;
    const wait = this.plot.querySelector(".wait");
    if (wait && !this.series.size) setText(wait, "No metrics yet");
    this.soon();
  }

  /** Adds new points; returns false when some are missing, and everything has to be asked for again. */
  add(metrics) {
    if (this.position === null || metrics.since === null || metrics.since > this.position) return false;
    this.position = metrics.position;
    for (const [name, later] of Object.entries(metrics.series)) {
      const known = this.series.get(name) ?? { steps: [], times: [], values: [] };
      const first = later.steps[0];
      let kept = known.steps.length; // A restarted job repeats steps: the earlier ones are dropped.
      while (kept > 0 && known.steps[kept - 1] >= first) kept -= 1;
      this.series.set(name, Object.fromEntries(["steps", "times", "values"].map((field) => [field, [...known[field].slice(0, kept), ...later[field]]])));
      if (this.series.get(name).steps.length > MOST_POINTS) return false;
    }
    this.soon();
    return true;
  }

  /** Series of their own for what the evaluator has found: it is behind the training. */
  setEvaluations(found) {
    if (JSON.stringify(found) === this.evaluated) return;
    this.evaluated = JSON.stringify(found);
    const names = [...new Set(found.flatMap((one) => Object.keys(one.values)))];
    this.evaluations = names.map((name) => {
      const with_it = found.filter((one) => name in one.values).sort((a, b) => a.step - b.step);
      return [`evaluator ${name}`, { steps: with_it.map((one) => one.step), times: with_it.map((one) => one.time), values: with_it.map((one) => one.values[name]) }];
    });
    for (const [name, one] of this.evaluations) this.series.set(name, one);
    this.soon();
  }

  /** The first step that was measured after a moment; null if none was. */
  stepAfter(time) {
    const one = this.series.get("loss") ?? [...this.series.values()][0];
    const at = one ? one.times.findIndex((other) => other >= time) : -1;
    return at < 0 ? null : one.steps[at];
  }

  setMarks(marks) {
    if (JSON.stringify(marks) === JSON.stringify(this.marks)) return;
    this.marks = marks;
    this.soon();
  }

  names() {
    return [...this.series.keys()];
  }

  soon() {
    this.changed = true;
    if (this.planned || document.hidden) return;
    this.planned = setTimeout(() => { this.planned = null; plotly.then(this.drawn); }, 120);
  }

  async draw() {
    this.changed = false;
    const library = await plotly;
    const names = this.names().sort((a, b) => Number(isLoss(b)) - Number(isLoss(a))).slice(0, MOST_SERIES);
    if (!names.length || !this.plot.isConnected) return;
    this.plot.querySelector(".wait")?.remove();
    const panels = 1 + (names.some(isLoss) && names.some((name) => !isLoss(name))) + this.pace.checked;
    const lines = names.flatMap((name, at) => this.line(name, this.series.get(name), at, isLoss(name) || !names.some(isLoss) ? 1 : 2));
    if (this.pace.checked) lines.push(...this.line("ms per step", paceOf(this.series.get(names[0])), names.length, panels));
    const points = Object.keys(KINDS).map((kind) => this.points(kind, names[0])).filter((trace) => trace.x.length);
    const config = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset", scrollZoom: false };
    await library.react(this.plot, [...lines, ...points], this.layout(panels), config);
    this.showKey(points.map((trace) => trace.meta));
    this.plot.setAttribute("aria-label", this.summary(names));
  }

  line(name, one, at, panel) {
    const color = css(`--series-${(at % 6) + 1}`);
    const values = one.values.map((value) => (Number.isFinite(Number(value)) ? Number(value) : null));
    const measured = {
      x: one.steps, y: values, name: harmless(name), type: "scatter", mode: one.steps.length < 3 ? "lines+markers" : "lines",
      line: { color, width: 1.8, dash: name.startsWith("val_") ? "dot" : "solid" }, yaxis: panel === 1 ? "y" : `y${panel}`,
      hovertemplate: `${harmless(name)} %{y:.5g}<extra></extra>`,
    };
    if (!this.smooth.checked || values.length < LEAST_SMOOTHED || name.startsWith("val_")) return [measured];
    return [
      { ...measured, opacity: 0.35, line: { ...measured.line, width: 1 }, showlegend: false },
      { ...measured, y: this.smoothed(one.steps, values), hoverinfo: "skip", hovertemplate: null },
    ];
  }

  /** The mean of the last points, the later ones counting more. It begins again at each update, whose effect must not be smoothed away. */
  smoothed(steps, values) {
    const updates = this.marks.filter((mark) => mark.kind === "update" || mark.kind === "trial").map((mark) => mark.step).sort((a, b) => a - b);
    const keep = 1 - 1 / Math.max(5, values.length / 100);
    let sum = 0, weight = 0, at = 0;
    return values.map((value, place) => {
      for (; at < updates.length && updates[at] < steps[place]; at += 1) sum = weight = 0;
      if (value === null) return null;
      sum = keep * sum + value;
      weight = keep * weight + 1;
      return sum / weight;
    });
  }

  points(kind, name) {
    const one = this.series.get(name);
    const marks = this.marks.filter((mark) => mark.kind === kind && mark.step !== null);
    return {
      x: marks.map((mark) => mark.step), y: marks.map((mark) => valueAt(one, mark.step)), text: marks.map((mark) => harmless(mark.text)),
      type: "scatter", mode: "markers", showlegend: false, meta: kind, hovertemplate: "%{text}<extra></extra>",
      marker: { symbol: KINDS[kind].symbol, size: kind === "checkpoint" ? 7 : 11, color: css(KINDS[kind].color), line: { color: css("--card"), width: 1 } },
    };
  }

  layout(panels) {
    const ink = css("--dim"), line = css("--line");
    const narrow = this.plot.clientWidth < 560;
    const axis = { gridcolor: line, zeroline: false, linecolor: line, tickfont: { color: ink, size: 11 }, automargin: true, nticks: 6, exponentformat: "e" };
    const shapes = this.marks.filter((mark) => mark.kind !== "checkpoint" && mark.step !== null).slice(-MOST_LINES).map((mark) => (
      { type: "line", xref: "x", yref: "paper", x0: mark.step, x1: mark.step, y0: 0, y1: 1, layer: "below", line: { color: css(KINDS[mark.kind].color), width: 1, dash: "dot" } }));
    return {
      height: (narrow ? 260 : 320) + 60 * panels, margin: { l: 40, r: 10, t: 4, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, family: getComputedStyle(document.body).fontFamily, size: 12 }, shapes, uirevision: "kept", hovermode: "x unified", hoverdistance: 30, dragmode: narrow ? false : "zoom",
      hoverlabel: { bgcolor: css("--card"), bordercolor: line, font: { color: css("--ink"), size: 12 } },
      legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", font: { color: ink, size: 12 } }, showlegend: true,
      xaxis: { ...axis, title: { text: "step", font: { size: 11 }, standoff: 6 }, tickformat: ",d", spikecolor: ink, spikethickness: 1, spikedash: "solid", anchor: panels === 1 ? "y" : `y${panels}`, hoverformat: ",d" },
      yaxis: { ...axis, type: this.logarithmic.checked ? "log" : "linear", domain: [panels === 1 ? 0 : 1 - 2 / (panels + 1) + 0.04, 1] },
      ...(panels > 1 ? { yaxis2: { ...axis, domain: [(panels - 2) / (panels + 1) + 0.04 * (panels > 2), (panels - 1) / (panels + 1) - 0.04], anchor: "x" } } : {}),
      ...(panels > 2 ? { yaxis3: { ...axis, domain: [0, 1 / (panels + 1) - 0.04], anchor: "x" } } : {}),
    };
  }

  showKey(kinds) {
    if (this.key.dataset.kinds === kinds.join()) return;
    this.key.dataset.kinds = kinds.join();
    this.key.replaceChildren(...kinds.map((kind) => el("span", {}, symbol(kind), KINDS[kind].label)));
  }

  summary(names) {
    const said = names.map((name) => { const one = this.series.get(name); return `${name} ${one.values.at(-1)} at step ${count(one.steps.at(-1))}`; });
    return `Metrics by step: ${said.join("; ")}`;
  }
}

/** The time of a step between two points, in ms. What a restart or a pause takes is no step. */
function paceOf(one) {
  const values = one.steps.map((step, at) => (at && step > one.steps[at - 1] ? (1000 * (one.times[at] - one.times[at - 1])) / (step - one.steps[at - 1]) : null));
  const usual = values.filter((value) => value !== null).sort((a, b) => a - b)[Math.floor(values.length / 2)] ?? 0;
  return { steps: one.steps, times: one.times, values: values.map((value) => (value !== null && value < 100 * usual ? value : NaN)) };
}

function symbol(kind) {
  const space = "http://www.w3.org/2000/svg";
  const image = document.createElementNS(space, "svg");
  const shape = document.createElementNS(space, "path");
  image.setAttribute("viewBox", "0 0 10 10");
  image.setAttribute("aria-hidden", "true");
  shape.setAttribute("d", KINDS[kind].path);
  shape.style.fill = `var(${KINDS[kind].color})`;
  image.append(shape);
  return image;
}

/** The value of a series at a step, between its points. */
function valueAt(one, step) {
  let high = one.steps.findIndex((at) => at >= step);
  if (high < 0) high = one.steps.length - 1;
  const low = Math.max(0, high - 1);
  const [a, b] = [Number(one.values[low]), Number(one.values[high])];
  const width = one.steps[high] - one.steps[low];
  const part = width > 0 ? Math.min(1, Math.max(0, (step - one.steps[low]) / width)) : 1;
  return Number.isFinite(a) && Number.isFinite(b) ? a + (b - a) * part : null;
}
