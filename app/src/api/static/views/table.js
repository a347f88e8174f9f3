// The page of one table: its columns, the proposed collection as TOML with reasons, and a preview of rendered texts.

import { get, post } from "../api.js";
import { barChart } from "../charts.js";
import { breakable, fill, h, plain } from "../dom.js";
import { many, percent } from "../figures.js";
import { badge, failure, loading, note, number } from "../parts.js";
import { copyButton, facts, slowButton, table } from "../widgets.js";

const SAMPLES = 5;
const COLUMNS = [{ name: "Column" }, { name: "Type", kind: "short" }, { name: "Comment", kind: "wide" }, { name: "Nullable" }];

export function nameOf(path) {
  return `${path[0]}.${path.slice(1).join("/")}`;
}

export async function show(root, context) {
  const [schema, ...rest] = context.parameters.path;
  const place = `/v1/tables/${encodeURIComponent(schema)}/${encodeURIComponent(rest.join("/"))}`;
  fill(root, heading(nameOf(context.parameters.path)), loading("Loading columns, keys and sample rows …"));
  const { found, narrowed } = await described(place, context);
  const shown = new EventTarget(); // tells of templates that have made texts
  fill(
    root,
    heading(nameOf(context.parameters.path)),
    found.comment && h("p", { class: "lead" }, found.comment),
    narrowed && note("info", "You may not see all rows, so the proposal uses the catalogue only."),
    h("div", { class: "card" }, figures(found)),
    found.proposal ? proposal(found.proposal, shown, context) : note("warning", h("p", null, h("strong", null, "No proposal. ")), h("p", null, found.reason)),
    !narrowed && preview(found.proposal, place, context, shown),
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
  return h(
    "section",
    { "aria-labelledby": "columns-title" },
    h("h2", { id: "columns-title" }, "Columns"),
    table({ caption: "Columns", columns: COLUMNS, rows }),
  );
}

function typeOf({ type_name: name, length, scale }) {
  if (!length) return name;
  return scale ? `${name}(${length},${scale})` : `${name}(${length})`;
}

// ------------------------------------------------------------------------------------------------------- the proposal

/** `shown` tells which template has made texts: the block has it then. */
function proposal(proposed, shown, context) {
  const toml = h("pre", { class: "toml", tabindex: "0", role: "group", "aria-label": "owl-sap.toml" }, proposed.toml);
  shown.addEventListener("template", ({ detail }) => fill(toml, withTemplate(proposed.toml, detail)));
  return h(
    "section",
    { "aria-labelledby": "proposal-title" },
    h("h2", { id: "proposal-title" }, "Proposed collection"),
    h("p", null, "Paste into owl-sap.toml, adjust, restart."),
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

/** The block with another template. A TOML string on one line is written as JSON writes it. */
function withTemplate(toml, template) {
  return toml
    .split("\n")
    .map((line) => (/^template\s*=/.test(line) ? `template = ${JSON.stringify(template)}` : line))
    .join("\n");
}

// --------------------------------------------------------------------------------------------------------- the preview

/** `proposed`: null where there is no proposal; a template of one's own makes texts all the same. */
function preview(proposed, place, context, shown) {
  const usual = proposed?.template ?? "";
  const result = h("div", { class: "preview" });
  const template = h("textarea", { id: "template", rows: 3, spellcheck: "false", "aria-describedby": "template-how", value: usual });
  const samples = h("input", { type: "number", id: "samples", min: 1, max: 50, value: SAMPLES, required: true });
  const work = async () => {
    if (!form.reportValidity()) return;
    const written = template.value;
    fill(result, loading("Reading rows and counting tokens …"));
    try {
      const body = { template: written === usual ? null : written, samples: Number(samples.value) };
      const made = await post(`${place}/preview`, body, context);
      template.removeAttribute("aria-invalid");
      shown.dispatchEvent(new CustomEvent("template", { detail: made.template }));
      fill(result, rendered(made));
      context.announce(`${many(made.samples.length, "text")} shown`);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.status === 422) template.setAttribute("aria-invalid", "true");
      fill(result, failure(error));
    }
  };
  const button = slowButton("Preview", work, () => {}, { class: "primary" });
  const back = h("button", { type: "button", hidden: usual === "", onclick: () => ((template.value = usual), template.focus()) }, "Back to the proposal");
  const submit = (event) => {
    event.preventDefault();
    button.click();
  };
  const form = h(
    "form",
    { class: "card", onsubmit: submit },
    h("div", { class: "field" }, h("label", { for: "template" }, "Template"), template),
    h("p", { class: "small muted", id: "template-how" }, "Column names in braces, such as {MAKTX}. Quote special names: {\"/BIC/TXT\"}."),
    h("div", { class: "field short" }, h("label", { for: "samples" }, "Texts to show"), samples),
    h("div", { class: "buttons" }, button, back),
  );
  return h(
    "section",
    { "aria-labelledby": "preview-title" },
    h("h2", { id: "preview-title" }, "Preview"),
    h("p", null, "The texts of sample rows, exactly as they would be embedded."),
    form,
    result,
  );
}

function rendered(made) {
  const texts = made.samples.map((each) =>
    h("li", null, h("p", { class: "rendered", dir: "auto" }, plain(each.text) || "(empty)"), badge(many(each.tokens, "token"))),
  );
  const bars = Object.entries(made.histogram).map(([name, value]) => ({ name, value }));
  return [
    h("p", { class: "muted" }, `From ${many(made.sampled, "row")} spread over ${made.source}:`),
    made.samples.length === 0 ? note("warning", "All sampled rows are empty.") : h("ol", { class: "samples" }, texts),
    lengths(made),
    made.unreadable > 0 && note("warning", `${many(made.unreadable, "row")} cannot be rendered and would go to quarantine.`),
    made.empty > 0 && note("info", `${many(made.empty, "row")} without text would not be embedded.`),
    barChart({ title: "Text lengths", unit: "Tokens", bars }),
  ];
}

function lengths({ sampled, chunked, truncated, max_tokens: most }) {
  if (truncated > 0) {
    return note("warning", `${many(truncated, "row")} (${percent(truncated / sampled)}) would be truncated: the model's limit is ${number(most)} tokens.`);
  }
  const cut = chunked > 0 ? `${many(chunked, "row")} would be split into chunks; nothing is lost` : "no text exceeds it";
  return sampled > 0 && note("good", `The model's limit is ${number(most)} tokens: ${cut}.`);
}
