// Numbers, times and sizes for people.

const whole = new Intl.NumberFormat("en-US");

export const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));
export const counted = (amount, thing) => `${count(amount)} ${thing}${amount === 1 ? "" : "s"}`;

export function number(value) {
  if (value === null || value === undefined) return "";
  const given = Number(value);
  if (!Number.isFinite(given)) return String(value);
  if (given !== 0 && (Math.abs(given) < 1e-4 || Math.abs(given) >= 1e6)) return given.toExponential(2).replace(/\.?0*e\+?/, "e");
  return String(Number(given.toPrecision(4)));
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = bytes, at = 0;
  while (value >= 999.5 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${at === 0 || value >= 99.95 ? Math.round(value) : value.toFixed(1)} ${units[at]}`;
}

export function seconds(secs) {
  if (secs === null || secs === undefined) return "";
  if (secs < 0.0995) return `${(secs * 1000).toFixed(secs < 0.00995 ? 1 : 0)} ms`;
  return secs < 9.995 ? `${secs.toFixed(2)} s` : `${Math.round(secs)} s`;
}

export function duration(secs) {
  if (secs < 90) return `${Math.max(0, Math.round(secs))} s`;
  const minutes = Math.round(secs / 60);
  if (minutes < 90) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 36) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

let offset = 0; // The server's clock against the browser's, in seconds.
export const setServerTime = (secs) => { offset = secs - Date.now() / 1000; };
const serverTime = () => Date.now() / 1000 + offset;
export const ago = (secs) => (secs ? `${duration(Math.max(0, serverTime() - secs))} ago` : "");
export const moment = (secs) => (secs ? new Date(secs * 1000).toLocaleString() : "");

/** Text without what is meant for a terminal: escape sequences and control characters. */
export function plain(text) {
  return text
    .replace(/\u001b\[[0-9;?]*[ -\/]*[@-~]|\u001b\][^\u0007\u001b]*(\u0007|\u001b\\)?|\u001b./g, "")
    .replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, "");
}

export const shortId = (id) => (/^[0-9a-f]{32}$/.test(id) ? id.slice(0, 8) : id);

export function shape(dimensions) {
  if (!dimensions) return "whole";
  return dimensions.length ? dimensions.join("×") : "a number";
}

/** What an update does or has done, in a few words: "assign optimizer/learning_rate 0.001 → 0.0005 (+3)". */
export function editsText(view, most = 2) {
  const texts = view.texts ?? [];
  return texts.slice(0, most).join(", ") + (texts.length > most ? ` (+${texts.length - most})` : "");
}

export function trialText(trial) {
  const part = trial.max_increase ?? 0;
  const worse = part > 0 ? `at most ${number(part * 100)} % worse` : part < 0 ? `at least ${number(-part * 100)} % better` : "no worse";
  return `${counted(trial.steps, "step")}, ${trial.metric}, ${worse}`;
}
