// One update: what it changed, what that did to the metrics, and what every worker says of it. Its address is #/updates/ID.

import { get } from "./api.js";
import { breakable, card, el, pairs } from "./dom.js";
import { ago, count, counted, editsText, moment, number, seconds, shape, size, trialText } from "./format.js";
import { noteView } from "./notes.js";
import { stageChip } from "./state.js";

const BARS = { width: 320, height: 64 };

export const addressOf = (view) => `#/updates/${encodeURIComponent(view.id)}`;

export class UpdatePage {
  /** @param actions {allowed(), withdraw(view), revert(view), locate(view)} */
  constructor(base, actions) {
    this.base = base;
    this.actions = actions;
    this.id = null;
    this.node = el("div", { class: "update-page stack", hidden: true });
  }

  /** Shows the update with this id, or nothing. */
  open(id) {
    if (id !== this.id) this.node.replaceChildren(el("p", { class: "empty" }, "Loading …"));
    this.id = id;
    this.shown = "";
    this.node.hidden = id === null;
    return this.read();
  }

  async read() {
    const id = this.id;
    if (id === null) return;
    try {
      const view = await get(`${this.base}/updates/${encodeURIComponent(id)}`);
      if (id === this.id) this.show(view);
    } catch (error) {
      if (id === this.id && (error.status || !this.shown)) this.node.replaceChildren(back(), el("p", { class: "note bad" }, error.status === 404 ? `This run has no update ${id}.` : error.message));
    }
  }

  show(view) {
    const text = JSON.stringify([view, this.actions.allowed()]);
    if (text === this.shown) return;
    this.shown = text;
    const said = [view.step === null ? "" : `step ${count(view.step)}`, view.author, ago(view.committed_at ?? view.at)].filter(Boolean).join(" · ");
    this.node.replaceChildren(
      el("section", { class: "card", id: "update", "aria-labelledby": "update-title" }, el("div", { class: "body update-head" },
        back(),
        el("div", { class: "hero-line" }, el("h2", { id: "update-title", tabIndex: -1 }, `${view.sequence ? `Update ${view.sequence}` : "Update"}: ${editsText(view, 3) || view.id}`), stageChip(view.stage)),
        el("p", { class: "dim" }, said), view.note ? el("p", { class: "quote" }, view.note) : null, noteView(view.annotation), this.notes(view), this.buttons(view))),
      el("div", { class: "halves" }, el("div", { class: "stack" }, changesCard(view), workersCard(view)), el("div", { class: "stack" }, metricsCard(view), factsCard(view))));
  }

  notes(view) {
    const link = (sequence) => el("a", { href: `#/updates/${sequence}` }, `update ${sequence}`);
    return [
      view.reverts ? el("p", {}, "It reverts ", link(view.reverts), ".") : null,
      view.reverted_by ? el("p", {}, "It was reverted by ", link(view.reverted_by), ".") : null,
      view.outcome ? el("div", { class: `note ${view.outcome.outcome === "kept" ? "good" : "careful"}` }, `Trial ${view.outcome.outcome} at step ${count(view.outcome.step)}: ${view.outcome.reason}`) : null,
      view.refusal ? el("div", { class: "note bad" }, view.refusal.message ?? view.refusal.problem) : null,
      view.withdrawn_by ? el("div", { class: "note" }, `Withdrawn by ${view.withdrawn_by}`) : null,
      view.reason ? el("div", { class: "note" }, view.reason) : null,
      view.damage ? el("div", { class: "note bad" }, view.damage) : null,
    ];
  }

  buttons(view) {
    const button = (label, act, tone = "") => el("button", { type: "button", class: tone, onclick: act }, label);
    return el("div", { class: "buttons" },
      view.step !== null && view.sequence ? button("Show it in the charts", () => this.actions.locate(view)) : null,
      this.actions.allowed() ? button(view.annotation?.time ? "Edit note …" : "Add a note …", () => this.actions.annotate(view)) : null,
      this.actions.allowed() && isRevertable(view) ? button("Revert …", () => this.actions.revert(view), "danger") : null,
      this.actions.allowed() && isWithdrawable(view) ? button("Withdraw …", () => this.actions.withdraw(view), "danger") : null);
  }
}

export const isRevertable = (view) => view.sequence && view.stage === "verified" && !view.reverted_by && !view.heals;
export const isWithdrawable = (view) => ["proposed", "prepared", "scheduled"].includes(view.stage);

const back = () => el("a", { class: "back", href: "#" }, "← The run");

