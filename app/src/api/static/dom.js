// Makes elements. Strings become text, never markup, so that no row's text can do anything to the page.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "selected", "disabled", "indeterminate", "open"]);
const MARKUP = /^(srcdoc|innerHTML|outerHTML|style)$/i;

/**
 * An HTML element. `attributes`: a function under `on...` listens to that event; true is an empty attribute; null, undefined
 * and false are left out; `style` is an object of CSS properties, `dataset` one of data attributes. Children: nodes, strings,
 * numbers, arrays of these; null, undefined and false are left out.
 */
export function h(tag, attributes, ...children) {
  return finish(document.createElement(tag), attributes, children);
}

/** The same in SVG. */
export function svg(tag, attributes, ...children) {
  return finish(document.createElementNS(SVG, tag), attributes, children);
}

/** Takes out what an element holds and puts these in. */
export function fill(element, ...children) {
  element.replaceChildren(...nodes(children));
  return element;
}

/** Text for screen readers only. */
export function hidden(text) {
  return h("span", { class: "visually-hidden" }, text);
}

/** An identifier that may wrap after its separators, so that a narrow place does not cut its words. */
export function breakable(text) {
  return String(text)
    .split(/(?<=[._/@:,])/u)
    .flatMap((part, place) => (place === 0 ? [part] : [h("wbr"), part]));
}

const TURNING = /[\u202d\u202e]/gu;

/** Row text with the characters that force a writing direction replaced, because they can disguise the text. */
export function plain(text) {
  return text.replace(TURNING, "\ufffd");
}

function finish(element, attributes, children) {
  element.append(...nodes(children));
  // After the children: the value of a <select> is one of its options.
  for (const [name, value] of Object.entries(attributes ?? {})) set(element, name, value);
  return element;
}

function set(element, name, value) {
  if (value === null || value === undefined) return;
  if (name.startsWith("on")) {
    if (typeof value !== "function") throw new TypeError(`${name} must be a function`);
    element.addEventListener(name.slice(2).toLowerCase(), value);
  } else if (name === "style" && typeof value === "object") {
    for (const [property, each] of Object.entries(value)) element.style.setProperty(property, String(each));
  } else if (name === "dataset") {
    Object.assign(element.dataset, value);
  } else if (MARKUP.test(name)) {
    throw new TypeError(`${name} is not set from here`);
  } else if (PROPERTIES.has(name) && name in element) {
    element[name] = value;
  } else if (value !== false) {
    element.setAttribute(name, value === true ? "" : String(value));
  }
}

function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false && child !== true)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
}
