// The tables and views that the technical user can see, searchable, in pages. table.js shows one table.

import { get } from "../api.js";
import { breakable, fill, h } from "../dom.js";
import { failure, loading, note, number } from "../parts.js";
import { table } from "../widgets.js";
import * as one from "./table.js";

const PAGE = 50;
const COLUMNS = [
  { name: "Table" },
  { name: "Schema" },
  { name: "Kind", kind: "short" },
  { name: "Comment", kind: "wide" },
  { name: "Columns", kind: "number" },
  { name: "Rows", kind: "number" },
];

export function title(parameters) {
  return parameters.path.length > 1 ? one.nameOf(parameters.path) : "Tables";
}

export async function show(root, context) {
  if (context.parameters.path.length > 1) return one.show(root, context);
  const { query } = context.parameters;
  const wanted = {
    search: query.get("search") ?? "",
    schema: query.get("schema") ?? context.parameters.path[0] ?? "",
    page: Math.max(1, Number.parseInt(query.get("page"), 10) || 1),
  };
  const results = h("div");
  fill(root, h("h1", null, "Tables"), h("p", { class: "muted" }, "Tables and views in SAP HANA. Choose one to see its columns and a proposed collection."), form(wanted, context.go), results);
  await list(results, wanted, context);
  return undefined;
}

function form(wanted, go) {
  const search = h("input", { type: "search", id: "table-search", value: wanted.search, maxlength: 200, autocomplete: "off" });
  const schema = h("input", { type: "text", id: "table-schema", value: wanted.schema, maxlength: 127, autocomplete: "off", spellcheck: "false" });
  const submit = (event) => {
    event.preventDefault();
    go(address({ search: search.value.trim(), schema: schema.value.trim(), page: 1 }));
  };
  return h(
    "form",
    { class: "card line-form", role: "search", onsubmit: submit },
    h("div", { class: "field grow" }, h("label", { for: "table-search" }, "Name or comment contains"), search),
    h("div", { class: "field" }, h("label", { for: "table-schema" }, "Schema (empty: all)"), schema),
    h("button", { type: "submit", class: "primary", id: "table-go" }, "Search"),
  );
}

function address({ search, schema, page }) {
  const query = new URLSearchParams();
  if (search) query.set("search", search);
  if (schema) query.set("schema", schema);
  if (page > 1) query.set("page", page);
  return query.size ? `#/tables?${query}` : "#/tables";
}

async function list(place, wanted, context) {
  fill(place, loading("Loading tables …"));
  let found;
  try {
    found = await get(`/v1/tables?${asked(wanted)}`, context);
  } catch (error) {
    if (error.name !== "AbortError") fill(place, failure(error, () => list(place, wanted, context)));
    return;
  }
  const shown = found.slice(0, PAGE);
  const first = (wanted.page - 1) * PAGE + 1;
  const told = shown.length ? `Tables ${number(first)} to ${number(first + shown.length - 1)}` : "No matching tables.";
  if (shown.length === 0) {
    fill(place, note("info", told, " Try part of the name or comment, for example MAR."));
  } else {
    const rows = shown.map((each) => [link(each), breakable(each.schema), each.kind, each.comment || "–", number(each.columns), number(each.rows)]);
    fill(place, table({ caption: told, columns: COLUMNS, rows }), pages(wanted, found.length > PAGE, told));
  }
  context.announce(told);
}

/** Asks for one more than the page shows, to learn whether there is another page. */
function asked({ search, schema, page }) {
  const query = new URLSearchParams({ search, limit: PAGE + 1, offset: (page - 1) * PAGE });
  if (schema) query.set("schema", schema);
  return query;
}

function link(each) {
  return h("a", { href: `#/tables/${encodeURIComponent(each.schema)}/${encodeURIComponent(each.name)}` }, breakable(each.name));
}

function pages(wanted, more, told) {
  const to = (page, text, there) => (there ? h("a", { class: "button", href: address({ ...wanted, page }) }, text) : null);
  return h(
    "nav",
    { class: "buttons", "aria-label": "Pages of tables" },
    to(wanted.page - 1, "Previous", wanted.page > 1),
    h("span", { class: "muted" }, told),
    to(wanted.page + 1, "Next", more),
  );
}
