// The form that makes a collection of a table: the proposal to adjust, with a preview of its texts; then the request.

import { get, post } from "../../api.js";
import { barChart } from "../../charts.js";
import { breakable, fill, h, plain } from "../../dom.js";
import { many, percent } from "../../figures.js";
import { badge, failure, loading, note, number } from "../../parts.js";
import { copyButton, slowButton } from "../../widgets.js";

const SAMPLES = 3;
const TYPING_MS = 600;
const FEW = 12;
const METHODS = {
  full: "Full comparison: reads every row each time",
  watermark: "Watermark: a column holds the time of each change",
  rowid: "Row id: HANA's own sign of a changed row",
  log: "Change log: triggers note each change",
  delta: "Delta table: SAP Datasphere or SDI records each change",
};
const SCHEDULES = { "": "Only when started", "15m": "Every 15 minutes", "1h": "Every hour", "1d": "Every day" };
const LARGE = /LOB$|^TEXT$|^BINTEXT$|VECTOR|^ST_/;

/** `found`: the table as GET /v1/tables/... describes it. `place`: its address. */
export async function createForm(found, place, context) {
  const proposed = found.proposal ?? { name: found.name.toLowerCase().replace(/[^a-z0-9_]+/g, "-").replace(/^-+|-+$/g, ""), source: sourceOf(found), key: found.key, template: "", metadata: [], changes: { method: "full" }, reasons: {}, guessed: [] };
  const elsewhere = proposed.source !== sourceOf(found);
  const columns = elsewhere ? await columnsOf(proposed.source, context) : found.columns;
  return new Form({ proposed, columns, elsewhere }, place, context).element;
}

function sourceOf({ schema, name }) {
  return [schema, name].map((part) => (/["]|[.]/.test(part) ? `"${part.replaceAll('"', '""')}"` : part)).join(".");
}

function tableOf(source) {
  const parts = /^("(?:[^"]|"")*"|[^."]*)\.(.*)$/s.exec(source).slice(1);
  return parts.map((part) => part.replace(/^"(.*)"$/s, (_, name) => name.replaceAll('""', '"')));
}

/** Of the text table that a proposal may read in place of the table itself. */
async function columnsOf(source, context) {
  const [schema, table] = tableOf(source);
  return (await get(`/v1/tables/${encodeURIComponent(schema)}/${encodeURIComponent(table)}?catalog_only=true`, context)).columns;
}

class Form {
  constructor({ proposed, columns, elsewhere }, place, context) {
    Object.assign(this, { proposed, elsewhere, place, context });
    const input = (id, value, more = {}) => h("input", { type: "text", id, value, autocomplete: "off", spellcheck: "false", ...more });
    this.name = input("new-name", proposed.name, { required: true, pattern: "[A-Za-z0-9_\\-]{1,100}", title: "Letters, digits, - and _" });
    this.template = h("textarea", { id: "new-template", rows: 3, spellcheck: "false", required: true, value: proposed.template });
    this.key = input("new-key", proposed.key.join(", "), { required: true });
    this.where = input("new-where", proposed.where ?? "");
    this.model = input("new-model", proposed.model ?? "", { placeholder: "the service's own" });
    this.method = choice("new-method", METHODS, proposed.changes.method);
    this.column = input("new-column", proposed.changes.column ?? "", { list: "new-columns" });
    this.every = choice("new-every", SCHEDULES, "");
    this.boxes = columns.filter((column) => !LARGE.test(column.type_name)).map((column) => box(column, proposed.metadata.includes(column.name)));
    this.preview = h("div", { class: "preview" });
    this.block = h("pre", { class: "toml", tabindex: "0", role: "group", "aria-label": "owl-sap.toml" });
    this.told = h("div");
    this.element = this.#made(columns);
    this.#show();
    this.#render();
  }

