// Which points share a colour: the values of a field where they are few, else the most frequent ones, or ranges of numbers.

const MOST = 8;
const RANGES = 5;
const NONE = "(none)";

/** `values`: by point. `[{name, places}]`, at most eight; each place stands in one of them. */
export function groupsOf(values) {
  const by = new Map();
  values.forEach((value, place) => {
    const name = nameOf(value);
    if (!by.has(name)) by.set(name, []);
    by.get(name).push(place);
  });
  const numbers = values.filter((value) => value !== null && value !== undefined);
  if (by.size > MOST && numbers.length > 0 && numbers.every((value) => typeof value === "number")) return ranges(values);
  const groups = [...by].map(([name, places]) => ({ name, places })).sort((one, other) => other.places.length - one.places.length);
  if (groups.length <= MOST) return groups;
  const rest = groups.slice(MOST - 1);
  return [...groups.slice(0, MOST - 1), { name: `${rest.length} others`, places: rest.flatMap((group) => group.places) }];
}

function nameOf(value) {
  return value === null || value === undefined || value === "" ? NONE : String(value);
}

/** As many points in each, as far as equal numbers allow. */
function ranges(values) {
  const sorted = values.filter((value) => typeof value === "number").sort((one, other) => one - other);
  const cuts = [...new Set(Array.from({ length: RANGES }, (_, place) => sorted[Math.floor((place * sorted.length) / RANGES)]))];
  const groups = cuts.map((cut, place) => ({ name: "", from: cut, below: cuts[place + 1] ?? Infinity, places: [] }));
  const none = { name: NONE, places: [] };
  values.forEach((value, place) => {
    const group = typeof value === "number" ? groups.find((each) => value < each.below) : none;
    group.places.push(place);
  });
  for (const group of groups) {
    const held = group.places.map((place) => values[place]);
    const [least, most] = [Math.min, Math.max].map((choose) => held.reduce((one, other) => choose(one, other)));
    group.name = least === most ? String(least) : `${least} – ${most}`;
  }
  return [...groups, none].filter((group) => group.places.length > 0);
}
