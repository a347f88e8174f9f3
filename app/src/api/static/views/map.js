// The map of a collection: rows as points, close together where their texts mean nearly the same, coloured by a field.
// A point opens its row. The points are also available as a list.

import { get } from "../api.js";
import { fill, h, plain, svg } from "../dom.js";
import { many, percent } from "../figures.js";
import { labelsOf } from "../labels.js";
import { failure, loading, note, number } from "../parts.js";
import { SHAPES, Scatter, outline } from "../scatter.js";
import { groupsOf } from "./map/groups.js";
import { openRow } from "./row.js";

const LIMITS = [500, 1000, 2000, 5000];
const USUAL = 1000;
const LISTED = 50;

export function title(parameters) {
  return parameters.path[0] ? `Map of ${parameters.path[0]}` : "Map";
}

export async function show(root, context) {
  const { path, query } = context.parameters;
  const collections = (await get("/v1/collections", context)).filter((each) => each.rows > 0).map((each) => each.collection);
  const name = path[0] ?? collections[0];
  if (name === undefined) {
    fill(root, h("h1", null, "Map"), note("info", "No collection has rows yet. ", h("a", { href: "#/collections" }, "Sync one"), " first."));
    return;
  }
  const place = `/v1/collections/${encodeURIComponent(name)}`;
  const [{ fields }, labels] = await Promise.all([get(`${place}/fields`, context), labelsOf(name)]);
  const wanted = { name, labels, color: query.get("color") ?? usualColour(fields), limit: Number(query.get("limit")) || USUAL };
  const result = h("div");
  fill(root, h("h1", null, `Map of ${name}`), form(wanted, collections, fields, context.go), result);
  await draw(result, wanted, context);
}

/** A field with a few values tells the most. */
function usualColour(fields) {
  const few = fields.filter((field) => !field.more && field.values.length > 1 && field.values.length <= 12);
  return (few[0] ?? fields[0])?.name ?? "";
}

function form(wanted, collections, fields, go) {
  const names = collections.includes(wanted.name) ? collections : [wanted.name, ...collections];
  const options = (values, now, text = (value) => value) => values.map((value) => h("option", { value, selected: value === now }, text(value)));
  const collection = h("select", { id: "map-collection" }, options(names, wanted.name));
  const colour = h("select", { id: "map-color" }, h("option", { value: "" }, "nothing"), options(fields.map((field) => field.name), wanted.color, (field) => wanted.labels.label(field)));
  const limit = h("select", { id: "map-limit" }, options([...new Set([...LIMITS, wanted.limit])].sort((one, other) => one - other), wanted.limit, number));
  const changed = () => {
    const same = collection.value === wanted.name;
    const query = new URLSearchParams(same ? { color: colour.value, limit: limit.value } : { limit: limit.value });
    go(`#/map/${encodeURIComponent(collection.value)}?${query}`);
  };
  return h(
    "form",
    {
      class: "card line-form",
      onsubmit: (event) => {
        event.preventDefault();
        changed();
      },
    },
    h("div", { class: "field" }, h("label", { for: "map-collection" }, "Collection"), collection),
    h("div", { class: "field" }, h("label", { for: "map-color" }, "Coloured by"), colour),
    h("div", { class: "field" }, h("label", { for: "map-limit" }, "Maximum points"), limit),
    h("button", { type: "submit", class: "primary", id: "map-draw" }, "Draw"),
  );
}

async function draw(place, wanted, context) {
  fill(place, loading("Drawing …"));
  const query = new URLSearchParams({ limit: wanted.limit });
  if (wanted.color) query.set("color", wanted.color);
  let map;
  try {
    map = await get(`/v1/collections/${encodeURIComponent(wanted.name)}/map?${query}`, context);
  } catch (error) {
    if (error.name !== "AbortError") fill(place, failure(error, () => draw(place, wanted, context)));
    return;
  }
  if (map.points.length === 0) {
    fill(place, note("info", "Nothing to draw: you can see no rows of this collection."));
    return;
  }
  new Drawing(place, map, wanted, context).show();
  context.announce(`${many(map.points.length, "point")} drawn`);
}