  #made(columns) {
    const byColumn = this.#field("Column of the last change", this.column, "changes");
    const show = () => {
      byColumn.hidden = this.method.value !== "watermark";
      this.column.required = !byColumn.hidden;
    };
    show();
    const typed = debounced(() => this.#render(), this.context.signal);
    const create = slowButton("Create collection", () => this.#create(), (error) => this.#failed(error), { class: "primary", type: "submit" });
    const form = h(
      "form",
      {
        class: "card create",
        onsubmit: (event) => event.preventDefault(), // the button has done it
        oninput: (event) => {
          event.target.removeAttribute("aria-invalid");
          show();
          this.#show();
          if (event.target === this.template) typed();
        },
      },
      this.elsewhere && h("p", null, "The texts are in ", h("code", null, breakable(this.proposed.source)), ", so the collection reads that table."),
      this.#field("Name", this.name, "name"),
      this.#field("Template", this.template, "template", "Column names in braces, such as {MAKTX}. Quote special names: {\"/BIC/TXT\"}."),
      h("section", { class: "beside", "aria-labelledby": "preview-title" }, h("h3", { id: "preview-title" }, "Preview"), this.preview),
      this.#field("Key", this.key, "key"),
      this.#field("Condition (SQL)", this.where, "where", "Optional. Sent to HANA unchanged."),
      this.#metadata(),
      this.#field("Model", this.model, "model", "A packaged name or a folder."),
      this.#field("Change detection", this.method, "changes"),
      byColumn,
      this.#field("Automatic sync", this.every, "schedule"),
      h("datalist", { id: "new-columns" }, columns.map(({ name }) => h("option", { value: name }))),
      this.told,
      h("div", { class: "buttons" }, create),
      h(
        "details",
        null,
        h("summary", null, "As a block of owl-sap.toml"),
        h("div", { class: "copied" }, this.block, copyButton(() => this.block.textContent, "the block", this.context.announce)),
      ),
    );
    return h("div", { class: "create-place" }, form);
  }

  /** `setting`: the setting whose reason is shown below the field while it has the proposed value. */
  #field(label, control, setting, hint = "") {
    const why = this.#why(setting);
    const id = `${control.id}-how`;
    control.dataset.setting = setting;
    control.setAttribute("aria-describedby", id);
    return h("div", { class: "field" }, h("label", { for: control.id }, label), control, h("p", { class: "small muted", id }, why, hint));
  }

