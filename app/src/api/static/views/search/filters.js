// The filters beside the hits, made from the fields of the collection.

import { fill, h, hidden } from "../../dom.js";
import { number } from "../../parts.js";
import { isDay, reversed } from "./state.js";

const FEW = 8;

/**
 * A panel over `fields` (as GET .../fields has them, called as `labels` says) with what is chosen of them. `onChange(filters)` with every choice; it
 * shows its own changes itself, so that whoever types in it keeps the focus and the text.
 */
export function filterPanel(fields, filters, labels, onChange) {
  const usable = fields.filter((field) => !field.name.startsWith("$") && (field.values.length > 0 || field.min !== null));
  if (usable.length === 0) return h("p", { class: "muted small" }, "This collection has no fields to filter by.");
  let current = filters;
  return usable.map((field) => {
    const set = (choice) => {
      const { [field.name]: _, ...others } = current;
      current = choice === null ? others : { ...others, [field.name]: choice };
      onChange(current);
    };
    const chosen = () => current[field.name] ?? {};
    return h("fieldset", { class: "filter" }, h("legend", null, labels.named(field.name)), ranged(field) ? range(field, labels, chosen(), set) : values(field, labels, chosen, set));
  });
}

/** What is chosen, as buttons that take it away. */
export function chips(filters, labels, onChange) {
  return Object.entries(filters).flatMap(([name, choice]) => {
    const without = (left) => {
      const next = { ...filters };
      if (left === null) delete next[name];
      else next[name] = left;
      onChange(next);
    };
    if (choice.in === undefined) return [chip(labels.named(name), rangeText(choice), () => without(null))];
    return choice.in.map((value) => {
      const left = choice.in.filter((each) => each !== value);
      return chip(labels.named(name), shown(labels, name, value), () => without(left.length > 0 ? { in: left } : null));
    });
  });
}

function chip(name, text, remove) {
  return h(
    "button",
    { type: "button", class: "chip", onclick: remove },
    hidden("Remove filter "),
    h("span", null, name, ": ", h("bdi", null, text)),
    h("span", { "aria-hidden": "true" }, "✕"),
  );
}

function rangeText({ from = null, to = null }) {
  if (from !== null && to !== null) return `${from} to ${to}`;
  return from !== null ? `from ${from}` : `up to ${to}`;
}

function ranged(field) {
  return field.min !== null && field.min !== undefined && (field.type === "number" || isDay(String(field.min).slice(0, 10)));
}

function range(field, labels, { from = null, to = null }, set) {
  const isNumber = field.type === "number";
  const bound = (end, value) =>
    h("input", {
      type: isNumber ? "number" : "date",
      step: isNumber ? "any" : null,
      placeholder: isNumber ? field[end] : null,
      "aria-label": `${labels.label(field.name)} ${end === "min" ? "from" : "to"}`,
      value: value ?? "",
      onchange: () => choose(),
    });
  const low = bound("min", from);
  const high = bound("max", to);
  const valueOf = (input) => (input.value === "" ? null : isNumber ? Number(input.value) : input.value);
  const trouble = h("p", { class: "small trouble", role: "alert" });
  const choose = () => {
    const choice = { from: valueOf(low), to: valueOf(high) };
    const wrong = reversed(choice);
    fill(trouble, wrong && "From must not be greater than to.");
    for (const input of [low, high]) input.setAttribute("aria-invalid", String(wrong));
    if (!wrong) set(choice.from === null && choice.to === null ? null : choice);
  };
  const least = isNumber ? number(field.min) : String(field.min).slice(0, 10);
  const most = isNumber ? number(field.max) : String(field.max).slice(0, 10);
  const side = (word, input) => h("span", { class: "side" }, h("span", { class: "small muted", "aria-hidden": "true" }, word), input);
  return [
    h("div", { class: isNumber ? "range" : "range days" }, side("from", low), side("to", high)),
    trouble,
    h("p", { class: "small muted" }, `${least} to ${most}`),
  ];
}

function values(field, labels, choice, set) {
  const ticks = () => choice().in ?? [];
  const chosen = ticks();
  const listed = field.values.map(({ value, count }) => ({ value: field.type === "mixed" ? String(value) : value, count }));
  const others = chosen.filter((value) => !listed.some((each) => each.value === value));
  const all = [...others.map((value) => ({ value, count: null })), ...listed];
  const toggle = (value, on) => {
    const next = on ? [...ticks(), value] : ticks().filter((each) => each !== value);
    set(next.length > 0 ? { in: next } : null);
  };
  const box = ({ value, count }) =>
    h(
      "label",
      { class: "check" },
      h("input", { type: "checkbox", checked: ticks().includes(value), onchange: (event) => toggle(value, event.target.checked) }),
      h("bdi", { class: "value" }, shown(labels, field.name, value)),
      count !== null && h("span", { class: "count muted" }, hidden(", rows: "), number(count)),
    );
  const ticked = all.filter(({ value }) => chosen.includes(value));
  const list = h("div", { class: "values" });
  const few = [...all.slice(0, FEW), ...ticked.filter((each) => all.indexOf(each) >= FEW)];
  const more = h("button", { type: "button", class: "link small", onclick: () => (fill(list, all.map(box)), more.remove()) }, field.more ? `Show the ${all.length} most frequent` : `Show all ${all.length} values`);
  fill(list, few.map(box));
  return [list, few.length < all.length && more, field.more && other(labels.label(field.name), (value) => (toggle(value, true), list.append(box({ value, count: null }))))];
}

/** For a value that is too rare to be listed. */
function other(label, add) {
  const input = h("input", { type: "text", "aria-label": `${label}, other value`, placeholder: "other value" });
  const submit = (event) => {
    event.preventDefault();
    if (input.value !== "") add(input.value);
  };
  return h("form", { class: "other", onsubmit: submit }, input, h("button", { type: "submit", "aria-label": `Add this value of ${label}` }, "+"));
}

function shown(labels, name, value) {
  return value === "" ? "(blank)" : labels.text(name, value);
}
