// The search form: collection, query, mode, options.

import { fill, h } from "../../dom.js";
import { MODES, SIZES } from "./state.js";

const NAMES = {
  vector: ["Meaning", "finds rows with the same meaning, also in other words"],
  keyword: ["Words", "finds rows that contain the words"],
  hybrid: ["Both", "ranks by meaning and by matching words; also finds codes"],
};

/**
 * {element, focus(), show(state), values()}. `submit(values)` on Enter and by the button, `choose(collection)` when
 * another collection is chosen.
 */
export function searchForm(collections, { submit, choose }) {
  const collection = h(
    "select",
    { id: "collection", onchange: () => choose(collection.value) },
    collections.map((each) => h("option", { value: each }, each)),
  );
  const query = h("input", { type: "search", id: "query", autocomplete: "off", enterkeyhint: "search", maxlength: "8000", placeholder: "For example: leaking pump, or 4711" });
  const modes = Object.keys(NAMES).map((mode) => h("input", { type: "radio", name: "mode", value: mode, id: `mode-${mode}`, onchange: () => tell() }));
  const size = h("select", { id: "size" }, SIZES.map((each) => h("option", { value: each }, each)));
  const variety = h("input", { type: "range", id: "variety", min: "0", max: "90", step: "10", oninput: () => tell() });
  const told = h("output", { for: "variety" });
  const least = h("input", { type: "number", id: "least", step: "0.01", placeholder: "any", oninvalid: () => (options.open = true) });
  const scale = h("span", { class: "muted" });
  const group = h("input", { type: "checkbox" });
  const passages = h("input", { type: "checkbox" });
  const explain = h("input", { type: "checkbox" });
  const tell = () => {
    told.value = variety.value === "0" ? "off" : `${variety.value} %`;
    variety.setAttribute("aria-valuetext", told.value);
    const words = modes.some((each) => each.checked && each.value === "keyword");
    fill(scale, words ? "(BM25, from 0)" : "(cosine, 0 to 1)");
    least.min = words ? 0 : -1;
    least.max = words ? "" : 1;
  };

  const values = () => ({
    collection: collection.value,
    q: query.value.trim(),
    mode: modes.find((each) => each.checked)?.value ?? MODES[0],
    k: Number(size.value),
    variety: Number(variety.value),
    min: least.value === "" ? null : Number(least.value),
    group: group.checked,
    passages: passages.checked,
    explain: explain.checked,
  });
  const onsubmit = (event) => {
    event.preventDefault();
    submit(values());
  };
  const options = h(
    "details",
    { class: "options" },
    h("summary", null, "Options"),
    h(
      "div",
      { class: "option-fields" },
      h("div", { class: "field" }, h("label", { for: "size" }, "Rows"), size),
      h("div", { class: "field" }, h("label", { for: "variety" }, "Variety ", told), variety),
      h("div", { class: "field" }, h("label", { for: "least" }, "Minimum score ", scale), least),
      h("label", { class: "check" }, group, "Group nearly identical rows"),
      h("label", { class: "check" }, passages, "All matching passages"),
      h("label", { class: "check" }, explain, "Explain"),
    ),
  );
  const element = h(
    "form",
    { class: "card search-form", role: "search", onsubmit },
    h("div", { class: "field" }, h("label", { for: "collection" }, "Collection"), collection),
    h("div", { class: "field grow" }, h("label", { for: "query" }, "What are you looking for?"), query),
    h("button", { type: "submit", class: "primary" }, "Search"),
    h(
      "div",
      { class: "ways" },
      h(
        "fieldset",
        { class: "modes" },
        h("legend", { class: "visually-hidden" }, "Search by"),
        modes.map((mode) => h("span", null, mode, h("label", { for: mode.id, title: NAMES[mode.value][1] }, NAMES[mode.value][0]))),
      ),
      options,
    ),
  );

  function show(state) {
    if (!collections.includes(state.collection)) collection.append(h("option", { value: state.collection }, state.collection));
    if (!SIZES.includes(state.k) && ![...size.options].some((each) => each.value === String(state.k))) size.append(h("option", { value: state.k }, state.k));
    collection.value = state.collection;
    query.value = state.q;
    for (const mode of modes) mode.checked = mode.value === state.mode;
    size.value = state.k;
    variety.value = state.variety;
    least.value = state.min ?? "";
    group.checked = state.group;
    passages.checked = state.passages;
    explain.checked = state.explain;
    if (state.variety > 0 || state.min !== null || !state.group || state.passages || state.explain) options.open = true;
    tell();
  }
  return { element, values, show, focus: () => (query.focus(), query.select()) };
}
