// Notes and tags that people keep with a run or with an update.

import { post } from "./api.js";
import { el } from "./dom.js";
import { Dialog, field } from "./dialogs.js";
import { moment } from "./format.js";

/** A note and its tags; nothing where there is none. */
export function noteView(annotation) {
  if (!annotation?.note && !annotation?.tags?.length) return null;
  const by = annotation.author ? `${annotation.author}, ${moment(annotation.time)}` : "";
  return el("span", { class: "noted", title: by }, annotation.tags.map((tag) => el("span", { class: "tag" }, `#${tag}`)), annotation.note ? el("span", {}, annotation.note) : null);
}

/** Asks for a note and tags, of an update by its id, or else of the run. */
export function editNote(base, title, annotation, which, author, changed) {
  const note = el("textarea", { id: "annotation", name: "annotation", rows: 3, maxLength: 1000, value: annotation?.note ?? "" });
  const tags = el("input", { id: "tags", name: "tags", value: (annotation?.tags ?? []).join(", "), autocomplete: "off", maxLength: 1000 });
  const dialog = new Dialog(title, "Visible to everyone who can see the run. They have no effect on the job.", [field("annotation", "Note", note), field("tags", "Tags", tags, "Separated by commas."), author]);
  dialog.ask("Keep", async (data) => {
    const said = data.get("author");
    await post(`${base}/annotation`, { ...(which ? { which } : {}), note: data.get("annotation"), tags: data.get("tags").split(",").map((tag) => tag.trim().replace(/^#/, "")).filter(Boolean), ...(said ? { author: said } : {}) });
    dialog.close();
    changed();
  });
}
