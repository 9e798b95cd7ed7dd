// The page: a list of runs at "/", one run at "/NAME"; with a single run, "/" is its page.

import { get, Refused } from "./api.js";
import { byId, el } from "./dom.js";
import { link } from "./link.js";
import { report } from "./report.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { askForToken, showTokenButton } from "./token.js";

async function start() {
  const name = report ? "" : decodeURIComponent(location.pathname.slice(location.pathname.lastIndexOf("/") + 1));
  for (;;) {
    try {
      if (name) {
        const run = await get(`api/runs/${encodeURIComponent(name)}`);
        link.live();
        await showRun(run);
      } else {
        const runs = await get("api/runs");
        link.live();
        showTokenButton();
        if (runs.length === 1) await showRun(runs[0]);
        else await showRuns(runs);
      }
      return;
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        showTokenButton();
        await askForToken("This server shows its runs to those who have its token.");
      } else if (error instanceof Refused && error.status === 404) {
        byId("main").replaceChildren(el("h1", {}, `There is no run “${name}” here`), el("p", {}, el("a", { href: "./" }, "All runs of this server")));
        return;
      } else {
        if (!(error instanceof Refused)) console.error(error);
        link.lost();
        await new Promise((resolve) => setTimeout(resolve, 2000));
      }
    }
  }
}

start();
