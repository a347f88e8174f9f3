// The shell: maps addresses to views and shows the menu, errors, and the dialogs for the key and the shortcuts.

import { forgetKey, get, hasKey, onKeyWanted } from "./api.js";
import { askKey, closeDialogs, openDialog } from "./dialogs.js";
import { fill, h } from "./dom.js";
import { listen, shortcut, table } from "./keys.js";
import { failure, loading } from "./parts.js";

/**
 * The views, by the first part of the address (#/NAME/...). `page`: its name in the menu; `under`: the page to mark instead. A view is a module with `title` (a
 * string, or a function of the parameters) and `async show(root, context)`. context: `parameters` {path: [the rest of the
 * address, decoded], query: URLSearchParams}, `go(hash, {replace})`, `announce(text)` for screen readers, `cards(found)` to
 * show or hide the menu's GPU entry, `signal`, which is aborted when the user leaves the view. show may return a function
 * that cleans up, or {cleanup, update}: then `update(parameters)` is called instead of a new show when only the rest of the
 * address has changed.
 */
const VIEWS = {
  search: { page: "Search", load: () => import("./views/search.js") },
  collections: { page: "Collections", load: () => import("./views/collections.js") },
  map: { page: "Map", load: () => import("./views/map.js") },
  tables: { page: "Tables", load: () => import("./views/tables.js") },
  gpu: { page: "GPU", load: () => import("./views/gpu.js") },
  rows: { under: "collections", load: () => import("./views/rows.js") },
};
const FIRST = "#/search";
const THEMES = ["auto", "light", "dark"];

const main = document.getElementById("main");
let cards = null; // whether there is a GPU; null: not known yet
let current = { name: null, place: null, leaving: new AbortController(), cleanup: null, update: null, title: "" };

function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [name, ...rest] = path.split("/");
  return { name: decoded(name), path: rest.map(decoded), query: new URLSearchParams(query) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function go(hash, { replace = false } = {}) {
  if (replace) history.replaceState(null, "", hash);
  else if (location.hash !== hash) history.pushState(null, "", hash);
  return route();
}

function announce(text) {
  const place = document.getElementById("announcements");
  place.textContent = "";
  // A change after a moment: the same sentence twice is told twice.
  setTimeout(() => (place.textContent = text), 50);
}

async function route() {
  const { name, path, query } = parse(location.hash || FIRST);
  const view = Object.hasOwn(VIEWS, name) ? VIEWS[name] : null;
  const parameters = { path, query };
  mark(name);
  if (current.name === name && current.update) {
    namePage(current.title, parameters);
    return current.update(parameters);
  }
  leave();
  const place = [name, ...path].join("/");
  const moved = current.name !== null && current.place !== place;
  const focused = current.name === null ? null : document.activeElement;
  const mine = (current = { name, place, leaving: new AbortController(), cleanup: null, update: null, title: "" });
  if (view === null) return missing();
  const root = h("div", { class: `view view-${name}` });
  if (moved) fill(main, loading());
  try {
    const module = await view.load();
    if (mine.leaving.signal.aborted) return undefined;
    fill(main, root);
    mine.title = module.title;
    namePage(module.title, parameters);
    if (moved) main.focus({ preventScroll: true });
    const left = await module.show(root, { parameters, go, announce, cards: showCards, signal: mine.leaving.signal });
    if (!mine.leaving.signal.aborted && focused !== null) refocus(focused.id);
    const cleanup = typeof left === "function" ? left : (left?.cleanup ?? null);
    if (mine.leaving.signal.aborted) cleanup?.();
    else Object.assign(mine, { cleanup, update: left?.update ?? null });
    if (cards === null && name !== "gpu") findCards();
  } catch (error) {
    if (mine.leaving.signal.aborted) return undefined;
    fill(main, root);
    fill(root, failure(error, route));
    announce(error.message);
  }
  return undefined;
}

/**
 * Looks for a GPU once. A request with a key asks for the device that computes, which every key may see; the figures of the
 * cards need a scope of their own.
 */
async function findCards() {
  cards = false;
  try {
    showCards(hasKey() ? (await get("/v1/info")).device.kind === "cuda" : (await get("/v1/gpu")).devices.length > 0);
  } catch {
    // The menu stays without the GPU.
  }
}

function showCards(found) {
  if (cards === found) return;
  cards = found;
  pages();
  mark(current.name);
}

/** Puts the focus back where it was if the element was rebuilt; on the page itself otherwise. */
function refocus(id) {
  if (![document.body, main].includes(document.activeElement)) return;
  ((id && document.getElementById(id)) || main).focus({ preventScroll: true });
}

function namePage(title, parameters) {
  document.title = `${typeof title === "function" ? title(parameters) : title} – owl-sap`;
}

function leave() {
  current.leaving.abort();
  current.cleanup?.();
  current.cleanup = null;
}

function missing() {
  document.title = "Not found – owl-sap";
  fill(main, h("h1", null, "Not found"), h("p", null, "This page does not exist. ", h("a", { href: FIRST }, "Go to the search")));
}

function mark(name) {
  for (const link of document.querySelectorAll("#pages a")) {
    if (link.dataset.view === (VIEWS[name]?.under ?? name)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function pages() {
  const items = Object.entries(VIEWS).filter(([name, view]) => view.page && (name !== "gpu" || cards));
  fill(
    document.getElementById("pages"),
    items.map(([name, view]) => h("li", null, h("a", { href: `#/${name}`, dataset: { view: name } }, view.page))),
  );
}

function tools() {
  const theme = h("button", { type: "button", class: "quiet", onclick: () => nextTheme(theme) });
  const forget = h("button", { type: "button", class: "quiet", onclick: forgetAndAsk }, "Forget key");
  const api = document.getElementById("api"); // absent where /docs is off
  const help = h("button", { type: "button", class: "quiet help", "aria-label": "Keyboard shortcuts", onclick: showShortcuts }, "?");
  const update = () => {
    forget.hidden = !hasKey();
    if (api) api.hidden = hasKey(); // a link sends no key
  };
  document.addEventListener("owl-key", update);
  update();
  nameTheme(theme);
  fill(document.getElementById("tools"), forget, theme, help);
}

function currentTheme() {
  return document.documentElement.dataset.theme ?? "auto";
}

function nextTheme(button) {
  const next = THEMES[(THEMES.indexOf(currentTheme()) + 1) % THEMES.length];
  if (next === "auto") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("owl-sap.theme");
  } else {
    document.documentElement.dataset.theme = next;
    localStorage.setItem("owl-sap.theme", next);
  }
  nameTheme(button);
  announce(`Theme: ${next}`);
}

function nameTheme(button) {
  const theme = currentTheme();
  const [sign, word] = { auto: ["◐", "Auto"], light: ["☀", "Light"], dark: ["☾", "Dark"] }[theme];
  fill(button, sign, h("span", { class: "word" }, word));
  button.setAttribute("aria-label", `Theme: ${theme}. Change`);
}

function forgetAndAsk() {
  forgetKey();
  announce("Key forgotten");
  leave();
  current.name = null; // the page shows data of the key's owner
  cards = null;
  route();
}

function showShortcuts() {
  openDialog("Keyboard shortcuts", table());
}

function start() {
  pages();
  tools();
  onKeyWanted(askKey);
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address belongs to the view
    main.focus();
  });
  shortcut("?", "show this list", showShortcuts);
  listen();
  // Links, Back and Forward; go() routes by itself.
  addEventListener("hashchange", () => {
    closeDialogs();
    route();
  });
  route();
}

start();
