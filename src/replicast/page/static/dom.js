// Builds and changes the page. Whatever comes from a job goes in as text: there is no HTML from data anywhere.

import { plain } from "./format.js";

/** An element with properties, attributes (`aria-…`, `data-…`), listeners (`onclick`) and children. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name in node && !name.includes("-") && name !== "list" && name !== "form") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : plain(String(child)))));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Sets a text, and touches the page only if it has changed: a screen reader hears nothing twice. */
export function setText(node, text) {
  const value = plain(String(text ?? ""));
  if (node.textContent !== value) node.textContent = value;
}

/** Draws a part of the page when called; later, if the mouse is pressed: a click is lost if what was pressed moves or is replaced. */
export function unlessPressed(draw) {
  let later;
  return function drawer() {
    clearTimeout(later);
    if (document.querySelector("main:active")) later = setTimeout(drawer, 100);
    else draw();
  };
}

/**
 * Shows a list, and replaces only entries that have changed. An open entry stays open, and the focus stays.
 * @param make makes the element of an item; called again when `JSON.stringify(item)` has changed.
 */
export function showList(parent, items, keyOf, make) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  const focused = parent.contains(document.activeElement) ? document.activeElement.dataset.focus : undefined;
  const nodes = items.map((item) => {
    const key = String(keyOf(item));
    const mark = JSON.stringify(item);
    const before = old.get(key);
    if (before && before.replicastMark === mark) return before;
    const node = make(item);
    node.dataset.key = key;
    node.replicastMark = mark;
    if (before?.querySelector("details[open]")) node.querySelector("details")?.setAttribute("open", "");
    return node;
  });
  const same = nodes.length === parent.children.length && nodes.every((node, at) => node === parent.children[at]);
  if (same) return;
  parent.replaceChildren(...nodes);
  if (focused !== undefined) [...parent.querySelectorAll("[data-focus]")].find((one) => one.dataset.focus === focused)?.focus();
}

/** A name that may be broken into lines after each "/", and nowhere else. */
export function breakable(name) {
  return String(name).split(/(?<=\/)/).flatMap((part, at) => (at ? [el("wbr"), part] : [part]));
}

/** Tells a screen reader something. */
export function say(text) {
  setText(byId("said"), text);
}

/** A definition list of those pairs that have a value. */
export function pairs(entries) {
  const list = el("dl", { class: "pairs" });
  for (const [name, value] of entries) {
    if (value === undefined || value === null || value === "") continue;
    list.append(el("dt", {}, name), el("dd", {}, value));
  }
  return list;
}

export function card(id, title, ...rest) {
  return el("section", { class: "card", id, "aria-labelledby": `${id}-title` },
    el("div", { class: "head" }, el("h2", { id: `${id}-title` }, title)), ...rest);
}
