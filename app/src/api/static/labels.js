// What fields and codes are called: the comments and text tables of HANA, as GET /v1/collections/{name} tells them.

import { get } from "./api.js";
import { h, plain } from "./dom.js";
import { fieldText } from "./figures.js";

const KEPT_MS = 60_000; // HANA may not have answered at first
let known = new Map();
document.addEventListener("owl-key", () => (known = new Map()));

/** The names that a collection's fields have; without an answer the raw ones. Never raises. Waits only the first time. */
export function labelsOf(collection) {
  const found = known.get(collection) ?? { since: 0, labels: null };
  if (Date.now() - found.since > KEPT_MS) {
    found.since = Date.now();
    known.set(collection, found);
    const labels = get(`/v1/collections/${encodeURIComponent(collection)}`).then((about) => new Labels(about));
    found.labels ??= labels.catch(() => new Labels({ fields: [], examples: [] }));
    labels.then(() => (found.labels = labels)).catch(() => {});
  }
  return found.labels;
}

class Labels {
  constructor({ fields, examples }) {
    this.examples = examples; // queries to try
    this.fields = new Map(fields.map((field) => [field.name, field]));
  }

  kind(name) {
    return this.fields.get(name)?.type ?? "text";
  }

  label(name) {
    return plain(this.fields.get(name)?.label ?? name);
  }

  /** The label, with the raw name in the tooltip. */
  named(name) {
    const label = this.label(name);
    return label === name ? label : h("span", { title: name }, label);
  }

  /** `Spare parts (ERSA)`, or the value as it is. */
  text(name, value) {
    const said = this.#said(name, value);
    return said === null ? fieldText(value) : [said, ...this.#code(said, value)].join(" ");
  }

  /** The same with the code less prominent. */
  value(name, value) {
    const said = this.#said(name, value);
    return said === null ? fieldText(value) : [said, this.#code(said, value).map((code) => h("span", { class: "muted" }, ` ${code}`))];
  }

  /** The names and values of metadata, in the order of the settings. */
  entries(metadata) {
    const order = [...this.fields.keys()];
    const place = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
    return Object.entries(metadata).sort(([one], [other]) => place(one) - place(other));
  }

  /** Not for a code that is its own text, as PUMPS of "Pumps". */
  #code(said, value) {
    return said.toLowerCase() === value.toLowerCase() ? [] : [`(${fieldText(value)})`];
  }

  #said(name, value) {
    const values = this.fields.get(name)?.values ?? {};
    return typeof value === "string" && Object.hasOwn(values, value) ? plain(values[value]) : null;
  }
}