function changesCard(view) {
  const effects = new Map(((view.receipts ?? []).at(-1)?.effects ?? []).map((one) => [one.variable, one]));
  const edits = view.edits.filter((edit) => !String(edit.operation).startsWith("reset")).slice(0, 50);
  const left = view.edits.length - edits.length;
  const named = new Set(view.edits.map((edit) => edit.variable));
  const others = [...effects.values()].filter((one) => !named.has(one.variable)); // Of an update whose edits are not known any more.
  return card("changes-made", "What it changed", el("div", { class: "body stack" },
    edits.length || others.length ? null : el("p", { class: "empty" }, "Its edits are not known here."),
    edits.map((edit) => variableView(edit, effects.get(edit.variable))),
    others.map((one) => variableView({ operation: "", variable: one.variable }, one)),
    left > 0 ? el("p", { class: "dim small" }, `${counted(left, "further edit")}, resets of slots among them.`) : null));
}

function variableView(edit, effect) {
  const factor = edit.factor ?? edit.value;
  const title = el("h3", { class: "variable" }, el("span", { class: "dim" }, `${String(edit.operation).replaceAll("_", " ")} `), breakable(edit.variable),
    factor === null || factor === undefined || effect?.after !== undefined && effect.after !== null ? null : ` ${edit.operation === "scale" ? "by " : ""}${number(factor)}`);
  if (!effect) return el("div", { class: "variable-change" }, title, el("p", { class: "dim small" }, `${shape(edit.shape)}: what it changed was not measured.`));
  if (effect.before !== null || effect.after !== null) {
    return el("div", { class: "variable-change" }, title, el("p", { class: "before-after" }, valueText(effect, effect.before), el("span", { class: "dim" }, " → "), el("strong", {}, valueText(effect, effect.after))));
  }
  const relative = effect.norm ? ` (${number((100 * effect.change) / effect.norm)} % of it)` : "";
  return el("div", { class: "variable-change" }, title,
    pairs([
      ["shape", shape(effect.shape)],
      ["rows touched", effect.rows === null ? null : `${count(effect.rows)} of ${count(effect.shape[0])}`],
      ["norm before", effect.norm === null ? null : number(effect.norm)],
      ["norm of the change", effect.change === null ? null : `${number(effect.change)}${relative}`],
    ]),
    effect.histogram ? histogram(effect.histogram) : null);
}

