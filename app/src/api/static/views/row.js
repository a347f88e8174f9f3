// One row in a dialog: its key, all of its text, its metadata, and rows like it. Any view may open it.

import { post } from "../api.js";
import { openDialog } from "../dialogs.js";
import { fill, h, plain } from "../dom.js";
import { failure, loading } from "../parts.js";
import { fieldText } from "./search/hits.js";

/** Opens the dialog of a row by the id that searches give; resolves when it is closed. */
export function openRow(collection, id) {
  const body = h("div", { class: "row" }, loading("Reading the row …"));
  const asked = new AbortController();
  const read = async () => {
    fill(body, loading("Reading the row …"));
    try {
      const path = `/v1/collections/${encodeURIComponent(collection)}/rows`;
      const { rows } = await post(path, { ids: [id] }, { signal: asked.signal });
      fill(body, rows.length > 0 ? shown(collection, rows[0]) : gone());
    } catch (error) {
      if (!asked.signal.aborted) fill(body, failure(error, read));
    }
  };
  const closed = openDialog("Row", body, { wide: true });
  read();
  return closed.finally(() => asked.abort());
}

function gone() {
  return h("p", null, "This row is not there any more, or your key may not see it. The next search will not show it.");
}

function shown(collection, row) {
  const like = `#/search/${encodeURIComponent(collection)}?${new URLSearchParams({ like: row.id })}`;
  return [
    h("div", { class: "buttons" }, h("a", { class: "button", href: like }, "More like this"), copyButton(row.id)),
    h("h3", null, "Key"),
    Object.keys(row.key).length > 0 ? facts("Key of the row", row.key) : h("p", { class: "muted" }, "Written by another program, without a key of ours."),
    h("h3", null, row.chunks.length > 1 ? `Text, in ${row.chunks.length} passages` : "Text"),
    texts(row),
    h("h3", null, "Metadata"),
    Object.keys(row.metadata).length > 0 ? facts("Metadata of the row", row.metadata) : h("p", { class: "muted" }, "None."),
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

function facts(caption, values) {
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "plain" },
      h("caption", { class: "visually-hidden" }, caption),
      h("tbody", null, Object.entries(values).map(([name, value]) => h("tr", null, h("th", { scope: "row" }, name), h("td", null, h("bdi", null, fieldText(value)))))),
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
      fill(button, "Copying is not allowed here"); // over http from another machine: the id stands below
    }
    setTimeout(() => fill(button, "Copy id"), 2000);
  }
  return button;
}
