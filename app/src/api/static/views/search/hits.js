// The hits of a search: score, text with the words marked, fields and actions.

import { fill, h, hidden, plain } from "../../dom.js";
import { ago, note, number } from "../../parts.js";
import { openRow } from "../row.js";
import { explained, milliseconds } from "./explain.js";
import { firstOf, highlighted, wordsOf } from "./highlight.js";

const LONGEST = 700;
const BEFORE = 160;
let made = 0;
const SCORES = {
  vector: "Cosine similarity of query and text: 1 means the same, 0 unrelated.",
  keyword: "BM25: rare words count more than frequent ones. Compare scores within one search only.",
  hybrid: "Similarity in meaning (-1 to 1) plus up to 0.5 for matching words. Compare scores within one search only.",
};

/** `found`: the answer of the service, whose fields are called as `labels` says. `more(id)` shows rows like that one. */
export function results(found, state, labels, more) {
  const mode = state.like === null ? state.mode : "vector";
  const words = state.like === null ? wordsOf(state.q) : [];
  // BM25 has no upper bound, so a bar could only compare a hit with the best one, however bad that is.
  const share = (score) => (mode === "keyword" ? null : Math.max(0, Math.min(1, score)));
  return [
    found.stale_since && note("warning", "SAP HANA is unavailable. Rows are as of the last complete sync, ", ago(found.stale_since), "."),
    found.notes.map((each) => note("info", each)),
    mode === "hybrid" && state.min !== null && note("info", "In this mode the minimum score applies to the cosine similarity, not to the score shown."),
    h("p", { class: "summary" }, counted(found.hits.length), h("span", { class: "muted" }, ` in ${milliseconds(total(found.took_ms))}`)),
    found.hits.length === 0 && nothing(state),
    h("ol", { class: "hits" }, found.hits.map((hit) => h("li", null, card(hit, state, { words, share, mode, labels, more })))),
    state.explain && explained(found, { mode, words, about: SCORES[mode], score }),
  ];
}

export function counted(hits) {
  return hits === 1 ? "1 row" : `${hits} rows`;
}

function card(hit, state, { words, share, mode, labels, more }) {
  const id = `hit-${(made += 1)}`; // not randomUUID: over http from another machine there is none
  return h(
    "article",
    { class: "card hit", "aria-labelledby": id },
    h(
      "div",
      { class: "hit-head" },
      h("h2", { id }, h("button", { type: "button", class: "link", onclick: () => openRow(state.collection, hit.id) }, keyOf(hit, labels))),
      h(
        "span",
        { class: "score", title: SCORES[mode] },
        bar(share(hit.score)),
        hidden("Score "),
        h("span", { class: "score-figure" }, score(hit.score)),
      ),
    ),
    passages(hit, words),
    h(
      "div",
      { class: "hit-foot" },
      fields(hit, labels),
      h(
        "div",
        { class: "hit-tools" },
        h("button", { type: "button", class: "small quiet", "aria-describedby": id, onclick: () => more(hit.id) }, "More like this"),
        h("button", { type: "button", class: "small quiet", "aria-describedby": id, onclick: () => openRow(state.collection, hit.id) }, "Whole row"),
      ),
    ),
  );
}

function bar(share) {
  if (share === null) return null;
  return h("span", { class: "score-bar", "aria-hidden": "true" }, h("span", { style: { width: `${Math.round(share * 100)}%` } }));
}

/** Names (unless not `named`) and values of the key; foreign records have an id only. */
export function keyOf({ id, key }, labels, { named = true } = {}) {
  const parts = Object.entries(key);
  if (parts.length === 0) return h("bdi", null, id);
  return parts.map(([name, value], place) => [
    place > 0 && " · ",
    named && h("span", { class: "key-name" }, labels.named(name), " "),
    h("bdi", { class: "key-value" }, plain(String(value))),
  ]);
}

function passages(hit, words) {
  const all = hit.passages ?? [];
  if (all.length < 2) return excerpt(hit.text, words);
  return h(
    "ol",
    { class: "passages", "aria-label": "Matching passages, best first" },
    all.map((each) => h("li", null, h("span", { class: "small muted" }, hidden("Score "), score(each.score)), excerpt(each.text, words))),
  );
}

function excerpt(stored, words) {
  const text = plain(stored);
  const place = h("p", { class: "text", dir: "auto" });
  if (text.length <= LONGEST) return fill(place, highlighted(text, words));
  const first = Math.max(0, firstOf(text, words));
  const start = whole(text, Math.max(0, Math.min(first - BEFORE, text.length - LONGEST)));
  const end = whole(text, start + LONGEST);
  const all = h("button", { type: "button", class: "link small", onclick: () => fill(place, highlighted(text, words)) }, `show all ${number(text.length)} characters`);
  return fill(place, start > 0 && "… ", highlighted(text.slice(start, end), words), end < text.length && "… ", all);
}

/** Not in the middle of a pair of code units. */
function whole(text, at) {
  return /[\udc00-\udfff]/.test(text.charAt(at)) ? at + 1 : at;
}

/** Without those that stand in the key above. */
function fields({ key, metadata }, labels) {
  const entries = labels.entries(metadata).filter(([name, value]) => value !== null && !Object.hasOwn(key, name));
  if (entries.length === 0) return null;
  return h(
    "dl",
    { class: "fields" },
    entries.map(([name, value]) => h("div", null, h("dt", null, labels.named(name)), h("dd", null, h("bdi", null, labels.value(name, value))))),
  );
}

function nothing(state) {
  const filtered = Object.keys(state.filters).length > 0;
  const hints = [
    filtered && "Remove a filter.",
    state.min !== null && "Lower the minimum score.",
    state.like === null && state.mode === "keyword" && "Try Meaning mode.",
    state.like === null && state.mode !== "keyword" && "Try other words.",
  ].filter(Boolean);
  return h("div", { class: "card empty" }, h("p", null, h("strong", null, "Nothing found.")), hints.length > 0 && h("p", null, hints.join(" ")));
}

function total(took) {
  return took.total ?? Object.values(took).reduce((sum, each) => sum + each, 0);
}

function score(value) {
  return Math.abs(value) < 0.1 && value !== 0 ? value.toFixed(4) : value.toFixed(Math.abs(value) < 10 ? 3 : 1);
}
