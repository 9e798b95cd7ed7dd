// A report (page/assets.py): the page with the data of a run in the file. It asks no server; what auditors need beside it is here.

import { byId, card, el } from "./dom.js";
import { count, counted, editsText, moment, seconds } from "./format.js";

const inlined = byId("report-data");
export const report = inlined ? JSON.parse(inlined.textContent) : null;

/** What a server would answer. */
export function answer(path) {
  const end = path.split("/").at(-1);
  if (/\/updates\/[^/]*$/.test(path)) return update(decodeURIComponent(end));
  return report.answers[path] ?? report.answers[end] ?? report.answers[end.split("?")[0]];
}

function update(which) {
  const { scheduled, waiting, refused } = report.status;
  const found = [...report.answers.updates.updates, ...scheduled, ...waiting, ...refused].find((view) => view.id === which || String(view.sequence) === which);
  if (!found) throw new Error(`This report has no update ${which}.`);
  return found;
}

const WRITTEN = "As the job wrote them; not part of the chain: a change to them does not show here.";

export function reportCards() {
  const { chain, status } = report;
  const broken = chain.problems.length > 0;
  const receipts = answer("updates").updates.flatMap((view) => view.receipts.map((one) => ({ ...one, what: editsText(view, 20) })));
  return [
    card("chain", "The journal", el("div", { class: "body stack" },
      el("p", { class: `note ${broken ? "bad" : "good"}` }, broken
        ? `${chain.problems.length} of ${counted(chain.length, "record")} are not what was written.`
        : `All ${counted(chain.length, "record")} are as they were written. Each contains the hash of the one before it.`),
      broken ? el("ul", {}, chain.problems.map((problem) => el("li", {}, problem))) : null,
      broken ? null : el("p", {}, "The hash of the last one: ", el("code", { class: "mono" }, chain.last || "there is none yet")),
      el("p", { class: "dim small" }, `The chain has the updates and their receipts. Metrics, audits, checkpoints, and starts and ends are as the job wrote them: a change to them does not show here. Keep a copy of the hash elsewhere: it shows later whether an old record was changed. Written on ${moment(status.time)}.`))),
    table("receipts", "Receipts", "What each worker reported, in each attempt that applied the update. Part of the chain.",
      ["#", "attempt", "step", "what", "outcome", "digests by worker", "paused", "verified"],
      receipts.map((one) => [one.sequence, one.attempt, count(one.step), one.what, one.stage, digests(one), seconds(one.stall_secs), moment(one.verified_at)])),
    table("changes", "Starts, restarts and ends", WRITTEN, ["time", "state", "attempt", "worker", "step", "reason"],
      report.changes.map((one) => [moment(one.time), one.state, one.attempt, one.worker ?? "", count(one.step), one.reason ?? ""])),
  ];
}

function digests(receipt) {
  return Object.entries(receipt.digests).map(([rank, digest]) => el("div", { class: "mono small" }, `${rank}: ${digest}`));
}

function table(id, title, about, heads, rows) {
  const made = el("table", {}, el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell) => el("td", {}, cell))))));
  return card(id, title, el("div", { class: "body scroll" }, el("p", { class: "dim small" }, about), rows.length ? made : el("p", { class: "empty" }, "None")));
}
