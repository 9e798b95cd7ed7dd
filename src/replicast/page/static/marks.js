// Updates, trials, restarts and checkpoints above a chart: links, in a row that the arrow keys walk through.

import { el, setText } from "./dom.js";
import { counted } from "./format.js";

const KINDS = {
  restart: { label: "restart", color: "--bad", path: "M1 0 5 4 9 0 10 1 6 5 10 9 9 10 5 6 1 10 0 9 4 5 0 1Z" },
  trial: { label: "on trial", color: "--series-3", path: "M5 0 10 5 5 10 0 5Z" },
  update: { label: "update", color: "--series-2", path: "M5 0 10 10H0Z" },
  start: { label: "start", color: "--series-4", path: "M5 0A5 5 0 0 1 5 10A5 5 0 0 1 5 0Z" },
  checkpoint: { label: "checkpoint", color: "--series-6", path: "M1 1H9V9H1Z" },
}; // In the order of their weight: of several in one place the first kind is shown.
const APART = 16, MANY_APART = 36; // Pixels; marks that are closer become one, which needs room for their number.
const MOST_TOLD = 8;

export class Marks {
  /** @param zoom called with the first and the last of several marks in one place */
  constructor(plot, zoom) {
    this.plot = plot;
    this.zoom = zoom;
    this.all = [];
    this.nodes = new Map();
    this.tip = el("div", { class: "mark-tip", role: "tooltip", id: "mark-tip", hidden: true });
    this.row = el("div", { class: "mark-row", role: "group", onkeydown: (event) => this.key_(event) });
    this.node = el("div", { class: "marks" }, this.row, this.tip);
    this.key = el("div", { class: "key" });
  }

  /** Says whether they have changed. @param left what is said of marks that are left out */
  set(marks, left) {
    const text = JSON.stringify([marks, left]);
    if (text === this.known) return false;
    this.known = text;
    this.all = marks.sort((a, b) => a.step - b.step);
    const kinds = Object.keys(KINDS).filter((kind) => marks.some((mark) => mark.kind === kind));
    this.key.replaceChildren(...kinds.map((kind) => el("span", {}, symbol(kind), KINDS[kind].label)), ...(left ? [el("span", {}, left)] : []));
    this.row.setAttribute("aria-label", `${counted(marks.length, "mark")}: updates, trials, restarts and checkpoints. The arrow keys move between them`);
    return true;
  }

  /** Shows them. @param place gives the pixels from the left, or null for what is not visible; `bottom` is where their lines end. */
  place(place, bottom) {
    const groups = [];
    for (const isCheckpoint of [false, true]) {
      let last = null;
      for (const mark of this.all.filter((one) => (one.kind === "checkpoint") === isCheckpoint)) {
        const left = place(mark);
        if (left === null) continue;
        if (last && left - last.left < (last.marks.length > 1 ? MANY_APART : APART)) last.marks.push(mark);
        else groups.push(last = { left, marks: [mark], isCheckpoint });
      }
    }
    const old = this.nodes;
    this.nodes = new Map(groups.sort((a, b) => a.left - b.left).map((group) => {
      const key = `${group.marks[0].key} ${group.marks.length} ${group.marks.at(-1).key}`;
      const node = old.get(key) ?? this.made(group);
      node.style.left = `${group.left.toFixed(1)}px`;
      node.style.top = group.isCheckpoint ? `${bottom - 15}px` : "2px";
      node.style.setProperty("--below", `${bottom - 26}px`);
      return [key, node];
    }));
    const nodes = [...this.nodes.values()];
    if (nodes.length !== this.row.children.length || nodes.some((node, at) => node !== this.row.children[at])) {
      const focused = this.row.contains(document.activeElement) ? document.activeElement.dataset.first : null;
      this.row.replaceChildren(...nodes);
      if (focused !== null) nodes.find((node) => node.dataset.first === focused)?.focus();
      else this.tip.hidden = true;
    }
    if (nodes.length && !nodes.some((node) => node.tabIndex === 0)) nodes[0].tabIndex = 0;
  }

  made({ marks, isCheckpoint }) {
    const [first, last] = [marks[0], marks.at(-1)];
    const kind = Object.keys(KINDS).find((one) => marks.some((mark) => mark.kind === one));
    const told = [...marks.slice(0, MOST_TOLD).map((mark) => mark.text), ...(marks.length > MOST_TOLD ? [`and ${marks.length - MOST_TOLD} more`] : [])];
    const apart = last.step > first.step;
    const text = told.join("\n") + (apart ? "\nSelect to zoom in" : "");
    const parts = [symbol(kind), marks.length > 1 ? el("span", { class: "many" }, String(marks.length)) : null];
    const show = (event) => this.show(event.currentTarget, text);
    const hide = () => { this.tip.hidden = true; };
    const common = { class: `mark${isCheckpoint ? " at-bottom" : ""}`, "data-kind": kind, "data-first": first.key, tabIndex: -1, "aria-label": text, onpointerenter: show, onpointerleave: hide, onfocus: show, onblur: hide };
    const node = apart ? el("button", { type: "button", ...common, onclick: () => this.zoom(...around(first, last)) }, parts) : el("a", { href: last.href, ...common }, parts);
    node.style.setProperty("--color", `var(${KINDS[kind].color})`);
    return node;
  }

  show(node, text) {
    for (const one of this.row.children) one.tabIndex = one === node ? 0 : -1;
    setText(this.tip, text);
    this.tip.hidden = false;
    const most = this.node.clientWidth - this.tip.offsetWidth - 4;
    this.tip.style.left = `${Math.max(4, Math.min(most, node.offsetLeft - this.tip.offsetWidth / 2))}px`;
    this.tip.style.top = `${node.classList.contains("at-bottom") ? node.offsetTop - this.tip.offsetHeight - 6 : node.offsetTop + node.offsetHeight + 4}px`;
  }

  key_(event) {
    const nodes = [...this.row.children], at = nodes.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: nodes.length - 1 }[event.key];
    if (event.key === "Escape") this.tip.hidden = true;
    if (to === undefined || !nodes[to]) return;
    event.preventDefault();
    nodes[to].focus();
  }
}

/** What to zoom to, so that two marks are apart. */
function around(first, last) {
  const part = (name) => Math.max((last[name] - first[name]) / 4, name === "step" ? 1 : 0.1);
  return [{ step: first.step - part("step"), time: first.time - part("time") }, { step: last.step + part("step"), time: last.time + part("time") }];
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
