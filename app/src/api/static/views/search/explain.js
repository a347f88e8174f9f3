// How a search found its hits, as tables: the times, the candidates, and what decided the place of each hit.

import { h, plain } from "../../dom.js";
import { keyText, many } from "../../figures.js";
import { facts } from "../../widgets.js";
import { matchedIn } from "./highlight.js";

const STAGES = { embed: "Embedding the query", store: "Searching the store", rank: "Diversity", group: "Grouping", passages: "Choosing passages", rerank: "Reranking" };

/** `found`: the answer of the service. `words`: those of the query; `about`: what a score means; `score` formats one. */
export function explained(found, { mode, words, about, score }) {
  const detail = found.explain ?? {};
  const times = Object.entries(found.took_ms).map(([stage, ms]) => `${STAGES[stage] ?? stage} ${milliseconds(ms)}`);
  return h(
    "section",
    { class: "card explained", "aria-labelledby": "explained" },
    h("h2", { id: "explained" }, "How it was found"),
    facts(
      [
        ["Time", times.join(", ")],
        ["Candidates", candidates(detail)],
        ["Words searched", (detail.words ?? []).map(plain).join(", ")],
        ["Index", detail.index && indexOf(detail.index)],
        ["Reranker", detail.reranker && rerankerOf(detail.reranker)],
      ],
      "wide",
    ),
    detail.hits?.length > 0 && ranking(found, { mode, words, score }),
    h("p", { class: "small muted" }, about),
    found.explain && h("details", null, h("summary", null, "Raw JSON"), h("pre", { class: "raw", tabindex: "0", role: "group", "aria-label": "Raw JSON" }, JSON.stringify(found.explain, null, 2))),
  );
}

export function milliseconds(value) {
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
}

function candidates({ candidates: all, rankings = {} }) {
  if (all === undefined) return null;
  const ways = [
    ["vector", "by meaning"],
    ["keyword", "by words"],
    ["key", "by a number in the key"],
  ];
  const told = ways.filter(([name]) => rankings[name]).map(([name, way]) => `${rankings[name]} ${way}`);
  return told.length > 0 ? `${many(all, "row")} (${told.join(", ")})` : many(all, "row");
}

function indexOf({ used }) {
  if (used === true) return "approximate (HNSW)";
  return used === false ? "exact comparison" : "not reported by the store";
}

function rerankerOf({ by, name, depth, why_not: whyNot }) {
  return whyNot ? `${by} ${name}: ${whyNot}` : `${by} ${name}, of the first ${many(depth, "row")}`;
}

/** One line a hit; a column that has no value in any line is left out. */
function ranking(found, { mode, words, score }) {
  const figure = (value) => (value === null || value === undefined ? null : score(value));
  const placed = (place) => (place ? `${score(place.score)} (${place.rank})` : null);
  const lines = found.explain.hits.map((each, place) => {
    const hit = found.hits[place];
    const best = hit.passages?.[0];
    return {
      row: plain(Object.keys(hit.key).length > 0 ? keyText(hit.key) : hit.id),
      score: figure(each.score),
      reranked: figure(found.explain.reranker?.scores?.[each.id]),
      meaning: mode === "keyword" ? null : (placed(each.vector) ?? figure(each.cosine)),
      keyword: placed(each.keyword),
      matched: matchedIn(plain(best?.text ?? hit.text), words).join(", ") || null,
      passage: best ? String(best.chunk + 1) : null,
    };
  });
  const columns = [
    ["score", mode === "hybrid" ? "Combined score" : "Score", "number"],
    ["reranked", "Reranker score", "number"],
    ["meaning", "Cosine (rank)", "number"],
    ["keyword", "BM25 (rank)", "number"],
    ["matched", "Matched words", ""],
    ["passage", "Passage", "number"],
  ].filter(([name]) => lines.some((line) => line[name] !== null));
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "group", "aria-label": "Scores of the hits" },
    h(
      "table",
      { class: "scores" },
      h("caption", { class: "visually-hidden" }, "Scores of the hits"),
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Row"), columns.map(([, heading, kind]) => h("th", { scope: "col", class: kind }, heading)))),
      h("tbody", null, lines.map((line) => h("tr", null, h("th", { scope: "row" }, h("bdi", null, line.row)), columns.map(([name, , kind]) => h("td", { class: kind }, line[name] ?? "–"))))),
    ),
  );
}
