// The list of runs of a server: sorted, searched, and compared.

import { get } from "./api.js";
import { Comparison } from "./compare.js";
import { byId, el, setText, showList, unlessPressed } from "./dom.js";
import { ago, count, duration, number } from "./format.js";
import { link } from "./link.js";
import { noteView } from "./notes.js";
import { stateChip } from "./state.js";

const EVERY_MS = 3000;
const MOST_COMPARED = 8;
const SPARK = { width: 96, height: 24, points: 60, everyMs: 15_000, most: 4 };
const FAILED = ["failed", "lost"];
const urgency = (run) => (FAILED.includes(run.state) ? 0 : run.running ? 1 : 2);

/** What a column is sorted by, and whether the largest comes first. */
const COLUMNS = {
  run: { by: (run) => run.name }, state: { by: urgency },
  loss: { by: (run) => lossOf(run)?.value, class: "right" }, curve: { class: "wide-only" },
  step: { by: (run) => run.step, down: true, class: "right wide-only" },
  ran: { by: ranSecs, down: true, class: "right wide-only" },
  workers: { by: (run) => run.workers, down: true, class: "right wide-only" },
  "last seen": { by: (run) => run.heard_at, down: true, class: "wide-only" },
};

export async function showRuns(first) {
  const page = new RunsPage();
  page.build();
  for (page.runs = first; ; ) {
    page.show();
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    if (document.hidden) continue;
    try {
      page.runs = await get("api/runs");
      link.live();
    } catch {
      link.lost();
    }
    if (first.length === 0 && page.runs.length === 1) { location.reload(); return; }
  }
}

class RunsPage {
  constructor() {
    this.sorted = ["state", false];
    this.state = "all";
    this.show = unlessPressed(() => this.draw());
    this.sparks = new Sparks(this.show);
  }

  build() {
    this.search = el("input", { type: "search", id: "search", placeholder: "name, #tag, note, state", autocomplete: "off", spellcheck: false, oninput: () => this.show() });
    this.states = el("div", { class: "buttons states", role: "group", "aria-label": "State" });
    this.body = el("tbody", { class: "run-list" });
    this.heads = Object.entries(COLUMNS).map(([name, column]) => el("th", { scope: "col", class: column.class ?? "" },
      column.by ? el("button", { type: "button", class: "sort", onclick: () => this.sort(name) }, name) : name));
    const head = el("thead", {}, el("tr", {}, el("th", { scope: "col" }, el("span", { class: "visually-hidden" }, "compare")), this.heads));
    this.table = el("section", { class: "card", "aria-label": "All runs" }, el("div", { class: "body scroll" }, el("table", {}, head, this.body)));
    this.none = el("p", { class: "empty", "aria-live": "polite" });
    this.comparison = new Comparison();
    this.left = el("p", { class: "note careful", role: "status", hidden: true }); // Which runs of the address are not compared.
    this.tools = el("div", { class: "tools" }, el("div", { class: "field" }, el("label", { for: "search" }, "Search"), this.search), this.states);
    byId("main").replaceChildren(el("div", { class: "hero" }, el("h1", {}, "Runs"), this.tools), el("div", { class: "stack" }, this.left, this.comparison.node, this.table, this.none));
    document.title = "Runs · replicast";
    addEventListener("hashchange", () => this.show());
  }

  /** The names that the address has: #/compare/first/second. */
  asked() {
    const [, what, ...names] = location.hash.split("/").map(decodeURIComponent);
    return what === "compare" ? names : [];
  }

  /** Those of them that there are. */
  compared() {
    return this.asked().filter((name) => this.runs.some((run) => run.name === name)).slice(0, MOST_COMPARED);
  }

  compare(name, chosen) {
    const names = chosen ? [...this.compared(), name] : this.compared().filter((one) => one !== name);
    history.replaceState(null, "", names.length ? `#/compare/${names.map(encodeURIComponent).join("/")}` : location.pathname);
    this.show();
  }

  sort(name) {
    this.sorted = [name, this.sorted[0] === name && !this.sorted[1]];
    this.show();
  }

