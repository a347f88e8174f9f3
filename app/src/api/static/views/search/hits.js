// The hits of a search: score, text with the words marked, fields and actions.

import { post } from "../../api.js";
import { fill, h, hidden, plain } from "../../dom.js";
import { many, percent } from "../../figures.js";
import { ago, failure, loading, note, number } from "../../parts.js";
import { openRow } from "../row.js";
import { explained, milliseconds } from "./explain.js";
import { firstOf, highlighted, wordsOf } from "./highlight.js";
import { filterOf } from "./state.js";

const FLOOR = 0.2; // of relevance: a hit below it is probably irrelevant
const LONGEST = 700;
const BEFORE = 160;
const MOST_ALIKE = 50;
let made = 0;
const RELEVANCE = "Relevance. 0 %: like an unrelated query; below 20 %: probably irrelevant.";
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
  const share = mode === "keyword" ? () => null : nearness;
  return [
    found.stale_since && note("warning", "SAP HANA is unavailable. Rows are as of the last complete sync, ", ago(found.stale_since), "."),
    found.notes.filter((each) => !irrelevant(found) || !each.startsWith("nothing relevant")).map((each) => note("info", `${each.charAt(0).toUpperCase()}${each.slice(1)}`)),
    state.like === null && state.min !== null && note("info", `The minimum score applies to the ${mode === "keyword" ? "BM25 score" : "cosine similarity"}, not to the relevance shown.`),
    h("p", { class: "summary" }, said(found, state), irrelevant(found) ? ". The nearest rows:" : h("span", { class: "muted" }, ` in ${milliseconds(total(found.took_ms))}`)),
    found.hits.length === 0 && nothing(state),
    listed(found.hits, (hit) => card(hit, state, { words, share, mode, labels, more })),
    state.explain && explained(found, { mode, words, about: SCORES[mode], score }),
  ];
}

function nearness(score) {
  return Math.max(0, Math.min(1, score));
}

/** A line parts the relevant hits from weaker ones below them. */
function listed(hits, show) {
  const list = (some) => h("ol", { class: "hits" }, some.map((hit) => h("li", null, show(hit))));
  const first = hits.findIndex(weak);
  if (first < 1 || !hits.slice(first).every(weak)) return list(hits);
  return [list(hits.slice(0, first)), h("p", { class: "small muted" }, "Probably irrelevant:"), list(hits.slice(first))];
}

/** What was found, in a sentence. Fewer than `k` rows are all that fit. */
export function said(found, { k }) {
  if (irrelevant(found)) return "Nothing relevant found";
  const { hits } = found;
  const grouped = hits.some(({ similar }) => similar > 0);
  if (!grouped && hits.length < k) return `${many(hits.length, "row")} found`;
  return `The ${many(hits.length, grouped ? "best group of rows" : "best row", grouped ? "best groups of rows" : "best rows")}`;
}

function irrelevant({ hits }) {
  return hits.length > 0 && hits.every(weak);
}

function weak({ relevance }) {
  return typeof relevance === "number" && relevance < FLOOR;
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
      share && h(
        "span",
        { class: "score", title: typeof hit.relevance === "number" ? `${RELEVANCE} Score: ${score(hit.score)}` : SCORES[mode] },
        typeof hit.relevance === "number"
          ? [bar(hit.relevance, weak(hit)), hidden("Relevance "), h("span", { class: "score-figure" }, percent(hit.relevance))]
          : [bar(share(hit.score)), hidden("Score "), h("span", { class: "score-figure" }, score(hit.score))],
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
        h("button", { type: "button", class: "small quiet", "aria-describedby": id, onclick: () => more(hit.id) }, "Similar rows"),
        h("button", { type: "button", class: "small quiet", "aria-describedby": id, onclick: () => openRow(state.collection, hit.id) }, "Whole row"),
      ),
    ),
    hit.similar > 0 && grouped(hit, state, (each) => card(each, state, { words, share: null, mode, labels, more })),
  );
}

function bar(share, faint = false) {
  if (share === null) return null;
  return h("span", { class: faint ? "score-bar faint" : "score-bar", "aria-hidden": "true" }, h("span", { style: { width: `${Math.round(share * 100)}%` } }));
}

/** Show the rows grouped under a hit. Unfolding the list requests the hit's nearest rows. */
function grouped(hit, state, show) {
  const list = h("ol", { class: "alike" });
  const opened = async () => {
    if (!details.open || list.childElementCount > 0) return;
    fill(list, h("li", null, loading()));
    try {
      const filter = filterOf(state.filters);
      const body = { like: hit.id, k: Math.min(hit.similar, MOST_ALIKE), ...(filter && { filter }) };
      const { hits } = await post(`/v1/collections/${encodeURIComponent(state.collection)}/search`, body);
      fill(list, hits.map((each) => h("li", null, show(each))));
    } catch (error) {
      fill(list, h("li", null, failure(error)));
    }
  };
  const details = h("details", { class: "group", ontoggle: opened }, h("summary", null, `${number(hit.similar)} more like this`), list);
  return details;
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