  #why(setting) {
    const why = this.proposed.reasons[setting];
    const guess = this.proposed.guessed.includes(setting) && [badge("guess", "warning"), " "];
    return why && [guess, `${why.charAt(0).toUpperCase()}${why.slice(1)}${/[.!?]$/.test(why) ? "" : "."} `];
  }

  #metadata() {
    const chosen = this.boxes.filter((each) => each.input.checked);
    const others = this.boxes.filter((each) => !each.input.checked);
    const open = chosen.length + others.length <= FEW;
    return h(
      "fieldset",
      { class: "field" },
      h("legend", null, "Fields to filter by"),
      h("div", { class: "ticks" }, chosen.map((each) => each.element), open && others.map((each) => each.element)),
      !open && h("details", null, h("summary", null, `${others.length} more columns`), h("div", { class: "ticks" }, others.map((each) => each.element))),
      h("p", { class: "small muted" }, this.#why("metadata")),
    );
  }

  /** The block as the settings file has it; what is as by default is left out. */
  #settings() {
    const changes = { method: this.method.value };
    if (changes.method === "watermark") changes.column = this.column.value.trim();
    if (changes.method === "delta") Object.assign(changes, this.proposed.changes.method === "delta" ? this.proposed.changes : {});
    const given = {
      name: this.name.value.trim(),
      source: this.proposed.source,
      key: this.key.value.split(",").map((name) => name.trim()).filter(Boolean),
      where: this.where.value.trim(),
      template: this.template.value,
      metadata: this.boxes.filter((each) => each.input.checked).map((each) => each.name),
      model: this.model.value.trim(),
      changes,
      schedule: this.every.value && { every: this.every.value },
    };
    return Object.fromEntries(Object.entries(given).filter(([, value]) => value !== "" && value.length !== 0));
  }

  #show() {
    fill(this.block, ["[[collections]]", ...Object.entries(this.#settings()).map(([name, value]) => `${name} = ${toml(value)}`), ""].join("\n"));
  }

  async #render() {
    this.rendering?.abort();
    const written = this.template.value;
    if (written.trim() === "") return fill(this.preview, h("p", { class: "muted" }, "Write a template to see its texts."));
    this.rendering = new AbortController();
    const { signal } = this.rendering;
    if (!this.preview.querySelector(".samples")) fill(this.preview, loading("Reading rows and counting tokens …"));
    this.preview.setAttribute("aria-busy", "true");
    try {
      const body = { template: written === this.proposed.template ? null : written, samples: SAMPLES };
      const ofDefault = this.model.value.trim() !== "" && h("p", { class: "small muted" }, "Tokens are counted for the service's own model.");
      fill(this.preview, ofDefault, rendered(await post(`${this.place}/preview`, body, { signal: AbortSignal.any([signal, this.context.signal]) })));
      this.context.announce("Preview updated");
    } catch (error) {
      if (error.name === "AbortError") return undefined;
      if (error.status === 422) this.template.setAttribute("aria-invalid", "true");
      fill(this.preview, failure(error));
    }
    return this.preview.removeAttribute("aria-busy");
  }

  async #create() {
    if (!this.element.querySelector("form").reportValidity()) return;
    fill(this.told);
    const { collection } = await post("/v1/collections", this.#settings(), this.context);
    this.context.announce(`Collection ${collection} created`);
    this.#created(collection);
  }

  #created(name) {
    const address = `#/collections/${encodeURIComponent(name)}`;
    const trouble = h("div");
    const sync = async () => {
      await post(`/v1/collections/${encodeURIComponent(name)}/sync`, {}, this.context);
      this.context.go(address);
    };
    const heading = h("h3", { tabindex: "-1" }, `Collection ${name} is created`);
    fill(
      this.element,
      h(
        "div",
        { class: "note good" },
        heading,
        h("p", null, "It is empty until its first sync, which reads the table and embeds its texts."),
        h("div", { class: "buttons" }, slowButton("Sync now", sync, (error) => fill(trouble, failure(error)), { class: "primary" }), h("a", { class: "button", href: address }, "Open the collection")),
        trouble,
      ),
    );
    heading.focus();
  }

  #failed(error) {
    if (error.toml) {
      const text = h("pre", { tabindex: "0", role: "group", "aria-label": "Block to paste" }, error.toml);
      fill(this.told, note("warning", h("p", null, error.message), h("div", { class: "copied" }, text, copyButton(() => error.toml, "the block to paste", this.context.announce))));
    } else if (error.status === 409 || error.status === 422) {
      fill(this.told, h("div", { class: "note error", role: "alert" }, h("p", null, h("strong", null, "Not created: "), error.message)));
    } else {
      fill(this.told, failure(error));
    }
    const named = (error.errors ?? []).map(({ where }) => where.split(".")[1]).concat(/`(\w+)`/.exec(error.message)?.[1] ?? []);
    const field = this.element.querySelector(`[data-setting="${CSS.escape(error.status === 409 && !error.toml ? "name" : (named[0] ?? ""))}"]`);
    field?.setAttribute("aria-invalid", "true");
    (field ?? this.told.querySelector("pre"))?.focus();
    this.context.announce(error.message);
  }
}

function choice(id, names, chosen) {
  return h("select", { id, value: chosen }, Object.entries(names).map(([value, name]) => h("option", { value }, name)));
}

function box({ name, comment }, checked) {
  const input = h("input", { type: "checkbox", checked });
  return { name, input, element: h("label", { class: "check", title: comment || null }, input, h("code", null, breakable(name)), comment && h("span", { class: "small muted" }, comment)) };
}

/** On one line, TOML is written as JSON is, but for tables. */
function toml(value) {
  if (typeof value === "string") return JSON.stringify(value).replaceAll("\x7f", "\\u007f");
  if (Array.isArray(value)) return `[${value.map(toml).join(", ")}]`;
  return `{ ${Object.entries(value).map(([name, each]) => `${name} = ${toml(each)}`).join(", ")} }`;
}

function debounced(work, signal) {
  let timer = null;
  signal.addEventListener("abort", () => clearTimeout(timer));
  return () => {
    clearTimeout(timer);
    timer = setTimeout(work, TYPING_MS);
  };
}

function rendered(made) {
  const texts = made.samples.map((each) =>
    h("li", null, h("p", { class: "rendered", dir: "auto" }, plain(each.text) || "(empty)"), badge(many(each.tokens, "token"))),
  );
  const bars = Object.entries(made.histogram).map(([name, value]) => ({ name, value }));
  return [
    h("p", { class: "muted" }, `From ${many(made.sampled, "row")} spread over `, breakable(made.source), ", exactly as they would be embedded:"),
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
