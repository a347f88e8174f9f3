// The rows of a collection as a table: sorted, filtered, page by page, exported. The address holds all of it.

import { download, get } from "../api.js";
import { fill, h, hidden, plain } from "../dom.js";
import { many } from "../figures.js";
import { labelsOf } from "../labels.js";
import { failure, loading, note, number } from "../parts.js";
import { slowButton, table } from "../widgets.js";
import { placeOf } from "./collection/freshness.js";
import { openRow } from "./row.js";
import { chips, filterPanel } from "./search/filters.js";
import { keyOf } from "./search/hits.js";
import { filterOf, filtersIn } from "./search/state.js";

const SIZE = 50;
const KEY = "key";
const LONGEST = 160;

export function title({ path }) {
  return `Rows of ${path[0]}`;
}

export async function show(root, { parameters, go, announce, signal }) {
  const page = new Page(root, parameters.path[0], { go, announce });
  signal.addEventListener("abort", () => page.asked.abort());
  await page.update(parameters);
  return { update: (changed) => page.update(changed) };
}

class Page {
  constructor(root, name, { go, announce }) {
    this.root = root;
    this.go = go;
    this.announce = announce;
    this.asked = new AbortController();
    this.collection(name);
  }

  collection(name) {
    this.name = name;
    this.place = placeOf(name);
    this.pages = [null]; // where each page begins
    this.fields = null;
    this.order = "";
    this.paneled = null;
    const encoded = encodeURIComponent(name);
    this.about = h("p", { class: "about muted small" });
    this.filters = h("div", { class: "filter-fields" }, loading("Loading filters …"));
    this.summary = h("summary", null, "Filters");
    this.chips = h("div", { class: "chips" });
    this.trouble = h("div");
    this.sorting = h("div", { class: "field sorting" });
    this.table = h("div", { class: "results", tabindex: "-1" });
    this.turns = h("nav", { class: "buttons", "aria-label": "Previous and next" });
    const failed = (error) => fill(this.trouble, failure(error));
    fill(
      this.root,
      h("p", { class: "small" }, h("a", { href: `#/collections/${encoded}` }, name), " · ", h("a", { href: `#/search/${encoded}` }, "Search"), " · ", h("a", { href: `#/map/${encoded}` }, "Map")),
      h("div", { class: "view-head" }, h("h1", null, `Rows of ${name}`), this.about),
      h("details", { class: "card across" }, this.summary, this.filters),
      this.chips,
      h("div", { class: "buttons row-tools" }, this.sorting, slowButton("Export CSV", () => this.export(), failed)),
      this.trouble,
      this.table,
      this.turns,
    );
  }

  async update({ path, query }) {
    if (path[0] !== this.name) this.collection(path[0]);
    this.state = { sort: query.get("sort") || KEY, after: query.get("after"), filters: filtersIn(query.get("filters")) };
    const order = JSON.stringify([this.state.sort, this.state.filters]);
    if (order !== this.order || !this.pages.includes(this.state.after)) this.pages = [this.state.after];
    this.order = order;
    this.labels = await labelsOf(this.name);
    this.showChips();
    await Promise.all([this.showRows(), this.showFilters()]);
  }

  to(changed) {
    const { sort, after, filters } = { ...this.state, after: null, ...changed };
    const query = new URLSearchParams();
    if (sort !== KEY) query.set("sort", sort);
    if (Object.keys(filters).length > 0) query.set("filters", JSON.stringify(filters));
    if (after !== null) query.set("after", after);
    const written = query.toString();
    this.go(`#/rows/${encodeURIComponent(this.name)}${written && `?${written}`}`);
  }

  query(more = {}) {
    const filter = filterOf(this.state.filters);
    return new URLSearchParams({ sort: this.state.sort, ...(filter && { filter: JSON.stringify(filter) }), ...more });
  }

  showChips() {
    const { filters } = this.state;
    const here = this.chips.contains(document.activeElement);
    fill(this.chips, chips(filters, this.labels, (next) => this.to({ filters: next })));
    if (here) (this.chips.querySelector("button") ?? this.summary).focus();
    const chosen = Object.keys(filters).length;
    fill(this.summary, chosen > 0 ? `Filters (${chosen})` : "Filters");
  }

  async showFilters() {
    try {
      this.fields ??= get(`${this.place}/fields`);
      const { fields, rows } = await this.fields;
      fill(this.about, Object.keys(this.state.filters).length > 0 ? "filtered" : many(rows, "row"));
      const chosen = JSON.stringify(this.state.filters);
      if (chosen === this.paneled) return;
      this.paneled = chosen;
      fill(
        this.filters,
        filterPanel(fields, this.state.filters, this.labels, (filters) => {
          this.paneled = JSON.stringify(filters);
          this.to({ filters });
        }),
      );
    } catch (error) {
      this.fields = null;
      fill(this.filters, failure(error, () => this.showFilters()));
    }
  }