  draw() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.runs.filter((run) => words.every((word) => textOf(run).includes(word)));
    const groups = { all: () => true, failed: (run) => FAILED.includes(run.state), running: (run) => run.running, others: (run) => urgency(run) === 2 };
    this.showStates(found, groups);
    const listed = found.filter(groups[this.state]).sort((a, b) => this.order(a, b));
    const compared = this.compared(), left = this.asked().filter((name) => !compared.includes(name));
    const reason = (name) => (this.runs.some((run) => run.name === name) ? `at most ${MOST_COMPARED} are` : "this server has no such run");
    setText(this.left, left.map((name) => `“${name}” is not compared: ${reason(name)}.`).join(" "));
    this.left.hidden = !this.left.textContent;
    const items = listed.map((run) => ({ ...run, heard: ago(run.heard_at), spark: this.sparks.of(run), place: compared.indexOf(run.name), full: compared.length >= MOST_COMPARED }));
    showList(this.body, items, (run) => run.name, (run) => this.row(run));
    this.heads.forEach((head, at) => {
      const isSorted = Object.keys(COLUMNS)[at] === this.sorted[0];
      const down = Boolean(COLUMNS[this.sorted[0]].down) !== this.sorted[1];
      isSorted ? head.setAttribute("aria-sort", down ? "descending" : "ascending") : head.removeAttribute("aria-sort");
    });
    this.table.hidden = listed.length === 0;
    this.tools.hidden = this.runs.length === 0;
    setText(this.none, listed.length ? "" : this.runs.length ? "No run matches." : "There is no run here yet. This page shows one as soon as its job has begun.");
    this.comparison.show(compared.map((name) => this.runs.find((run) => run.name === name)), (name) => this.compare(name, false));
  }

  showStates(found, groups) {
    const labels = Object.entries(groups).map(([name, has]) => [name, found.filter(has).length]).filter(([name, many]) => many || name === this.state);
    showList(this.states, labels.map(([name, many]) => ({ name, many, pressed: name === this.state })), (one) => one.name, (one) => el("button", {
      type: "button", class: "tiny", "aria-pressed": String(one.pressed), "data-focus": one.name, onclick: () => { this.state = one.name; this.show(); } }, `${one.name} ${one.many}`));
  }

  /** By the chosen column; what has no value comes last, equal ones by when they were last seen. */
  order(a, b) {
    const { by, down } = COLUMNS[this.sorted[0]];
    const [x, y] = [by(a), by(b)], sign = Boolean(down) !== this.sorted[1] ? -1 : 1;
    const missing = (value) => Number(value === null || value === undefined || Number.isNaN(value));
    const compared = typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
    return missing(x) - missing(y) || (missing(x) ? 0 : sign * compared) || (b.heard_at ?? 0) - (a.heard_at ?? 0) || a.name.localeCompare(b.name);
  }

  row(run) {
    const loss = lossOf(run), chosen = run.place >= 0;
    const box = el("input", { type: "checkbox", checked: chosen, disabled: run.full && !chosen, "data-focus": `compare ${run.name}`, "aria-label": `Compare ${run.name}`, onchange: (event) => { const { checked } = event.target; setTimeout(() => this.compare(run.name, checked)); } });
    const node = el("tr", { class: chosen ? "chosen" : "" },
      el("td", { class: `box${chosen ? ` series-${(run.place % 6) + 1}` : ""}` }, box),
      el("td", { class: "first" }, el("a", { href: encodeURIComponent(run.name), "data-focus": run.name }, run.name), noteView(run.annotation), el("div", { class: "dim small clamped", title: more(run) }, more(run))),
      el("td", {}, stateChip(run.state)),
      el("td", { class: "right keep" }, loss ? number(loss.value) : "–", loss && loss.name !== "loss" ? el("div", { class: "dim small" }, loss.name) : null),
      el("td", { class: "wide-only curve" }, sparkView(run.spark)),
      el("td", { class: "right keep wide-only" }, count(run.step)),
      el("td", { class: "right keep wide-only" }, ranSecs(run) === undefined ? "–" : duration(ranSecs(run))),
      el("td", { class: "right wide-only keep" }, count(run.workers)),
      el("td", { class: "dim keep wide-only" }, run.heard));
    this.sparks.watch(node, run);
    return node;
  }
}

