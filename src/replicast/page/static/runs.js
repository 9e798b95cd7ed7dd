// The list of runs of a server.

import { get } from "./api.js";
import { byId, el, showList } from "./dom.js";
import { ago, count } from "./format.js";
import { link } from "./link.js";
import { stateChip } from "./state.js";

export async function showRuns(first) {
  const body = el("tbody", { class: "run-list" });
  const title = el("h1", {}, "Runs");
  const empty = el("p", { class: "empty" }, "There is no run here yet. This page shows one as soon as its job has begun.");
  const columns = ["run", "state", "step", "workers", "heard of"];
  const head = el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col", class: { workers: "wide-only", step: "right" }[name] ?? "" }, name))));
  const table = el("section", { class: "card" }, el("div", { class: "body scroll" }, el("table", {}, head, body)));
  byId("main").replaceChildren(el("div", { class: "hero" }, title), table, empty);
  document.title = "Runs · replicast";
  for (let runs = first; ; ) {
    empty.hidden = runs.length > 0;
    table.hidden = runs.length === 0;
    const order = [...runs].sort((a, b) => Number(b.running) - Number(a.running) || (b.heard_at ?? 0) - (a.heard_at ?? 0));
    showList(body, order.map((run) => ({ ...run, heard: ago(run.heard_at) })), (run) => run.name, row);
    await new Promise((resolve) => setTimeout(resolve, 3000));
    try {
      runs = await get("api/runs");
      link.live();
    } catch {
      link.lost();
    }
    if (first.length === 0 && runs.length === 1) { location.reload(); return; }
  }
}

/** What the sentence says beside the state, the step and the age, which have columns of their own. */
function more(run) {
  const said = run.sentence.replace(/ at step \d+/, "").replace(/, [^,]+ ago$/, "");
  return said.toLowerCase() === run.state ? "" : said;
}

function row(run) {
  return el("tr", {},
    el("td", { class: "first" }, el("a", { href: encodeURIComponent(run.name), "data-focus": run.name }, run.name), el("div", { class: "dim small" }, more(run))),
    el("td", {}, stateChip(run.state)),
    el("td", { class: "right keep" }, count(run.step)),
    el("td", { class: "wide-only keep" }, count(run.workers)),
    el("td", { class: "dim keep" }, run.heard));
}
