// Updates: what waits, what was applied and by whom, and what was refused and why.

import { card, el, pairs, setText, showList } from "./dom.js";
import { ago, count, counted, editsText, moment, number, seconds, shortId, size, trialText } from "./format.js";
import { noteView } from "./notes.js";
import { stageChip } from "./state.js";
import { addressOf, isRevertable, isWithdrawable, sample } from "./update.js";

const MOST = 1000; // That the server lists.
const CHANGING = new Set(["update", "trial", "function", "revert"]); // Those that change no value are shown under Workers.

export class Updates {
  /** @param actions {allowed(), withdraw(view), revert(view), more()} */
  constructor(actions) {
    this.actions = actions;
    this.open = new Set();
    this.node = card("updates", "Updates");
    this.body = el("div", { class: "body" });
    this.node.append(this.body);
    this.groups = new Map(["under way", "waiting", "applied", "refused or withdrawn"].map((name) => [name, this.group(name)]));
    this.more = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => actions.more() }, "Show more");
    this.groups.get("applied").node.append(this.more);
    this.empty = el("p", { class: "empty", hidden: true });
    this.body.append(this.empty, ...[...this.groups.values()].map((group) => group.node));
  }

  group(name) {
    const list = el("ul", { class: "list" });
    const title = el("h3", { class: "group-title" }, name);
    return { list, title, node: el("div", { hidden: true }, title, list) };
  }

  show(status, applied) {
    const known = new Set([...status.scheduled, ...status.waiting].map((view) => view.id));
    const others = status.operations.filter((one) => CHANGING.has(one.kind) && one.stage !== "scheduled" && !known.has(one.id));
    const allowed = this.actions.allowed();
    const kept = this.kept();
    this.fill("under way", others, (one) => `${one.kind}-${one.id}`, operation);
    this.fill("waiting", [...status.waiting, ...status.scheduled].map((view) => ({ ...view, allowed })), (view) => view.id, (view) => this.entry(view));
    this.fill("applied", applied.slice().reverse().map((view) => ({ ...view, allowed, ago: ago(view.verified_at ?? view.committed_at ?? view.at) })), (view) => view.id, (view) => this.entry(view));
    this.fill("refused or withdrawn", status.refused.slice().reverse().map((view) => ({ ...view, ago: ago(view.at) })), (view) => view.id, (view) => this.entry(view));
    const all = Math.max(0, ...applied.map((view) => view.sequence)); // They are numbered from 1.
    setText(this.groups.get("applied").title, all > applied.length ? `applied: the last ${count(applied.length)} of ${count(all)}${applied.length < MOST ? "" : "; all of them: replicast log RUN"}` : "applied");
    this.more.hidden = all <= applied.length || applied.length >= MOST;
    const total = [...this.groups.values()].reduce((sum, group) => sum + group.list.children.length, 0);
    this.empty.hidden = total > 0;
    setText(this.empty, status.running ? "No update yet. Upload one under Actions, or run: replicast push RUN --set optimizer/learning_rate=0.0005" : "No update was made");
    kept();
  }

  /**
   * What is open and has the focus stays so, also where an entry goes to another group, and is in none for a moment: what waits
   * and what was applied are read one after the other. Call the result afterwards.
   */
  kept() {
    for (const node of this.body.querySelectorAll("li")) this.open.delete(node.dataset.key);
    for (const node of this.body.querySelectorAll("li:has(> details[open])")) this.open.add(node.dataset.key);
    const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.focus : undefined;
    return () => {
      for (const node of this.body.querySelectorAll("li")) if (this.open.has(node.dataset.key)) node.querySelector("details")?.setAttribute("open", "");
      if (focused && !this.body.contains(document.activeElement)) this.body.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
    };
  }

  fill(name, items, keyOf, make) {
    const group = this.groups.get(name);
    group.node.hidden = items.length === 0;
    showList(group.list, items, keyOf, make);
  }

  entry(view) {
    const what = editsText(view) || (Number.isInteger(view.reverts) ? `revert update ${view.reverts}` : view.refusal ? view.refusal.problem : `update ${shortId(view.id)}`);
    const meta = [view.step !== null && view.step !== undefined ? `step ${count(view.step)}` : "", view.nbytes ? size(view.nbytes) : "", view.ago ?? "", view.author, view.note ? `“${view.note}”` : ""];
    const summary = el("summary", { "data-focus": `entry-${view.id}` },
      el("span", { class: "number" }, view.sequence ? `#${view.sequence}` : ""),
      el("span", { class: "what" }, what), el("span", {}, stageChip(view.stage)),
      el("span", { class: "meta" }, meta.filter(Boolean).join(" · ")),
      view.annotation?.time ? el("span", { class: "meta" }, noteView(view.annotation)) : null,
      view.outcome ? el("span", { class: "meta" }, `trial ${view.outcome.outcome} at step ${count(view.outcome.step)}: ${view.outcome.reason}`) : null,
      view.reverts ? el("span", { class: "meta" }, `reverts update ${view.reverts}`) : null,
      view.reverted_by ? el("span", { class: "meta reason" }, `reverted by update ${view.reverted_by}`) : null,
      view.waits_for ? el("span", { class: "meta" }, `waits for ${view.waits_for}`) : null,
      view.refusal && what !== view.refusal.problem ? el("span", { class: "meta reason" }, view.refusal.problem) : null,
      view.withdrawn_by ? el("span", { class: "meta" }, `withdrawn by ${view.withdrawn_by}`) : null,
      view.reason ? el("span", { class: "meta reason" }, view.reason) : null);
    return el("li", {}, el("details", { class: "entry" }, summary, el("div", { class: "more" }, this.details(view), this.buttons(view))));
  }

  details(view) {
    const digests = Object.entries(view.digests ?? {});
    const same = new Set(digests.map(([, digest]) => digest)).size === 1;
    const refusal = view.refusal ?? {};
    return pairs([
      ["id", el("span", { class: "mono" }, view.id)],
      ["author", view.author], ["note", view.note],
      ["edits", (view.texts ?? []).length > 2 ? editsText(view, 20) : null],
      ["digest", digests.length ? el("span", { class: "mono" }, same ? `${digests[0][1]}, ${digests.length > 1 ? `the same on ${digests.length} workers` : "on the only worker"}` : digests.map(([rank, digest]) => `worker ${rank}: ${digest}`).join("; ")) : null],
      ["content", view.content_digest ? el("span", { class: "mono" }, view.content_digest) : null],
      ["sha256", view.sha256 ? el("span", { class: "mono" }, view.sha256) : null],
      ["on trial", view.trial ? trialText(view.trial) : null],
      ["before and after", trialNumbers(view) ?? aroundText(view.around)],
      ["took", view.propose_to_applied_secs ? `${seconds(view.propose_to_applied_secs)}; training paused for ${seconds(view.stall_secs)}` : null],
      ["committed", view.committed_at ? moment(view.committed_at) : null],
      ["attempts", (view.receipts ?? []).length > 1 ? `applied in ${counted(view.receipts.length, "attempt")}; the last one counts` : null],
      ["variable", refusal.variable], ["expected", refusal.expected], ["received", refusal.received], ["worker", refusal.worker], ["what to do", refusal.remedy],
    ]);
  }

  buttons(view) {
    const name = view.sequence ? `update ${view.sequence}` : view.id;
    const act = isWithdrawable(view) ? ["Withdraw …", () => this.actions.withdraw(view)] : ["Revert …", () => this.actions.revert(view)];
    const button = () => el("button", { type: "button", class: "tiny", "data-focus": `act-${view.id}`, onclick: act[1], "aria-label": `${act[0]} ${name}` }, act[0]);
    return el("div", { class: "buttons" },
      el("a", { class: "button tiny", href: addressOf(view), "data-focus": `open-${view.id}`, "aria-label": `Histogram, effect and digests of ${name}` }, "Histogram, effect, digests"),
      view.allowed && (isWithdrawable(view) || isRevertable(view)) ? button() : null);
  }
}

function trialNumbers(view) {
  const outcome = view.outcome;
  return outcome && outcome.before !== null && outcome.during !== null ? `${outcome.metric} ${number(outcome.before)} → ${number(outcome.during)} in the trial` : null;
}

/** What a metric was before and after an update, and how much it varied. */
function aroundText(around) {
  const said = (one) => `${sample(one)} (${counted(one.steps, "step")})`;
  return around ? `${around.metric} ${said(around.before)} → ${said(around.after)}` : null;
}

function operation(one) {
  const who = [one.author, one.note ? `“${one.note}”` : ""].filter(Boolean).join(" · ");
  return el("li", {}, el("div", { class: "entry" }, el("div", { class: "hero-line" },
    el("span", { class: "what" }, `${one.kind} ${shortId(String(one.id ?? ""))}`), stageChip(one.stage),
    el("span", { class: "dim small" }, [one.step !== null && one.step !== undefined ? `step ${count(one.step)}` : "", one.waits_for ? `waits for ${one.waits_for}` : "", who].filter(Boolean).join(" · ")))));
}
