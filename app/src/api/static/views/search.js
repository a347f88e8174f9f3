// The search page. The address holds the whole search, so that it can be shared and Back works.

import { get, post } from "../api.js";
import { fill, h, plain } from "../dom.js";
import { many } from "../figures.js";
import { shortcut } from "../keys.js";
import { labelsOf } from "../labels.js";
import { ago, failure, loading, note, number } from "../parts.js";
import { isEmpty, writtenByClients } from "./collection/freshness.js";
import { nameOfRow } from "./row.js";
import { chips, filterPanel } from "./search/filters.js";
import { searchForm } from "./search/form.js";
import { results, said } from "./search/hits.js";
import { hashOf, read, request } from "./search/state.js";

const WIDE = "(min-width: 60rem)";

export function title({ path, query }) {
  const about = query.get("q") || (query.get("like") && "Similar rows");
  return [about || "Search", about && path[0]].filter(Boolean).join(" – ");
}

export async function show(root, { parameters, go, announce, signal }) {
  const collections = await get("/v1/collections", { signal });
  if (collections.length === 0) {
    fill(root, h("h1", null, "Search"), h("p", { class: "card empty" }, "No collection is configured. ", h("a", { href: "#/tables" }, "Create one from a table"), "."));
    return undefined;
  }
  const page = new Page(root, collections, { go, announce });
  shortcut("/", "go to the search box", () => page.form.focus());
  page.update(parameters);
  return {
    update: (changed) => page.update(changed),
    cleanup: () => {
      shortcut("/", "", null);
      page.asked.abort();
    },
  };
}

const EXAMPLES = 4;
const WORDS = 6;

/** Those of the settings; without any, the first words of rows that the caller may see. */
async function examplesOf(collection) {
  const { examples } = await labelsOf(collection);
  if (examples.length > 0) return examples.slice(0, EXAMPLES);
  const { rows } = await get(`/v1/collections/${encodeURIComponent(collection)}/rows?limit=40`);
  const texts = [...new Set(rows.map(({ text }) => plain(text).split(/[.;:\n]/)[0].trim().split(/\s+/).slice(0, WORDS).join(" ")))].filter((text) => text.length > 3 && text.length < 80);
  return texts.filter((_, place) => place % Math.ceil(texts.length / EXAMPLES) === 0);
}

class Page {
  constructor(root, collections, { go, announce }) {
    this.collections = collections;
    this.announce = announce;
    this.asked = new AbortController();
    this.known = new Map();
    this.names = new Map(); // of rows, by collection and id
    this.paneled = null;
    this.to = (changed, options) => go(hashOf({ ...this.state, ...this.form.values(), ...changed }), options);
    this.form = searchForm(collections.map((each) => each.collection), {
      submit: (values) => this.to(values.q === "" ? values : { ...values, like: null }),
      choose: (collection) => this.to({ collection, filters: {}, like: null }, { replace: true }),
    });
    this.about = h("p", { class: "about muted small" });
    this.filters = h("div", { class: "filter-fields" });
    this.sidebar = h("details", { class: "card sidebar", open: matchMedia(WIDE).matches }, h("summary", null, "Filters"), this.filters);
    this.chips = h("div", { class: "chips" });
    this.results = h("div", { class: "results", tabindex: "-1" });
    fill(
      root,
      h("div", { class: "view-head" }, h("h1", null, "Search"), this.about),
      this.form.element,
      h("div", { class: "columns" }, h("aside", { "aria-label": "Filters" }, this.sidebar), h("section", { "aria-label": "Hits" }, this.chips, this.results)),
    );
  }

  update(parameters) {
    const state = read(parameters);
    state.collection ??= this.collections[0].collection;
    this.state = state;
    this.form.show(state);
    this.describe();
    this.showChips();
    return Promise.all([this.showFilters(), this.search()]);
  }

  describe() {
    const found = this.collections.find((each) => each.collection === this.state.collection);
    if (found === undefined) fill(this.about);
    else if (writtenByClients(found)) fill(this.about, `${many(found.rows, "row")}, written by clients`);
    else if (isEmpty(found)) fill(this.about, "not synced yet");
    else if (found.last_sync === null) fill(this.about, `${many(found.rows, "row")}, first sync incomplete`);
    else fill(this.about, `${many(found.rows, "row")}, synced `, ago(found.last_sync));
  }

