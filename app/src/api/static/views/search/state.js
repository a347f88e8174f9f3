// What is looked for, as one value: out of the address, into the address, and as the body of a request. Touches no page.

export const MODES = ["hybrid", "vector", "keyword"];
export const SIZES = [10, 20, 50];
const PASSAGES = 10;
const DAY_MS = 86_400_000;

/**
 * `variety` 0 to 100 (1 - mmr_lambda, in per cent), `min` a least score or null, `like` a row's id or null, `filters` by field:
 * {in: [values]} or {from, to} with numbers, or days as YYYY-MM-DD; either end may be left out.
 */
export function read({ path, query }) {
  return {
    collection: path[0] || null,
    q: query.get("q") ?? "",
    mode: MODES.includes(query.get("mode")) ? query.get("mode") : MODES[0],
    k: between(query.get("k"), 1, 1000) ?? SIZES[0],
    variety: between(query.get("variety"), 0, 100) ?? 0,
    min: between(query.get("min"), -1, 1000),
    like: query.get("like"),
    group: query.get("group") !== "0",
    passages: query.get("passages") === "1",
    explain: query.get("explain") === "1",
    filters: filtersIn(query.get("filters")),
  };
}

/** The address; what is as usual is left out. */
export function hashOf(state) {
  const query = new URLSearchParams();
  if (state.q !== "") query.set("q", state.q);
  if (state.like !== null) query.set("like", state.like);
  if (state.mode !== MODES[0]) query.set("mode", state.mode);
  if (state.k !== SIZES[0]) query.set("k", state.k);
  if (state.variety > 0) query.set("variety", state.variety);
  if (state.min !== null) query.set("min", state.min);
  if (!state.group) query.set("group", "0");
  if (state.passages) query.set("passages", "1");
  if (state.explain) query.set("explain", "1");
  if (Object.keys(state.filters).length > 0) query.set("filters", JSON.stringify(state.filters));
  const written = query.toString();
  return `#/search/${encodeURIComponent(state.collection ?? "")}${written === "" ? "" : `?${written}`}`;
}

/** The body of POST .../search; null when nothing is looked for. */
export function request(state) {
  if (state.like === null && state.q.trim() === "") return null;
  const body = state.like === null ? { query: state.q, mode: state.mode, group: state.group } : { like: state.like };
  body.k = state.k;
  const filter = filterOf(state.filters);
  if (filter !== null) body.filter = filter;
  if (state.min !== null) body.min_score = state.min;
  if (state.variety > 0) body.mmr_lambda = Math.round(100 - state.variety) / 100;
  if (state.passages) body.passages = PASSAGES;
  if (state.explain) body.explain = true;
  return body;
}

/** In the language of filters; null for none. */
export function filterOf(filters) {
  const terms = Object.entries(filters).flatMap(([name, choice]) => termsOf(name, choice));
  if (terms.length === 0) return null;
  return terms.length === 1 ? terms[0] : { $and: terms };
}

function termsOf(name, { in: values, from = null, to = null }) {
  if (values !== undefined) return [{ [name]: values.length === 1 ? values[0] : { $in: values } }];
  if (typeof from === "number" && typeof to === "number") return [{ [name]: { $between: [from, to] } }];
  const terms = [];
  if (from !== null) terms.push({ [name]: { $gte: from } });
  // A day includes its hours: texts of times stand behind their day's and before the next one's.
  if (to !== null) terms.push({ [name]: typeof to === "string" ? { $lt: dayAfter(to) } : { $lte: to } });
  return terms;
}

function dayAfter(day) {
  return new Date(Date.parse(`${day}T00:00:00Z`) + DAY_MS).toISOString().slice(0, 10);
}

function between(text, least, most) {
  if (text === null || text.trim() === "") return null;
  const number = Number(text);
  return Number.isFinite(number) && number >= least && number <= most ? number : null;
}

/** Out of an address that anybody may have written: what is not of the right shape is dropped. */
export function filtersIn(text) {
  let told;
  try {
    told = JSON.parse(text ?? "{}");
  } catch {
    return {};
  }
  if (told === null || typeof told !== "object" || Array.isArray(told)) return {};
  return Object.fromEntries(Object.entries(told).filter(([, choice]) => sound(choice)));
}

function sound(choice) {
  if (choice === null || typeof choice !== "object") return false;
  if (choice.in !== undefined) return Array.isArray(choice.in) && choice.in.length > 0 && choice.in.every(plain);
  const ends = [choice.from, choice.to].filter((end) => end !== undefined && end !== null);
  return ends.length > 0 && ends.every((end) => Number.isFinite(end) || isDay(end)) && new Set(ends.map((end) => typeof end)).size === 1 && !reversed(choice);
}

/** Whether a range begins after its end, so that no row can fit. */
export function reversed({ from = null, to = null }) {
  return from !== null && to !== null && from > to;
}

function plain(value) {
  return ["string", "boolean"].includes(typeof value) || Number.isFinite(value);
}

export function isDay(value) {
  return typeof value === "string" && /^\d{4}-\d{2}-\d{2}$/.test(value) && !Number.isNaN(Date.parse(value));
}
