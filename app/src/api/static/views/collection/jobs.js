// The last jobs as a table: when, what, how long, what came of it.

import { h } from "../../dom.js";
import { isOver, kindOf, report, stateBadge, summary } from "../../jobs.js";
import { ago, duration } from "../../parts.js";
import { table } from "../../widgets.js";

const COLUMNS = [
  { name: "Started", kind: "short" },
  { name: "Collection" },
  { name: "Job", kind: "short" },
  { name: "State", kind: "short" },
  { name: "Took", kind: "number" },
  { name: "Result", kind: "wide" },
];

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