class Drawing {
  constructor(place, map, wanted, context) {
    this.place = place;
    this.map = map;
    this.wanted = wanted;
    this.groups = groupsOf(map.points.map((point) => point.color)).map((group) => ({ ...group, shown: true }));
    const of = new Map(this.groups.flatMap((group, number) => group.places.map((point) => [point, number])));
    this.points = map.points.map((point, number) => ({ ...point, group: of.get(number) }));
    this.open = (point) => openRow(wanted.name, point.id);
    this.scatter = new Scatter({
      label: `Map of ${wanted.name}: ${many(map.points.length, "point")}`,
      told: (point) => this.#told(point),
      opened: this.open,
      announce: context.announce,
      signal: context.signal,
    });
  }

  show() {
    const button = (text, label, act) => h("button", { type: "button", "aria-label": label, onclick: act }, text);
    const tools = h(
      "div",
      { class: "buttons scatter-tools", role: "group", "aria-label": "Zoom" },
      button("+", "Zoom in", () => this.scatter.zoom(1.5)),
      button("−", "Zoom out", () => this.scatter.zoom(1 / 1.5)),
      button("Whole map", "Whole map", () => this.scatter.reset()),
    );
    const how =
      "Keyboard: arrow keys move between points, Enter opens the row, + and - zoom, 0 shows the whole map. " +
      "Pointer: click a point to open it, drag to move, click the map and scroll to zoom.";
    fill(
      this.place,
      h("p", { class: "muted" }, this.#explained()),
      this.wanted.color && this.#legend(),
      h("div", { class: "scatter-frame" }, this.scatter.plot, tools),
      h("p", { class: "small muted", id: "scatter-how" }, how),
      this.#list(),
    );
    this.scatter.update(this.points, this.groups);
  }

  #told(point) {
    const { color, labels } = this.wanted;
    const colour = color ? `${labels.label(color)}: ${labels.text(color, point.color)}` : null;
    return plain([point.title, colour].filter(Boolean).join(" · "));
  }

  #explained() {
    const [first = 0, second = 0] = this.map.explained;
    const drawn = this.map.points.length < this.map.rows ? `${many(this.map.points.length, "row")} of ${number(this.map.rows)}, a random sample` : `All ${many(this.map.rows, "row")}`;
    return `${drawn}. This 2-D view keeps ${percent(first + second)} of the variance (${percent(first)} horizontal, ${percent(second)} vertical): close points are similar in meaning, but similar texts can also be far apart.`;
  }

  #legend() {
    const entries = this.groups.map((group, place) => {
      const shape = SHAPES[place % SHAPES.length];
      const sign = svg(
        "svg",
        { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true", focusable: "false" },
        svg("path", { d: outline(shape, 8, 8, 5), class: `sign series-${(place % SHAPES.length) + 1} ${shape}` }),
      );
      const button = h("button", { type: "button", "aria-pressed": "true" }, sign, this.wanted.labels.text(this.wanted.color, group.name), h("span", { class: "muted" }, number(group.places.length)));
      button.addEventListener("click", () => {
        group.shown = !group.shown;
        button.setAttribute("aria-pressed", String(group.shown));
        this.scatter.showGroups(this.groups);
      });
      return h("li", null, button);
    });
    return h("div", { class: "legend-place" }, h("h2", { class: "small", id: "legend-title" }, this.wanted.labels.named(this.wanted.color)), h("ul", { class: "legend", "aria-labelledby": "legend-title" }, entries));
  }

  #list() {
    const body = h("div");
    const page = (first) => {
      const some = this.points.slice(first, first + LISTED);
      const items = some.map((point) => h("li", null, h("button", { type: "button", class: "link", onclick: () => this.open(point) }, this.#told(point) || point.id)));
      const turn = (to, text, there) => there && h("button", { type: "button", onclick: () => (page(to), body.querySelector("button")?.focus()) }, text);
      fill(
        body,
        h("ol", { class: "points", start: first + 1 }, items),
        h("div", { class: "buttons" }, turn(first - LISTED, "Previous", first > 0), turn(first + LISTED, "Next", first + LISTED < this.points.length)),
      );
    };
    const details = h("details", { class: "card" }, h("summary", null, "List of points"), body);
    details.addEventListener("toggle", () => details.open && !body.hasChildNodes() && page(0));
    return details;
  }
}
