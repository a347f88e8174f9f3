// Figures as people read them, beyond those of parts.js: shares, sizes, moments, keys of rows. Knows no page.

import { plain } from "./dom.js";
import { number } from "./parts.js";

const fine = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 1 });
const moments = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

/** `1 row`, `2 rows`. */
export function many(value, one, more = `${one}s`) {
  return `${number(value)} ${value === 1 ? one : more}`;
}

/** One digit behind the point, for what was measured. */
export function measure(value, unit = "") {
  if (value === null || value === undefined) return "–";
  return unit ? `${fine.format(value)} ${unit}` : fine.format(value);
}

export function gibibytes(value) {
  return value === null || value === undefined ? "–" : measure(value / 2 ** 30, "GiB");
}

/** Of a share between 0 and 1. Never 100 % before all is done, never 0 % once something is. */
export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  const rounded = Math.round(share * 100);
  if (rounded === 100 && share < 1) return "99 %";
  return rounded === 0 && share > 0 ? "< 1 %" : `${rounded} %`;
}

/** Of an ISO time or of POSIX seconds. A time without a zone is UTC, as the service means it. */
export function asDate(time) {
  if (typeof time === "number") return new Date(time * 1000);
  return new Date(/(?:Z|[+-]\d\d:?\d\d)$/.test(time) ? time : `${time}Z`);
}

/** In the reader's own time zone. */
export function moment(time) {
  return time === null || time === undefined ? "–" : moments.format(asDate(time));
}

/** The key of a row: `MANDT=100, MATNR=4711`. */
export function keyText(key) {
  return Object.entries(key)
    .map(([name, value]) => `${name}=${value === null ? "NULL" : value}`)
    .join(", ");
}

/** The value of a metadata field. */
export function fieldText(value) {
  if (value === null) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  return plain(typeof value === "object" ? JSON.stringify(value) : String(value));
}
