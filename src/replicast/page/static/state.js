// The state of a run and the stage of an update, each with its colour.

import { el } from "./dom.js";

const STATES = { training: "good", finished: "good", waiting: "accent", starting: "accent", restarting: "careful", stopped: "careful", lost: "bad", failed: "bad" };
const STAGES = { verified: "good", committed: "accent", applied: "accent", refused: "bad", failed: "bad", reverted: "careful", withdrawn: "" };

export const stateChip = (state, large = false) => el("span", { class: `chip ${STATES[state] ?? ""}${large ? " large" : ""}` }, state);
export const stageChip = (stage) => el("span", { class: `chip ${STAGES[stage] ?? "careful"}` }, stage);
export const isFinal = (stage) => ["verified", "reverted", "withdrawn", "refused", "failed"].includes(stage);