/** The loss, or else the first metric. */
function lossOf(run) {
  const values = Object.entries(run.metrics?.values ?? {}).filter(([name]) => name !== "learning_rate");
  const found = values.find(([name]) => name === "loss") ?? values[0];
  return found ? { name: found[0], value: Number(found[1]) } : null;
}

function ranSecs(run) {
  return run.began_at && run.heard_at ? Math.max(0, run.heard_at - run.began_at) : undefined;
}

function textOf(run) {
  const { tags, note } = run.annotation;
  return [run.name, run.state, run.sentence, note, ...tags.map((tag) => `#${tag}`)].join(" ").toLowerCase();
}

/** What the sentence says beside the state, the step and the age, which have columns of their own. */
function more(run) {
  const said = run.sentence.replace(/ at step \d+/, "").replace(/, [^,]+ ago$/, "");
  return said.toLowerCase() === run.state ? "" : said;
}

/** The curves of the runs that are seen: a few are read at a time, again while a run goes on. */
class Sparks {
  constructor(changed) {
    this.changed = changed;
    this.known = new Map();
    this.wanted = new Map();
    this.active = 0;
    this.seen = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (!target.isConnected) this.seen.unobserve(target);
        else if (isIntersecting) this.want(target.replicastRun);
      }
    });
  }

  of(run) {
    return this.known.get(run.name)?.path ?? "";
  }

  watch(node, run) {
    node.replicastRun = run;
    this.seen.observe(node);
  }

  want(run) {
    const known = this.known.get(run.name);
    if (known && (known.step === run.step || Date.now() - known.at < SPARK.everyMs)) return;
    this.wanted.set(run.name, run);
    this.read();
  }

  async read() {
    if (this.active >= SPARK.most || !this.wanted.size) return;
    const [name, run] = this.wanted.entries().next().value;
    this.wanted.delete(name);
    this.known.set(name, { path: this.of(run), step: run.step, at: Date.now() });
    this.active += 1;
    try {
      const { series } = await get(`api/runs/${encodeURIComponent(name)}/metrics?points=${SPARK.points}`);
      const shown = series.loss ?? Object.entries(series).find(([one]) => one !== "learning_rate")?.[1];
      if (shown) this.known.get(name).path = sparkPath(shown);
      this.changed();
    } catch {
      this.known.delete(name); // Asked for again when the row is shown again.
    } finally {
      this.active -= 1;
      this.read();
    }
  }
}

/** On a log scale where the first loss would hide the others. */
function sparkPath({ steps, values }) {
  let points = steps.map((step, at) => [step, Number(values[at])]).filter(([, value]) => Number.isFinite(value));
  const least = Math.min(...points.map(([, value]) => value)), most = Math.max(...points.map(([, value]) => value));
  if (least > 0 && most > 30 * least) points = points.map(([step, value]) => [step, Math.log(value)]);
  const [xs, ys] = [0, 1].map((at) => points.map((point) => point[at]));
  const scaled = (value, all, size) => ((value - Math.min(...all)) / (Math.max(...all) - Math.min(...all) || 1)) * (size - 4) + 2;
  return points.map(([x, y], at) => `${at ? "L" : "M"}${scaled(x, xs, SPARK.width).toFixed(1)} ${(SPARK.height - scaled(y, ys, SPARK.height)).toFixed(1)}`).join("");
}

function sparkView(path) {
  const space = "http://www.w3.org/2000/svg";
  const image = document.createElementNS(space, "svg"), line = document.createElementNS(space, "path");
  image.setAttribute("viewBox", `0 0 ${SPARK.width} ${SPARK.height}`);
  image.setAttribute("class", "spark");
  image.setAttribute("aria-hidden", "true");
  line.setAttribute("d", path);
  image.append(line);
  return image;
}
