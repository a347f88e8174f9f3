// The page of one table: its columns, and a form for a collection of it; for a caller who may not see every row, the
// proposal as TOML with reasons.

import { get } from "../api.js";
import { breakable, fill, h } from "../dom.js";
import { badge, loading, note, number } from "../parts.js";
import { copyButton, facts, section, table } from "../widgets.js";
import { createForm } from "./table/create.js";

const COLUMNS = [{ name: "Column" }, { name: "Type", kind: "short" }, { name: "Comment", kind: "wide" }, { name: "Nullable" }];

export function nameOf(path) {
  return `${path[0]}.${path.slice(1).join("/")}`;
}

export async function show(root, context) {
  const [schema, ...rest] = context.parameters.path;
  const place = `/v1/tables/${encodeURIComponent(schema)}/${encodeURIComponent(rest.join("/"))}`;
  fill(root, heading(nameOf(context.parameters.path)), loading("Loading columns, keys and sample rows …"));
  const { found, narrowed } = await described(place, context);
  const form = narrowed ? null : await createForm(found, place, context);
  fill(
    root,
    heading(nameOf(context.parameters.path)),
    found.comment && h("p", { class: "lead" }, found.comment),
    narrowed && note("info", "You may not see all rows, so the proposal uses the catalogue only."),
    h("div", { class: "card" }, figures(found)),
    !found.proposal && note("warning", h("p", null, h("strong", null, "No proposal. ")), h("p", null, found.reason)),
    found.proposal && narrowed && proposal(found.proposal, context),
    form && creation(form, found.proposal, context),
    columns(found),
  );
}

function heading(name) {
  return [h("p", { class: "small" }, h("a", { href: "#/tables" }, "All tables")), h("h1", null, breakable(name))];
}

/** Uses the catalogue only for a caller who may not see every row. */
async function described(place, context) {
  try {
    return { found: await get(place, context), narrowed: false };
  } catch (error) {
    if (error.status !== 403 || error.scope) throw error;
    return { found: await get(`${place}?catalog_only=true`, context), narrowed: true };
  }
}

function figures(found) {
  return facts([
    ["Kind", found.kind],
    ["Rows", number(found.rows)],
    ["Columns", number(found.columns.length)],
    ["Primary key", found.key.length ? found.key.join(", ") : "none"],
  ]);
}

function columns(found) {
  const rows = found.columns.map((column) => [
    [h("code", null, breakable(column.name)), found.key.includes(column.name) && badge("key", "info")],
    h("code", null, typeOf(column)),
    column.comment || "–",
    column.nullable ? "yes" : "no",
  ]);
  return section("columns", "Columns", table({ caption: "Columns", columns: COLUMNS, rows }));
}

function typeOf({ type_name: name, length, scale }) {
  if (!length) return name;
  return scale ? `${name}(${length},${scale})` : `${name}(${length})`;
}

// ------------------------------------------------------------------------------------------------------- the proposal

/** Checked and created by the service without a restart. */
function creation(form, proposed, context) {
  return section(
    "create",
    "New collection",
    proposed?.notes.map((each) => note("info", each)),
    proposed?.create_view && view(proposed.create_view, context),
    form,
  );
}

function proposal(proposed, context) {
  const toml = h("pre", { class: "toml", tabindex: "0", role: "group", "aria-label": "owl-sap.toml" }, proposed.toml);
  return section(
    "proposal",
    "Proposed collection",
    h("p", null, "Paste into owl-sap.toml and adjust."),
    proposed.notes.map((each) => note("info", each)),
    h("div", { class: "copied" }, toml, copyButton(() => toml.textContent, "the proposal", context.announce)),
    h("h3", null, "Why"),
    facts(Object.entries(proposed.reasons), "wide"),
    proposed.create_view && view(proposed.create_view, context),
  );
}

function view(sql, context) {
  const text = h("pre", { tabindex: "0", role: "group", "aria-label": "SQL of the view" }, sql);
  return h(
    "details",
    null,
    h("summary", null, "SQL for a view that joins the table with its texts"),
    h("div", { class: "copied" }, text, copyButton(() => sql, "the SQL", context.announce)),
  );
}
