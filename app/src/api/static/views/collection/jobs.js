// The latest jobs as a table: start, kind, duration, result.

import { h } from "../../dom.js";
import { asDate } from "../../figures.js";
import { isOver, kindOf, report, stateBadge, summary } from "../../jobs.js";
import { ago, duration, note } from "../../parts.js";
import { table } from "../../widgets.js";

const COLUMNS = [
  { name: "Started", kind: "short" },
  { name: "Collection" },
  { name: "Job", kind: "short" },
  { name: "State", kind: "short" },
  { name: "Took", kind: "number" },
  { name: "Result", kind: "wide" },
];

const CLOCKS_MS = 60_000; // the store's clock may differ from the service's

/** A note about collections whose last sync is not among `jobs` (newest first), as one of the command line is not. */
export function syncedOutside(collections, jobs) {
  const found = collections.filter(({ collection, last_sync: last }) => {
    if (last === null) return false;
    const own = jobs.find((job) => job.collection === collection && ["sync", "build", "retry"].includes(job.kind));
    return own === undefined || (isOver(own) && asDate(last).getTime() > asDate(own.finished).getTime() + CLOCKS_MS);
  });
  if (found.length === 0) return null;
  const told = found.map(({ collection, last_sync: last }, place) => [place > 0 && ", ", `${collection} `, ago(last)]);
  return note("info", "Last synced outside this list: ", told, ". Syncs that ", h("code", null, "owl-sap sync"), " runs are not listed as jobs.");
}

/** `none`: what is said when there are no jobs. `collection`: all are of this one, so it needs no column. */
export function jobsTable(jobs, none, collection = null) {
  if (jobs.length === 0) return h("p", { class: "muted" }, none);
  const without = (cells) => (collection === null ? cells : cells.toSpliced(1, 1));
  return table({ caption: "Last jobs", columns: without(COLUMNS), rows: jobs.map((job) => without(row(job))) });
}

function row(job) {
  const took = job.finished !== null && job.started !== null ? duration(job.finished - job.started) : "–";
  const said = isOver(job) ? [h("p", { class: "said" }, summary(job)), report(job)] : (job.error ?? job.note ?? "");
  return [ago(job.started ?? job.created), job.collection, kindOf(job), stateBadge(job), took, said];
}
