// Charts in SVG: lines over time and bars. Each can be read with the pointer, with the arrow keys and as a table. Knows
// figures and the page, and nothing of what is drawn.

import { h, svg } from "./dom.js";

const WIDTH = 560;
const HEIGHT = 200;
const LEFT = 52;
const RIGHT = 12;
const TOP = 18;
const BOTTOM = 26;
const TICKS = 4;
const TIMES = 5;

/** A round number at least as large: 1, 2, 2.5 or 5 times a power of ten. */
function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value * (1 - 1e-9));
}

let made = 0;

/**
 * A chart of lines over time. `series`: `[{name, format}]`, at most four; `spans`: seconds that the axis may show, of
 * which the shortest that holds all samples is taken, its right end being the newest; `ceiling`: top of the axis, or null
 * to fit what is shown. `update` takes samples
 * `[{time: ms, values: [number or null by series]}]`, oldest first.
 */
export function lineChart({ title, unit, series, spans, ceiling = null }) {
  const id = `chart-${(made += 1)}`;
  const grid = svg("g", { class: "chart-grid" });
  const lines = svg("g");
  const cursor = svg("line", { class: "chart-cursor", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9 });
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true", focusable: "false", class: "chart-drawing" },
    grid,
    lines,
    cursor,
  );
  const readout = h("p", { class: "chart-readout", "aria-live": "polite" });
  const plot = h(
    "div",
    {
      class: "chart-plot",
      tabindex: "0",
      role: "group",
      "aria-labelledby": `${id}-title`,
      "aria-describedby": `${id}-how`,
    },
    drawing,
  );
  const rows = h("tbody");
  const heads = series.map((each) => h("th", { scope: "col" }, `${each.name} (${unit})`));
  const table = h(
    "details",
    { class: "chart-table" },
    h("summary", null, "As a table"),
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}, as a table` },
      h("table", { class: "small" }, h("thead", null, h("tr", null, h("th", { scope: "col" }, "Time"), ...heads)), rows),
    ),
  );
  const element = h(
    "figure",
    { class: "chart" },
    h("figcaption", null, h("span", { id: `${id}-title` }, title), series.length > 1 && legend(series)),
    h("p", { id: `${id}-how`, class: "visually-hidden" }, "The arrow keys read the values one by one."),
    plot,
    readout,
    table,
  );

  let samples = [];
  let chosen = null; // the time of the sample that is read, so that it stays where it is while others come

  function span() {
    const held = (samples.at(-1).time - samples[0].time) / 1000;
    return spans.find((each) => each >= held) ?? spans.at(-1);
  }

  function across(time) {
    const end = samples.at(-1).time;
    return LEFT + (WIDTH - LEFT - RIGHT) * (1 - (end - time) / (span() * 1000));
  }

  function draw() {
    const top = ceiling ?? niceCeiling(Math.max(0, ...samples.flatMap((sample) => sample.values)));
    const up = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * Math.min(1, value / top);
    grid.replaceChildren(...axes(top, unit, span(), up));
    lines.replaceChildren(
      ...series.flatMap((_, number) => {
        const path = linePath(samples, number, across, up);
        return path ? [svg("path", { class: `chart-line series-${number + 1}`, d: path })] : [];
      }),
    );
    read();
    if (table.open) list();
  }

  function list() {
    const newest = samples.slice(-60).reverse();
    rows.replaceChildren(
      ...newest.map((sample) =>
        h(
          "tr",
          null,
          h("th", { scope: "row" }, clock(sample.time)),
          ...series.map((each, number) => h("td", null, shown(each, sample.values[number]))),
        ),
      ),
    );
  }

  function read() {
    const sample = samples.find((each) => each.time === chosen) ?? null;
    const x = sample === null ? -9 : across(sample.time);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    const told = sample ?? samples.at(-1);
    const values = told ? series.map((each, number) => named(series, each, shown(each, told.values[number]))) : [];
    const text = told ? `${sample === null ? "Now" : clock(told.time)}: ${values.join(", ")}` : "";
    if (readout.textContent !== text) readout.textContent = text;
    // What changes by itself every two seconds is not read out; what was asked for with a key is.
    readout.setAttribute("aria-live", sample === null ? "off" : "polite");
  }

  function choose(index) {
    const kept = Math.max(0, Math.min(samples.length - 1, index));
    chosen = samples[kept]?.time ?? null;
    read();
  }

  function leave() {
    chosen = null;
    read();
  }

  plot.addEventListener("keydown", (event) => {
    const now = samples.findIndex((each) => each.time === chosen);
    const from = now < 0 ? samples.length : now;
    const to = {
      ArrowLeft: from - 1,
      ArrowRight: from + 1,
      PageUp: from - 10,
      PageDown: from + 10,
      Home: 0,
      End: samples.length - 1,
    }[event.key];
    if (to !== undefined && samples.length > 0) {
      event.preventDefault();
      choose(to);
    } else if (event.key === "Escape") {
      leave();
    }
  });
  plot.addEventListener("blur", leave);
  plot.addEventListener("pointermove", (event) => {
    if (samples.length === 0) return;
    const box = drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    const far = samples.map((sample) => Math.abs(across(sample.time) - x));
    choose(far.indexOf(Math.min(...far)));
  });
  plot.addEventListener("pointerleave", leave);
  table.addEventListener("toggle", () => table.open && list());

  return {
    element,
    update(newer) {
      samples = newer;
      if (samples.length > 0) draw();
    },
  };
}

/** Bars from top to bottom, which also are a table: `[{name, value}]`. */
export function barChart({ title, unit, bars }) {
  const most = Math.max(1, ...bars.map((bar) => bar.value));
  const rows = bars.map((bar) =>
    h(
      "tr",
      null,
      h("th", { scope: "row" }, bar.name),
      h(
        "td",
        { class: "bar-cell" },
        svg(
          "svg",
          { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true", focusable: "false" },
          svg("rect", { x: 0, y: 0, height: 10, width: (bar.value / most) * 100 }),
        ),
      ),
      h("td", { class: "number" }, String(bar.value)),
    ),
  );
  const head = h(
    "tr",
    null,
    h("th", { scope: "col" }, unit),
    h("td"),
    h("th", { scope: "col", class: "number" }, "Rows"),
  );
  return h("table", { class: "bars" }, h("caption", null, title), h("thead", null, head), h("tbody", null, ...rows));
}

function legend(series) {
  const entries = series.map((each, number) =>
    h(
      "li",
      null,
      svg(
        "svg",
        { viewBox: "0 0 26 8", width: 26, height: 8, "aria-hidden": "true", focusable: "false" },
        svg("path", { class: `chart-line series-${number + 1}`, d: "M0 4H26" }),
      ),
      each.name,
    ),
  );
  return h("ul", { class: "legend" }, ...entries);
}

function axes(top, unit, span, up) {
  const parts = [];
  for (let tick = 0; tick <= TICKS; tick += 1) {
    const value = (top / TICKS) * tick;
    const y = up(value);
    parts.push(svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }));
    parts.push(svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, short(value)));
  }
  parts.push(svg("text", { x: LEFT + 4, y: TOP + 12, class: "chart-unit" }, unit));
  for (let step = 0; step <= TIMES; step += 1) {
    const seconds = (span / TIMES) * (TIMES - step);
    const x = LEFT + ((WIDTH - LEFT - RIGHT) / TIMES) * step;
    const anchor = step === TIMES ? "end" : "middle";
    const text = seconds === 0 ? "now" : seconds < 60 ? `−${seconds} s` : `−${short(seconds / 60)} min`;
    parts.push(svg("text", { x, y: HEIGHT - 8, "text-anchor": anchor, class: (TIMES - step) % 2 ? "between" : null }, text));
  }
  return parts;
}

/** A value that is missing breaks the line. */
function linePath(samples, number, across, up) {
  let path = "";
  let open = false;
  for (const sample of samples) {
    const value = sample.values[number];
    const x = across(sample.time);
    if (value === null || value === undefined || x < LEFT - 1) {
      open = false;
      continue;
    }
    path += `${open ? "L" : "M"}${x.toFixed(1)} ${up(value).toFixed(1)}`;
    open = true;
  }
  // One sample alone is a dot.
  return samples.length === 1 && path ? `${path}h0.1` : path;
}

function named(series, each, value) {
  return series.length > 1 ? `${each.name} ${value}` : value;
}

function shown(each, value) {
  return value === null || value === undefined ? "–" : each.format(value);
}

function short(value) {
  return String(Math.round(value * 100) / 100);
}

function clock(time) {
  return new Date(time).toLocaleTimeString("en-GB");
}
