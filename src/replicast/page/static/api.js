// Requests to the server. The token is in this tab's session storage, and is sent in a header, never in an address.

import { answer, report } from "./report.js";

const TOKEN = "replicast-token";

export class Refused extends Error {
  constructor(status, error) {
    super(error?.problem ?? `The server answered ${status}`);
    this.status = status;
    this.fields = error ?? { problem: this.message };
  }
}

export const token = {
  get: () => (report ? "" : sessionStorage.getItem(TOKEN) ?? ""),
  set: (value) => (value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN)),
};

function headers(more = {}, given = token.get()) {
  return given ? { ...more, Authorization: `Bearer ${given}` } : more;
}

async function answered(response) {
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(response.status, body.error);
  return body;
}

export async function get(path, given = token.get()) {
  if (report) return answer(path);
  const signal = AbortSignal.timeout(90_000);
  return answered(await fetch(path, { headers: headers({}, given), cache: "no-store", signal }));
}

export async function post(path, body = {}) {
  const options = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body) };
  return answered(await fetch(path, options));
}

/** Sends a file, and tells how far it is. */
export function upload(path, file, onProgress) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path);
    for (const [name, value] of Object.entries(headers({ "Content-Type": "application/octet-stream" }))) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => event.lengthComputable && onProgress(event.loaded / event.total);
    request.onerror = () => reject(new Refused(0, { problem: "The connection was lost while the file was sent", remedy: "Nothing was changed. Try again" }));
    request.onload = () => {
      let body = {};
      try { body = JSON.parse(request.responseText); } catch { /* An answer without JSON has no reason in it. */ }
      if (request.status >= 200 && request.status < 300) resolve(body);
      else reject(new Refused(request.status, body.error));
    };
    request.send(file);
  });
}

/** A name for an update, so that sending it twice is a no-op. Works without a secure context too. */
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

const QUIET_MS = 40_000; // The server says something every 15 s.
const MAX_WAIT_MS = 8_000;

/**
 * Follows server-sent events for ever; connects again by itself. By fetch, since EventSource sends no header.
 * @param on {open, lost, denied, event(name, data)}
 */
export async function follow(path, on) {
  for (let wait = 500; ; wait = Math.min(MAX_WAIT_MS, wait * 2)) {
    const control = new AbortController();
    let timer = setTimeout(() => control.abort(), QUIET_MS);
    try {
      const response = await fetch(path, { headers: headers({ Accept: "text/event-stream" }), cache: "no-store", signal: control.signal });
      if (response.status === 401) { on.denied(); return; }
      if (!response.ok) throw new Refused(response.status, (await response.json().catch(() => ({}))).error);
      on.open();
      wait = 500;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) throw new Error("The stream has ended");
        clearTimeout(timer);
        timer = setTimeout(() => control.abort(), QUIET_MS);
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) deliver(block, on);
      }
    } catch (error) {
      on.lost(error);
    } finally {
      clearTimeout(timer);
      control.abort();
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

function deliver(block, on) {
  const fields = new Map(block.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1).trim()]));
  if (fields.has("event") && fields.has("data")) on.event(fields.get("event"), JSON.parse(fields.get("data")));
}
