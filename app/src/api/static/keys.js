// Keyboard shortcuts: one table, shown by "?", and a switch for people who use speech input (WCAG 2.1.4).

import { h } from "./dom.js";

const OFF = "owl-sap.shortcuts";
const shortcuts = new Map();

/** `run` when the key is pressed outside of a field. Later calls replace earlier ones; null takes it away. */
export function shortcut(key, description, run) {
  if (run === null) shortcuts.delete(key);
  else shortcuts.set(key, { description, run });
}

export function listen() {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || !enabled()) return;
    if (typing(event.target) || document.querySelector("dialog[open]")) return;
    const found = shortcuts.get(event.key);
    if (found === undefined) return;
    event.preventDefault();
    found.run();
  });
}

/** The dialog's content. */
export function table() {
  const rows = [...shortcuts].map(([key, { description }]) =>
    h("tr", null, h("th", { scope: "row" }, h("kbd", null, key)), h("td", null, description)),
  );
  const box = h("input", { type: "checkbox", checked: enabled(), onchange: () => enable(box.checked) });
  return [
    h("table", { class: "plain" }, h("caption", { class: "visually-hidden" }, "Keyboard shortcuts"), h("tbody", null, rows)),
    h("p", null, "Tab, Enter, Space and the arrow keys also reach everything. Esc closes a dialog."),
    h("label", { class: "check" }, box, " Single-key shortcuts on"),
  ];
}

function enabled() {
  return localStorage.getItem(OFF) !== "off";
}

function enable(on) {
  if (on) localStorage.removeItem(OFF);
  else localStorage.setItem(OFF, "off");
}

function typing(target) {
  return target.isContentEditable || (target.matches("input, textarea, select") && !target.matches("[type=checkbox], [type=radio]"));
}
