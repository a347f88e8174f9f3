// The freshness of a collection in words, and its address in the REST API.

import { h } from "../../dom.js";
import { asDate } from "../../figures.js";
import { ago, badge, duration } from "../../parts.js";

const LATE_MS = 60_000;

export function placeOf(name) {
  return `/v1/collections/${encodeURIComponent(name)}`;
}

/** There is no table behind it, so nothing to sync or to compare with. */
export function writtenByClients(collection) {
  return collection.method === "documents";
}

/** Nothing has come to its end yet, and nothing is there: rows of a first sync that goes on can be found already. */
export function isEmpty(collection) {
  return collection.last_sync === null && collection.rows === 0;
}

/** When it was last complete, and what is wrong about that. */
export function freshness(collection) {
  if (writtenByClients(collection)) return [badge("written by clients", "info")];
  if (collection.last_sync === null) return [badge("never synced", "warning")];
  const next = collection.next_sync;
  const overdue = next !== null && asDate(next).getTime() < Date.now() - LATE_MS;
  const lag = collection.lag_seconds;
  return [
    h("span", { class: "line" }, "synced ", ago(collection.last_sync)),
    lag !== null && h("span", { class: "line small muted" }, `up to ${lag < 60 ? "1 min" : duration(lag)} behind`),
    next !== null && !overdue && h("span", { class: "line small muted" }, "next sync ", ago(next)),
    overdue && badge("schedule overdue", "warning"),
    collection.stale_since !== null && badge("stale: HANA unavailable", "warning"),
  ];
}
