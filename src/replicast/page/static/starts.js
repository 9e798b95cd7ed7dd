// How a job was started, each time: the command, the commit, the versions.

import { card, el } from "./dom.js";
import { ago } from "./format.js";

/** What a start is told by: its arguments one by one, the commit, the versions. */
export function startFacts(start) {
  const [script, ...given] = start.command;
  const facts = script === undefined ? [] : [["script", script]];
  let place = 0;
  for (let at = 0; at < given.length; at += 1) {
    const [name, ...value] = given[at].split("=");
    if (!given[at].startsWith("-") && !value.length) { place += 1; facts.push([`argument ${place}`, given[at]]); }
    else if (value.length) facts.push([name, value.join("=")]);
    else if (given[at + 1] !== undefined && !/^--?[a-z]/i.test(given[at + 1])) { facts.push([name, given[at + 1]]); at += 1; }
    else facts.push([name, "given"]);
  }
  if (start.commit) facts.push(["commit", start.commit.replace(/^([0-9a-f]{10})[0-9a-f]*/, "$1").replace("-dirty", ", with changed files")]);
  return [...facts, ...Object.entries(start.versions)];
}

/** How a job was started, each time. */
export class Starts {
  constructor() {
    this.body = el("div", { class: "body stack" });
    this.node = card("starts", "Starts", this.body);
    this.node.hidden = true;
  }

  show(starts) {
    const told = starts.filter((start) => start.command.length);
    const text = JSON.stringify(told);
    this.node.hidden = told.length === 0;
    if (this.text === text) return;
    this.text = text;
    this.body.replaceChildren(...told.slice().reverse().map((start, at) => el("details", { open: at === 0 },
      el("summary", {}, `attempt ${start.attempt}`, el("span", { class: "dim small" }, ` ${ago(start.at)}, on ${start.host}`)),
      el("code", { class: "command" }, start.command.join(" ")),
      el("dl", { class: "pairs" }, startFacts(start).filter(([name]) => name === "commit" || name in start.versions).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])))));
  }
}
