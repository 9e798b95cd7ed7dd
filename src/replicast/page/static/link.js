// Whether the server answers, and what else needs to be said at the top of the page.

import { byId, say, setText } from "./dom.js";

const GONE = "The server does not answer. This page shows the last state it received and reconnects when the server is back. The job does not depend on the server.";
const banners = new Map();

/** Shows or removes a message at the top; the one about the server comes first. */
export function banner(what, text, careful = false) {
  if (text) banners.set(what, { text, careful });
  else banners.delete(what);
  const first = banners.get("server") ?? [...banners.values()][0];
  const node = byId("banner");
  node.hidden = !first;
  node.classList.toggle("careful", Boolean(first?.careful));
  setText(node, first?.text ?? "");
}

function show(state, text) {
  byId("link").dataset.link = state;
  setText(byId("link-text"), text);
}

let lost = false;

export const link = {
  live() {
    if (lost) say("The server answers again");
    lost = false;
    show("live", "live");
    banner("server", "");
  },
  report() {
    show("", "report");
  },
  lost() {
    lost = true;
    show("lost", "no server");
    banner("server", GONE);
  },
};