/** A learning rate below 0 is that many times what the schedule computes. */
function valueText(effect, value) {
  if (value === null) return "not finite";
  if (value >= 0 || !effect.variable.endsWith("/learning_rate")) return number(value);
  return value === -1 ? "the schedule" : `${number(-value)} × the schedule`;
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** How the changes of single values are distributed. */
function histogram({ least, greatest, counts }) {
  const most = Math.max(...counts), total = counts.reduce((sum, one) => sum + one, 0);
  const width = BARS.width / counts.length;
  const bars = counts.map((amount, at) => {
    const height = amount ? Math.max(1.5, (BARS.height * amount) / most) : 0;
    const from = least + ((greatest - least) * at) / counts.length, to = least + ((greatest - least) * (at + 1)) / counts.length;
    return svg("rect", { class: "bar", x: at * width + 0.5, y: BARS.height - height, width: Math.max(1, width - 1), height }, svg("title", {}, `${number(from)} to ${number(to)}: ${count(amount)} of ${count(total)} values`));
  });
  const zero = least < 0 && greatest > 0 ? [svg("line", { class: "zero", x1: (-least / (greatest - least)) * BARS.width, x2: (-least / (greatest - least)) * BARS.width, y1: 0, y2: BARS.height })] : [];
  const label = `Histogram of the change of ${count(total)} values, from ${number(least)} to ${number(greatest)}`;
  return el("figure", { class: "histogram" },
    svg("svg", { viewBox: `0 0 ${BARS.width} ${BARS.height}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, ...bars, ...zero),
    el("figcaption", { class: "dim small" }, el("span", {}, number(least)), el("span", {}, "change of each value"), el("span", {}, number(greatest))));
}

function metricsCard(view) {
  const all = [view.around, ...(view.others ?? [])].filter(Boolean);
  const rows = all.map(({ metric, before, after }) => el("div", { class: "effect" },
    el("h3", {}, metric), el("p", {}, sample(before), el("span", { class: "dim" }, " → "), el("strong", {}, sample(after))),
    spreads(metric, before, after), el("p", { class: "dim small" }, verdict(before, after))));
  return card("effect", "What it did to the metrics", el("div", { class: "body stack" },
    view.trial ? el("p", {}, `On trial: ${trialText(view.trial)}.`) : null,
    rows.length ? rows : el("p", { class: "empty" }, view.sequence ? "No metric was measured both before and after it." : "It has not been applied."),
    rows.length ? el("p", { class: "dim small" }, `Means of the ${counted(all[0].before.steps, "step")} before and the ${counted(all[0].after.steps, "step")} after it, with the standard deviation of single steps.`) : null));
}

/** A mean with its spread; one step has none. */
export const sample = ({ mean, spread, steps }) => (steps > 1 ? `${number(mean)} ± ${number(spread)}` : number(mean));

const LEAST_STEPS = 5; // One step has no spread, and of two or three it says little.

/** Whether two means differ by more than chance explains: by the standard error of the difference. */
export function verdict(before, after) {
  const error = Math.sqrt(before.spread ** 2 / before.steps + after.spread ** 2 / after.steps);
  const change = after.mean - before.mean;
  const ratio = Math.abs(change / before.mean);
  const part = !before.mean ? "" : ` (${ratio < 10 ? `${Number((100 * ratio).toPrecision(2))} %` : `${number(Number(Math.abs(after.mean / before.mean).toPrecision(2)))} times the value before`})`;
  const by = `${change < 0 ? "lower" : "higher"} by ${number(Math.abs(change))}${part}`;
  if (!Number.isFinite(change)) return "not finite";
  if (change === 0) return "the same";
  if (Math.min(before.steps, after.steps) < LEAST_STEPS) return `${by}; too few steps to compare it with the noise`;
  return `${by}, ${Math.abs(change) > 2 * error ? "more than" : "within"} the noise`;
}

/** Both means with their spread on one scale. */
function spreads(metric, before, after) {
  const sides = [before, after];
  const low = Math.min(...sides.map((one) => one.mean - one.spread)), high = Math.max(...sides.map((one) => one.mean + one.spread));
  if (!Number.isFinite(high - low) || high === low) return null;
  const x = (value) => 48 + (264 * (value - low)) / (high - low);
  const row = (one, y, name) => [
    svg("text", { x: 0, y: y + 3.5 }, name),
    svg("line", { class: `whisker ${name}`, x1: x(one.mean - one.spread), x2: x(one.mean + one.spread), y1: y, y2: y }),
    svg("circle", { class: `mean ${name}`, cx: x(one.mean), cy: y, r: 5 }),
  ];
  return svg("svg", { class: "spreads", viewBox: "0 0 320 36", role: "img", "aria-label": `${metric}: before ${sample(before)}, after ${sample(after)}` }, ...row(before, 9, "before"), ...row(after, 27, "after"));
}

function workersCard(view) {
  const receipts = (view.receipts ?? []).slice().reverse();
  const rows = receipts.flatMap((one) => Object.entries(one.digests).map(([rank, digest], at, all) => {
    const first = all[0][1];
    return el("tr", {},
      el("td", {}, receipts.length > 1 ? `${rank}, attempt ${one.attempt}` : rank),
      el("td", { class: "mono" }, breakableDigest(digest)),
      el("td", { class: "keep" }, el("span", { class: `chip ${digest === first ? "good" : "bad"}` }, all.length === 1 ? "only one" : digest === first ? "equal" : "differs")));
  }));
  const head = el("thead", {}, el("tr", {}, ["worker", "digest of what it touched", ""].map((name) => el("th", { scope: "col" }, name))));
  return card("on-workers", "On every worker", el("div", { class: "body scroll" },
    rows.length ? el("table", {}, head, el("tbody", {}, rows)) : el("p", { class: "empty" }, "No worker has reported yet.")));
}

const breakableDigest = (digest) => (digest.match(/.{1,8}/g) ?? []).flatMap((part, at) => (at ? [el("wbr"), part] : [part]));

function factsCard(view) {
  return card("facts", "Record", el("div", { class: "body" }, pairs([
    ["id", el("span", { class: "mono" }, view.id)], ["author", view.author], ["size", view.nbytes ? size(view.nbytes) : null],
    ["committed", view.committed_at ? moment(view.committed_at) : null], ["attempt", view.attempt],
    ["took", view.propose_to_applied_secs ? `${seconds(view.propose_to_applied_secs)} from the proposal until the last worker had applied it` : null],
    ["paused", view.stall_secs ? `${seconds(view.stall_secs)} of training` : null],
    ["content", view.content_digest ? el("span", { class: "mono" }, view.content_digest) : null], ["sha256", view.sha256 ? el("span", { class: "mono" }, view.sha256) : null],
    ["expected", view.refusal?.expected], ["received", view.refusal?.received], ["worker", view.refusal?.worker], ["what to do", view.refusal?.remedy],
  ])));
}