  async showRows() {
    this.asked.abort();
    this.asked = new AbortController();
    const { signal } = this.asked;
    const { after } = this.state;
    this.table.setAttribute("aria-busy", "true");
    if (!this.table.hasChildNodes()) fill(this.table, loading("Reading rows …"));
    try {
      const page = await get(`${this.place}/rows?${this.query({ limit: SIZE, ...(after && { after }) })}`, { signal });
      const at = this.pages.indexOf(after);
      if (page.next !== null) this.pages[at + 1] = page.next;
      const focused = document.activeElement?.id;
      this.draw(page, at);
      if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
      this.announce(`${many(page.rows.length, "row")} shown`);
    } catch (error) {
      if (signal.aborted) return;
      const again = after !== null && error.status === 422 ? () => this.to({}) : () => this.showRows();
      fill(this.table, failure(error, again));
      fill(this.turns);
    }
    this.table.removeAttribute("aria-busy");
  }

  draw({ rows, next }, at) {
    const keyed = new Set(rows.flatMap((row) => Object.keys(row.key)));
    const declared = [...this.labels.fields.keys()].filter((name) => !keyed.has(name));
    const others = new Set(rows.flatMap((row) => Object.keys(row.metadata)).filter((name) => !keyed.has(name) && !declared.includes(name)));
    const names = [...declared, ...others];
    this.showSorting(names);
    if (rows.length === 0) fill(this.table, note("info", this.chips.hasChildNodes() ? "No row fits the filters." : "You can see no rows of this collection."));
    else this.show(h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": `Rows of ${this.name}` }, this.rows(rows, names)));
    const turn = (to, text, id) => h("button", { type: "button", id, onclick: () => this.turn(to) }, text);
    const first = this.pages[0] === null;
    fill(
      this.turns,
      at > 0 ? turn(this.pages[at - 1], "Previous page", "previous-page") : !first && turn(null, "First page", "previous-page"),
      next !== null && turn(next, "Next page", "next-page"),
      first && (at > 0 || next !== null) && h("span", { class: "small muted" }, `Page ${number(at + 1)}`),
    );
  }

  /** Scrolled to the side as before, or at first so far that the column sorted by is in sight. */
  show(table) {
    const before = this.table.querySelector(".scroll")?.scrollLeft;
    fill(this.table, table);
    const head = table.querySelector("[aria-sort]");
    const beyond = head === null ? 0 : head.offsetLeft + head.offsetWidth - table.clientWidth;
    table.scrollLeft = before ?? Math.max(0, beyond);
  }

  turn(after) {
    this.to({ after });
    this.table.scrollIntoView({ block: "start" });
    this.table.focus({ preventScroll: true });
  }

  rows(rows, names) {
    const kindOf = (name) => (this.labels.kind(name) === "number" ? "number" : this.labels.kind(name) === "date" ? "short" : "");
    const columns = [
      { name: "Key", head: this.head(KEY, "Key"), sort: this.sorted(KEY) },
      { name: "Text", kind: "wide" },
      ...names.map((name) => ({ name: this.labels.label(name), head: this.head(name, this.labels.named(name)), sort: this.sorted(name), kind: kindOf(name) })),
    ];
    const cells = rows.map((row) => [
      h("button", { type: "button", class: "link", onclick: () => openRow(this.name, row.id) }, keyOf(row, this.labels, { named: false })),
      h("div", { class: "clamped", dir: "auto" }, shortened(row.text)),
      ...names.map((name) => h("bdi", null, this.labels.value(name, row.metadata[name] ?? null))),
    ]);
    return table({ caption: `Rows of ${this.name}`, columns, rows: cells });
  }

  sorted(name) {
    if (this.state.sort === name) return "ascending";
    return this.state.sort === `-${name}` ? "descending" : null;
  }

  head(name, label) {
    const sorted = this.sorted(name);
    const sign = { ascending: " ▲", descending: " ▼" }[sorted] ?? " ↕";
    const next = sorted === "ascending" ? `-${name}` : name;
    return h("button", { type: "button", class: "link sort", id: `sort-${name}`, onclick: () => this.to({ sort: next }) }, label, h("span", { class: sorted === null && "muted", "aria-hidden": "true" }, sign));
  }

  /** For narrow screens, where a table has no headings. */
  showSorting(names) {
    const orders = [KEY, ...names].flatMap((name) => [name, `-${name}`]);
    const called = (order) => {
      const name = order.replace(/^-/, "");
      return `${name === KEY ? "Key" : this.labels.label(name)}${order === name ? "" : ", descending"}`;
    };
    if (!orders.includes(this.state.sort)) orders.push(this.state.sort);
    const options = orders.map((order) => h("option", { value: order, selected: order === this.state.sort }, called(order)));
    const select = h("select", { id: "rows-sort", onchange: () => this.to({ sort: select.value }) }, options);
    fill(this.sorting, h("label", { for: "rows-sort" }, "Sort by"), select);
  }

  async export() {
    fill(this.trouble);
    this.announce("Exporting");
    await download(`${this.place}/rows?${this.query()}`, "text/csv", `${this.name}.csv`);
    this.announce(`Exported as ${this.name}.csv`);
  }
}

function shortened(text) {
  const said = plain(text.slice(0, 2 * LONGEST)).replace(/\s+/g, " ").trim();
  if (said.length <= LONGEST) return said;
  return [said.slice(0, LONGEST).replace(/\s+\S*$/, ""), " …", hidden(" shortened")];
}
