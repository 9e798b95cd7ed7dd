// The token: typed in, checked by the server, kept in this tab only.

import { get, Refused, token } from "./api.js";
import { byId, el, setText } from "./dom.js";

const listeners = new Set();
export const onToken = (listener) => listeners.add(listener);
export const hasToken = () => token.get() !== "";

export function showTokenButton() {
  const button = byId("token-button");
  setText(button, hasToken() ? "Forget token" : "Enter token");
  button.onclick = () => {
    if (hasToken()) changed("");
    else askForToken();
  };
}

function changed(value) {
  token.set(value);
  showTokenButton();
  for (const listener of listeners) listener();
}

/** Asks until the server accepts a token or the reader gives up. */
export function askForToken(why = "Actions need the token that `replicast serve` was started with.") {
  const input = el("input", { type: "password", id: "token", name: "token", autocomplete: "off", required: true, spellcheck: false });
  const problem = el("div", { class: "note bad", role: "alert", hidden: true });
  const dialog = el("dialog", { "aria-labelledby": "token-title" },
    el("form", { method: "dialog", onsubmit: submit },
      el("h2", { id: "token-title" }, "Enter the token"),
      el("p", {}, why),
      el("div", { class: "field" }, el("label", { for: "token" }, "Token"), input,
        el("span", { class: "hint" }, "It is in the file given to --token-file. This tab keeps it until it is closed.")),
      problem,
      el("div", { class: "buttons" }, el("button", { class: "main", type: "submit" }, "Use it"), el("button", { type: "button", onclick: () => dialog.close() }, "Cancel"))));

  async function submit(event) {
    event.preventDefault();
    try {
      await get("api/runs", input.value.trim());
      changed(input.value.trim());
      dialog.close();
    } catch (error) {
      problem.hidden = false;
      setText(problem, error instanceof Refused ? error.message : "The server does not answer.");
    }
  }

  document.body.append(dialog);
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => dialog.addEventListener("close", () => { dialog.remove(); resolve(hasToken()); }));
}
