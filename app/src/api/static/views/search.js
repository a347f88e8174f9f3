// The search page.

import { get, post } from "../api.js";
import { fill, h } from "../dom.js";
import { failure, loading } from "../parts.js";

export const title = "Search";

export async function show(root, { parameters, go, signal }) {
  const names = (await get("/v1/collections", { signal })).map((each) => each.collection);
  const name = parameters.path[0] ?? names[0];
  const query = h("input", { type: "search", id: "query", value: parameters.query.get("q") ?? "" });
  const choice = h("select", { id: "collection" }, names.map((each) => h("option", { value: each, selected: each === name }, each)));
  const results = h("div");
  const submit = (event) => {
    event.preventDefault();
    go(`#/search/${encodeURIComponent(choice.value)}?${new URLSearchParams({ q: query.value })}`);
  };
  fill(
    root,
    h("h1", null, "Search"),
    h("form", { class: "card", onsubmit: submit }, h("label", { for: "collection" }, "Collection"), choice, h("label", { for: "query" }, "Search for"), query, h("button", { type: "submit", class: "primary" }, "Search")),
    results,
  );
  if (query.value === "") return;
  fill(results, loading("Searching …"));
  try {
    const found = await post(`/v1/collections/${encodeURIComponent(name)}/search`, { query: query.value }, { signal });
    fill(results, h("ol", null, found.hits.map((hit) => h("li", null, `${hit.score.toFixed(3)} ${hit.text}`))));
  } catch (error) {
    if (!signal.aborted) fill(results, failure(error));
  }
}
