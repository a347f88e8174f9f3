// What the pages of operations are made of: tables that become cards on narrow screens, facts, buttons that do something
// slow, copying, asking again while the page is in sight. Knows the page, and nothing of what is shown.

import { signedOut } from "./api.js";
import { h } from "./dom.js";
import { ago } from "./parts.js";

/**
 * A table. `columns`: `[{name, kind}]`, where kind `number` aligns to the right, `short` is never broken, `wide` gets more
 * room, and `actions` has a heading for screen readers only; `head`: a node in place of the name, `sort`: its aria-sort. `rows`: nodes or texts by column. The first column names its row.
 */
export function table({ caption, columns, rows }) {
  const head = columns.map((column) =>
    h(
      "th",
      { scope: "col", role: "columnheader", class: column.kind, "aria-sort": column.sort },
      column.kind === "actions" ? h("span", { class: "visually-hidden" }, column.name) : (column.head ?? column.name),
    ),
  );
  // The roles are those that the elements have: narrow screens show them as blocks, which would take them away.
  return h(
    "table",
    { class: "data", role: "table" },
    h("caption", { class: "visually-hidden" }, caption),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)),
    h("tbody", { role: "rowgroup" }, rows.map((cells) => tableRow(columns, cells))),
  );
}

function tableRow(columns, cells) {
  const made = cells.map((cell, place) => {
    const { name, kind } = columns[place];
    const content = h("div", { class: "cell" }, cell);
    if (place === 0) return h("th", { scope: "row", role: "rowheader", class: kind }, content);
    return h("td", { role: "cell", class: kind, dataset: { label: name } }, content);
  });
  return h("tr", { role: "row" }, made);
}

/** A part of a page under a heading. */
export function section(id, heading, ...content) {
  return h("section", { "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, heading), content);
}

/** `[[name, node or text], ...]`; what is null or empty is left out. */
export function facts(pairs, kind = "") {
  const told = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: `facts ${kind}`.trim() }, told.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
}

/** Says anew how long ago the times below `root` are, for those move while the page stands still. */
export function refreshTimes(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const words = ago(time.dateTime).textContent;
    if (time.textContent !== words) time.textContent = words;
  }
}

/**
 * A button for something that takes a while: it does nothing meanwhile, and `failed` is told the error. It is not
 * disabled, for that would take the focus away from who pressed it.
 */
export function slowButton(text, work, failed, attributes = {}) {
  const button = h("button", { type: "button", ...attributes }, text);
  button.addEventListener("click", async () => {
    if (button.getAttribute("aria-disabled") === "true") return;
    button.setAttribute("aria-disabled", "true");
    try {
      await work();
    } catch (error) {
      if (error.name !== "AbortError") failed(error);
    } finally {
      button.removeAttribute("aria-disabled");
    }
  });
  return button;
}

/** `text`: a function that gives what is copied. `what`: its name. */
export function copyButton(text, what, announce) {
  const button = h("button", { type: "button", "aria-label": `Copy ${what}` }, "Copy");
  button.addEventListener("click", async () => {
    const copied = await copy(text());
    announce(copied ? `Copied: ${what}` : `Copying is blocked by the browser. Select ${what} and copy it yourself.`);
    button.textContent = copied ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // no secure context, or forbidden
  }
}

/**
 * Calls `work` `seconds` after it last came to its end, as long as the page is in sight and `signal` is not aborted. Who has
 * closed the dialog that asks for the key is not asked again by it.
 */
export function whileVisible(work, seconds, signal) {
  let timer = null;
  let busy = false;
  const wait = () => {
    clearTimeout(timer);
    if (!signal.aborted && !document.hidden) timer = setTimeout(turn, seconds * 1000);
  };
  async function turn() {
    clearTimeout(timer);
    if (busy || signal.aborted || document.hidden) return;
    busy = true;
    try {
      if (!signedOut()) await work();
    } finally {
      busy = false;
      wait();
    }
  }
  document.addEventListener("visibilitychange", turn, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  wait();
}