  async showChips() {
    const { collection, filters, like } = this.state;
    const labels = await labelsOf(collection);
    if (filters !== this.state.filters || like !== this.state.like) return;
    const change = (next) => this.to({ filters: next });
    const alike = h("button", { type: "button", class: "chip", onclick: () => this.to({ like: null }) }, "Rows like ", this.nameOf(like), h("span", { "aria-hidden": "true" }, "✕"));
    const here = this.chips.contains(document.activeElement);
    fill(this.chips, like !== null && alike, chips(filters, labels, change));
    if (here) (this.chips.querySelector("button") ?? this.sidebar.querySelector("summary")).focus();
    const shown = Object.keys(filters).length;
    fill(this.sidebar.querySelector("summary"), shown > 0 ? `Filters (${shown})` : "Filters");
  }

  /** Filled in once the row is read. */
  nameOf(id) {
    const place = h("bdi", null, "this row");
    const { collection } = this.state;
    const key = JSON.stringify([collection, id]);
    if (id !== null && !this.names.has(key)) this.names.set(key, nameOfRow(collection, id));
    this.names.get(key)?.then(
      (name) => fill(place, name ?? "a row that no longer exists"),
      () => this.names.delete(key),
    );
    return place;
  }

  async showFilters() {
    const { collection } = this.state;
    const path = `/v1/collections/${encodeURIComponent(collection)}/fields`;
    const about = this.collections.find((each) => each.collection === collection);
    if (about === undefined || isEmpty(about)) {
      this.paneled = null;
      fill(this.filters, h("p", { class: "muted small" }, "Filters appear after the first sync."));
      return;
    }
    if (!this.known.has(collection)) {
      this.paneled = null;
      fill(this.filters, loading("Loading filters …"));
      this.known.set(collection, get(path));
    }
    try {
      const [{ fields, sampled, rows }, labels] = await Promise.all([this.known.get(collection), labelsOf(collection)]);
      if (collection !== this.state.collection) return;
      const key = JSON.stringify([collection, this.state.filters]);
      if (key === this.paneled) return;
      this.paneled = key;
      fill(
        this.filters,
        filterPanel(fields, this.state.filters, labels, (filters) => {
          this.paneled = JSON.stringify([collection, filters]);
          this.to({ filters });
        }),
        sampled < rows && h("p", { class: "small muted" }, `Counted over ${number(sampled)} of ${number(rows)} rows.`),
      );
    } catch (error) {
      this.known.delete(collection);
      this.paneled = null;
      if (collection === this.state.collection) fill(this.filters, failure(error, () => this.showFilters()));
    }
  }

  async search() {
    this.asked.abort();
    this.asked = new AbortController();
    const { signal } = this.asked;
    const state = this.state;
    const body = request(state);
    const here = this.results.contains(document.activeElement);
    if (body === null) {
      this.results.removeAttribute("aria-busy");
      fill(this.results, this.start());
      return;
    }
    this.results.setAttribute("aria-busy", "true");
    if (this.results.querySelector(".hits") === null) fill(this.results, loading("Searching …"));
    try {
      const [found, labels] = await Promise.all([post(`/v1/collections/${encodeURIComponent(state.collection)}/search`, body, { signal }), labelsOf(state.collection)]);
      fill(this.results, results(found, state, labels, (id) => this.to({ like: id, q: "" })));
      this.announce(said(found, state));
    } catch (error) {
      if (signal.aborted) return;
      fill(this.results, failure(error, () => this.search()));
      this.announce(error.message);
    }
    this.results.removeAttribute("aria-busy");
    if (here && document.activeElement === document.body) this.results.focus({ preventScroll: true });
  }

  start() {
    const found = this.collections.find((each) => each.collection === this.state.collection);
    if (found === undefined) return note("error", `Collection ${this.state.collection} does not exist.`);
    if (isEmpty(found) && writtenByClients(found)) return note("info", "This collection is empty. Clients write it over REST or LangChain.");
    if (isEmpty(found)) return note("warning", "This collection has not been synced yet. Run ", h("code", null, `owl-sap sync ${found.collection}`));
    return h("div", { class: "card empty" }, h("p", null, "Describe what you need, or enter a number or code."), this.examples(), h("p", { class: "small with-keyboard" }, "Press ", h("kbd", null, "/"), " to go to the search box."));
  }

  /** Queries to click on, filled in once they are known. */
  examples() {
    const place = h("div", { class: "examples", role: "group", "aria-label": "Example queries" });
    const { collection } = this.state;
    const show = (texts) => texts.length > 0 && fill(place, h("span", null, "For example:"), texts.map((q) => h("button", { type: "button", class: "chip", onclick: () => this.to({ q, like: null }) }, h("bdi", null, q))));
    examplesOf(collection).then(show, () => {}); // without them the page is whole
    return place;
  }
}
