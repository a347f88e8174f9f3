// A dialog with one row: its key, whole text and metadata, and a link to similar rows. Any view may open it.

import { post } from "../api.js";
import { openDialog } from "../dialogs.js";
import { fill, h, plain } from "../dom.js";
import { keyText } from "../figures.js";
import { labelsOf } from "../labels.js";
import { failure, loading } from "../parts.js";

const GONE = "This row no longer exists, or your key may not see it.";
const FIRST_WORDS = 60;

async function rowOf(collection, id, signal) {
  const { rows } = await post(`/v1/collections/${encodeURIComponent(collection)}/rows`, { ids: [id] }, { signal });
  return rows[0] ?? null;
}

/** The first words of a row and its key, to name it in a sentence; null when the row is gone. Raises Problem. */
export async function nameOfRow(collection, id, signal) {
  const row = await rowOf(collection, id, signal);
  if (row === null) return null;
  const text = plain(row.text).replace(/\s+/g, " ").trim();
  const words = text.length <= FIRST_WORDS ? text : `${text.slice(0, FIRST_WORDS).replace(/\s+\S*$/, "")} …`;
  const key = plain(keyText(row.key));
  return [words && `“${words}”`, key && `(${key})`].filter(Boolean).join(" ") || plain(id);
}

/** Opens the dialog of a row by the id that searches give; resolves when it is closed. */
export function openRow(collection, id) {
  const body = h("div", { class: "row" }, loading("Reading the row …"));
  const asked = new AbortController();
  const read = async () => {
    fill(body, loading("Reading the row …"));
    try {
      const [row, labels] = await Promise.all([rowOf(collection, id, asked.signal), labelsOf(collection)]);
      fill(body, row === null ? h("p", null, GONE) : shown(collection, row, labels));
    } catch (error) {
      if (!asked.signal.aborted) fill(body, failure(error, read));
    }
  };
  const closed = openDialog("Row", body, { wide: true });
  read();
  return closed.finally(() => asked.abort());
}

function shown(collection, row, labels) {
  const like = `#/search/${encodeURIComponent(collection)}?${new URLSearchParams({ like: row.id })}`;
  return [
    h("div", { class: "buttons" }, h("a", { class: "button", href: like }, "Similar rows"), copyButton(row.id)),
    h("h3", null, "Key"),
    Object.keys(row.key).length > 0 ? facts("Key of the row", row.key, labels) : h("p", { class: "muted" }, "A foreign record: it has an id, but no source key."),
    h("h3", null, row.chunks.length > 1 ? `Text, in ${row.chunks.length} passages` : "Text"),
    texts(row),
    h("h3", null, "Metadata"),
    Object.keys(row.metadata).length > 0 ? facts("Metadata of the row", row.metadata, labels) : h("p", { class: "muted" }, "None."),
    h("p", { class: "small muted" }, "Id ", h("code", null, row.id)),
  ];
}

function texts(row) {
  if (row.chunks.length < 2) return h("div", { class: "chunk", dir: "auto", tabindex: "0", role: "group", "aria-label": "Text" }, plain(row.text));
  return h(
    "ol",
    { class: "chunks" },
    row.chunks.map((text, place) => h("li", null, h("div", { class: "chunk", dir: "auto", tabindex: "0", role: "group", "aria-label": `Passage ${place + 1}` }, plain(text)))),
  );
}

function facts(caption, values, labels) {
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "plain" },
      h("caption", { class: "visually-hidden" }, caption),
      h("tbody", null, labels.entries(values).map(([name, value]) => h("tr", null, h("th", { scope: "row" }, labels.named(name)), h("td", null, h("bdi", null, labels.value(name, value)))))),
    ),
  );
}

function copyButton(id) {
  const button = h("button", { type: "button", onclick: copy }, "Copy id");
  async function copy() {
    try {
      await navigator.clipboard.writeText(id);
      fill(button, "Copied");
    } catch {
      fill(button, "Copying is not allowed here"); // over http from another machine: the id is shown below
    }
    setTimeout(() => fill(button, "Copy id"), 2000);
  }
  return button;
}
