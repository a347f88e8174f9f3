// Points in a plane on a canvas, some thousands at once: zoom, pan, and a way to each point by pointer and by keyboard.
// Groups differ in colour and in shape. Knows the page, and nothing of what the points are.

import { h } from "./dom.js";

const MARGIN = 18;
const RADIUS = 4.5;
const SMALL = 3;
const MANY = 2000; // points, from which on they are small
const NEAR = 14;
const MOST_ZOOM = 60;
const STEP = 1.5;
export const SHAPES = ["circle", "square", "triangle", "diamond", "cross", "plus", "down", "ring"];

/**
 * `label`: what the plot is. `told(point)`: a point in words, `opened(point)`: somebody wants it. `announce` tells what the
 * keyboard has chosen. `points` are `{x, y, group}`; `groups` `[{shown}]`, of which the place is colour and shape.
 */
export class Scatter {
  #points = [];
  #groups = [];
  #zoom = 1;
  #centre = [0.5, 0.5]; // what stands in the middle, in shares of the drawing's width and height
  #current = null;
  #hovered = null;
  #drag = null;
  #due = false;

  constructor({ label, told, opened, announce, signal }) {
    this.told = told;
    this.opened = opened;
    this.announce = announce;
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.ring = h("div", { class: "scatter-ring", hidden: true });
    this.tip = h("div", { class: "scatter-tip", hidden: true });
    this.plot = h(
      "div",
      {
        class: "scatter",
        tabindex: "0",
        role: "application",
        "aria-roledescription": "scatter plot",
        "aria-label": label,
        "aria-describedby": "scatter-how",
      },
      this.canvas,
      this.ring,
      this.tip,
    );
    this.#listen(signal);
    const resized = new ResizeObserver(() => this.draw());
    resized.observe(this.plot);
    const themed = new MutationObserver(() => this.draw());
    themed.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(), { signal });
    signal.addEventListener("abort", () => {
      resized.disconnect();
      themed.disconnect();
    });
  }

  /** Scales both axes alike, so that distances mean the same in both. */
  update(points, groups) {
    const xs = points.map((point) => point.x);
    const ys = points.map((point) => point.y);
    const [left, right, low, high] = [least(xs), most(xs), least(ys), most(ys)];
    const size = Math.max(right - left, high - low) || 1;
    this.#points = points.map((point) => ({
      ...point,
      px: 0.5 + (point.x - (left + right) / 2) / size,
      py: 0.5 - (point.y - (low + high) / 2) / size,
    }));
    this.#groups = groups;
    this.#current = this.#hovered = null;
    this.reset();
  }

  showGroups(groups) {
    this.#groups = groups;
    if (this.#current && !groups[this.#current.group].shown) this.#current = null;
    this.draw();
  }

  reset() {
    this.#zoom = 1;
    this.#centre = [0.5, 0.5];
    this.draw();
  }

  /** `at`: the place that stays where it is, in pixels; without it the middle. */
  zoom(factor, at = null) {
    const zoom = Math.min(MOST_ZOOM, Math.max(1, this.#zoom * factor));
    if (at !== null) {
      const { width, height, scale } = this.#measures();
      const grown = scale * (zoom / this.#zoom);
      this.#centre[0] += (at[0] - width / 2) * (1 / scale - 1 / grown);
      this.#centre[1] += (at[1] - height / 2) * (1 / scale - 1 / grown);
    }
    this.#zoom = zoom;
    this.#clamp();
    this.draw();
  }

  draw() {
    if (this.#due) return;
    this.#due = true;
    requestAnimationFrame(() => {
      this.#due = false;
      if (this.plot.isConnected) this.#drawNow();
    });
  }

  // ------------------------------------------------------------------------------------------------------ places

  #measures() {
    const { width, height } = this.plot.getBoundingClientRect();
    return { width, height, scale: (Math.min(width, height) - 2 * MARGIN) * this.#zoom };
  }

  #place(point, { width, height, scale }) {
    return [width / 2 + (point.px - this.#centre[0]) * scale, height / 2 + (point.py - this.#centre[1]) * scale];
  }

  #clamp() {
    this.#centre = this.#zoom === 1 ? [0.5, 0.5] : this.#centre.map((each) => Math.min(1, Math.max(0, each)));
  }

  #visible() {
    return this.#points.filter((point) => this.#groups[point.group].shown);
  }

  /** The point under the pointer, or the one that the keyboard has chosen while the plot has the focus. */
  #marked() {
    return this.#hovered ?? (document.activeElement === this.plot ? this.#current : null);
  }

  #nearest(x, y) {
    const measures = this.#measures();
    let found = null;
    let best = NEAR * NEAR;
    for (const point of this.#visible()) {
      const [px, py] = this.#place(point, measures);
      const far = (px - x) ** 2 + (py - y) ** 2;
      if (far <= best) [best, found] = [far, point];
    }
    return found;
  }

  // ---------------------------------------------------------------------------------------------------- the drawing

  #drawNow() {
    const measures = this.#measures();
    const { width, height } = measures;
    const ratio = Math.min(devicePixelRatio || 1, 2);
    const wanted = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== wanted[0] || this.canvas.height !== wanted[1]) [this.canvas.width, this.canvas.height] = wanted;
    const pen = this.canvas.getContext("2d");
    const style = getComputedStyle(this.plot);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    // One path a group, whatever the number of its points: that is what makes thousands of them quick.
    const paths = this.#groups.map(() => new Path2D());
    const radius = this.#points.length > MANY && this.#zoom < 4 ? SMALL : RADIUS;
    for (const point of this.#visible()) {
      const [x, y] = this.#place(point, measures);
      if (x > -9 && y > -9 && x < width + 9 && y < height + 9) trace(paths[point.group], SHAPES[point.group % SHAPES.length], x, y, radius);
    }
    paths.forEach((path, group) => paint(pen, path, SHAPES[group % SHAPES.length], style, group));
    this.#mark();
  }

  /** Beside the canvas, so that the points are not drawn anew when the pointer moves. */
  #mark() {
    const marked = this.#marked();
    this.ring.hidden = this.tip.hidden = marked === null;
    if (marked === null) return;
    const measures = this.#measures();
    const [x, y] = this.#place(marked, measures);
    this.ring.style.transform = `translate(${x}px, ${y}px)`;
    const text = this.told(marked);
    if (this.tip.textContent !== text) this.tip.textContent = text;
    const { offsetWidth: wide, offsetHeight: tall } = this.tip;
    const left = Math.min(Math.max(4, x - wide / 2), Math.max(4, measures.width - wide - 4));
    const top = y - tall - 14 < 4 ? y + 14 : y - tall - 14;
    this.tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }

  // ------------------------------------------------------------------------------------------------- who looks at it

  #listen(signal) {
    const on = (name, listener, options = {}) => this.plot.addEventListener(name, listener, { signal, ...options });
    on("pointerdown", (event) => this.#pressed(event));
    on("pointermove", (event) => this.#moved(event));
    on("pointerup", (event) => this.#released(event));
    on("pointercancel", () => (this.#drag = null));
    on("pointerleave", () => this.#hover(null));
    on("wheel", (event) => this.#wheeled(event), { passive: false });
    on("keydown", (event) => this.#key(event));
    on("focus", () => this.#mark());
    on("blur", () => this.#mark());
  }

  #at(event) {
    const box = this.plot.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  #pressed(event) {
    if (event.button !== 0) return;
    this.#drag = { from: this.#at(event), centre: [...this.#centre], moved: false, pointer: event.pointerId };
  }

  #moved(event) {
    const [x, y] = this.#at(event);
    if (this.#drag === null) return this.#hover(this.#nearest(x, y));
    const [dx, dy] = [x - this.#drag.from[0], y - this.#drag.from[1]];
    if (!this.#drag.moved && Math.hypot(dx, dy) < 5) return undefined;
    if (!this.#drag.moved) this.plot.setPointerCapture(this.#drag.pointer);
    this.#drag.moved = true;
    const { scale } = this.#measures();
    this.#centre = [this.#drag.centre[0] - dx / scale, this.#drag.centre[1] - dy / scale];
    this.#clamp();
    return this.draw();
  }

  #released(event) {
    const drag = this.#drag;
    this.#drag = null;
    if (drag === null || drag.moved) return;
    const found = this.#nearest(...this.#at(event));
    if (found !== null) this.opened(found);
  }

  #hover(point) {
    if (point === this.#hovered) return;
    this.#hovered = point;
    this.plot.classList.toggle("on-point", point !== null);
    this.#mark();
  }

  /** The wheel scrolls the page, unless the plot has the focus or Ctrl is held. */
  #wheeled(event) {
    if (!event.ctrlKey && document.activeElement !== this.plot) return;
    event.preventDefault();
    this.zoom(event.deltaY < 0 ? STEP : 1 / STEP, this.#at(event));
  }

  #key(event) {
    const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const acts = {
      "+": () => this.zoom(STEP),
      "=": () => this.zoom(STEP),
      "-": () => this.zoom(1 / STEP),
      0: () => this.reset(),
      Home: () => this.#choose(this.#visible()[0] ?? null),
      Escape: () => this.#choose(null),
      Enter: () => this.#current && this.opened(this.#current),
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (ways[event.key]) this.#go(...ways[event.key]);
    else if (acts[event.key]) acts[event.key]();
    else return;
    event.preventDefault();
  }

  /** To the nearest point within 45 degrees of the way; the first time to the one in the middle. */
  #go(right, down) {
    const from = this.#current;
    const [x, y] = from === null ? this.#centre : [from.px, from.py];
    let found = null;
    let best = Infinity;
    for (const point of this.#visible()) {
      const [dx, dy] = [point.px - x, point.py - y];
      const along = dx * right + dy * down;
      const beside = Math.abs(right ? dy : dx);
      const far = from === null ? dx * dx + dy * dy : along + 2 * beside;
      const there = from === null || (point !== from && along > 0 && beside <= along);
      if (there && far < best) [best, found] = [far, point];
    }
    if (found === null) this.announce("No further point in this direction");
    else this.#choose(found);
  }

  #choose(point) {
    if (point === this.#current) return;
    this.#current = point;
    if (point !== null) {
      this.#bringIntoSight(point);
      this.announce(this.told(point));
    }
    this.#mark();
  }

  #bringIntoSight(point) {
    const measures = this.#measures();
    const [x, y] = this.#place(point, measures);
    if (x < MARGIN || y < MARGIN || x > measures.width - MARGIN || y > measures.height - MARGIN) {
      this.#centre = [point.px, point.py];
      this.#clamp();
      this.draw();
    }
  }
}

function paint(pen, path, shape, style, group) {
  const colour = style.getPropertyValue(`--series-${(group % SHAPES.length) + 1}`);
  if (["cross", "plus", "ring"].includes(shape)) {
    pen.strokeStyle = colour;
    pen.lineWidth = 2;
    pen.stroke(path);
    return;
  }
  pen.fillStyle = colour;
  pen.globalAlpha = 0.85;
  pen.fill(path);
  pen.globalAlpha = 1;
}

/** The shape as a path for SVG, around (x, y). */
export function outline(shape, x, y, r) {
  const path = new SvgPath();
  trace(path, shape, x, y, r);
  return path.text;
}

function trace(path, shape, x, y, r) {
  const polygon = (...corners) => {
    corners.forEach(([dx, dy], place) => (place ? path.lineTo(x + dx * r, y + dy * r) : path.moveTo(x + dx * r, y + dy * r)));
    path.closePath();
  };
  const line = (dx, dy) => {
    path.moveTo(x - dx * r, y - dy * r);
    path.lineTo(x + dx * r, y + dy * r);
  };
  if (shape === "circle" || shape === "ring") {
    path.moveTo(x + r, y);
    path.arc(x, y, r, 0, 2 * Math.PI);
  } else if (shape === "square") polygon([-0.85, -0.85], [0.85, -0.85], [0.85, 0.85], [-0.85, 0.85]);
  else if (shape === "triangle") polygon([0, -1.1], [1, 0.8], [-1, 0.8]);
  else if (shape === "down") polygon([0, 1.1], [1, -0.8], [-1, -0.8]);
  else if (shape === "diamond") polygon([0, -1.2], [1.05, 0], [0, 1.2], [-1.05, 0]);
  else if (shape === "cross") [line(0.8, 0.8), line(0.8, -0.8)];
  else [line(1, 0), line(0, 1)];
}

/** What `trace` draws on a canvas, as the text of a path in SVG. */
class SvgPath {
  text = "";

  moveTo(x, y) {
    this.text += `M${x} ${y}`;
  }

  lineTo(x, y) {
    this.text += `L${x} ${y}`;
  }

  closePath() {
    this.text += "Z";
  }

  arc(x, y, r) {
    this.text += `A${r} ${r} 0 1 1 ${x - r} ${y}A${r} ${r} 0 1 1 ${x + r} ${y}`;
  }
}

function least(values) {
  return values.reduce((one, other) => Math.min(one, other), Infinity);
}

function most(values) {
  return values.reduce((one, other) => Math.max(one, other), -Infinity);
}
