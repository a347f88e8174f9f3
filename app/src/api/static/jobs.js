// Jobs as they go: a line that follows one live, and what a finished one has to say. Knows the routes of jobs, not what
// page it is on.

import { events, get } from "./api.js";
import { fill, h } from "./dom.js";
import { many, measure, moment, percent } from "./figures.js";
import { badge, duration, number } from "./parts.js";
import { facts } from "./widgets.js";

const OVER = ["succeeded", "failed", "cancelled"];
const WINDOW_MS = 15_000;
const LEAST_MS = 400;
const BURST_MS = 100; // the service looks for events every 200 ms
const TICK_MS = 1000;
const KINDS = { sync: "Sync", verify: "Verify", retry: "Retry", build: "Build" };
const COLOURS = { waiting: "warning", succeeded: "good", failed: "error", cancelled: "warning" };
const PAUSED = {
  max_deletes: "Paused: the deletions exceed the limit.",
  schema_changed: "Paused: the table, its key or a column in use has changed.",
  log_missing: "Paused: the change log is missing.",
  source_empty: "Paused: the source is empty, so nothing was deleted.",
};

export function isOver(job) {
  return OVER.includes(job.state);
}

export function kindOf(job) {
  return KINDS[job.kind] ?? job.kind;
}

export function stateBadge(job) {
  return badge(job.state, COLOURS[job.state]);
}

/** How fast rows are handled, of the last seconds. */
class Rate {
  #samples = [];

  add(done, time = performance.now()) {
    const last = this.#samples.at(-1);
    if (last && done < last.done) this.#samples = []; // another attempt, or another pass over the rows
    // What happened before somebody looked comes all at once, and says nothing of how long it took.
    if (this.#samples.length && time - last.time < BURST_MS) last.done = done;
    else this.#samples.push({ done, time });
    while (this.#samples.length > 2 && time - this.#samples[0].time > WINDOW_MS) this.#samples.shift();
  }

  /** Null while too little is known. What stands still gets slower and slower. */
  perSecond(time = performance.now()) {
    const [first] = this.#samples;
    const last = this.#samples.at(-1);
    if (!first || first === last || last.done <= first.done || time - first.time < LEAST_MS) return null;
    return ((last.done - first.done) / (time - first.time)) * 1000;
  }
}

/**
 * The line of one job that goes on, followed live until `signal` is aborted. `announce` is told its end; `over` is called
 * with the record when it has come to its end, `gone` when it cannot be followed.
 */
export function liveJob(job, { announce, over, gone = () => {}, signal }) {
  const place = `/v1/jobs/${encodeURIComponent(job.id)}`;
  const rate = new Rate();
  const bar = h("progress", { "aria-label": `${kindOf(job)} of ${job.collection}` });
  const state = h("span", { class: "job-state" });
  const words = h("span", { class: "job-words" });
  let record = { ...job };
  let connected = true;
  let ended = false;
  let grows = false; // by a watermark nobody knows how many rows there will be: the total is what was read so far

  function show() {
    const { done = 0, total = 0 } = record.progress ?? {};
    const reading = grows || !readToTheEnd(record);
    if (total > 0 && !readToTheEnd(record)) {
      bar.max = total;
      bar.value = Math.min(done, total);
    } else {
      bar.removeAttribute("value");
    }
    const speed = record.state === "running" && reading ? rate.perSecond() : null;
    const parts = [
      far(record),
      speed && `${speed < 10 ? measure(speed) : number(Math.round(speed))} rows/s`,
      speed && total > done && `about ${duration((total - done) / speed)} left`,
      record.error ?? record.note,
      record.next_try && `next try ${moment(record.next_try)}`,
      !connected && "connection lost, reconnecting",
    ];
    fill(state, `${kindOf(record)} `, stateBadge(record));
    words.textContent = parts.filter(Boolean).join(" · ");
  }

  function end(final) {
    if (ended || signal.aborted) return;
    ended = true;
    clearInterval(ticking);
    announce(`${kindOf(final)} of ${final.collection}: ${summary(final)}`);
    over(final);
  }

  function happened({ event, data }) {
    connected = true;
    if (event === "result") return end(data);
    if (event === "progress") {
      grows ||= data.total > (record.progress?.total || Infinity);
      record.progress = data;
      rate.add(data.done);
    } else if (event === "state") {
      record = { ...record, error: null, note: null, next_try: null, ...data };
    }
    return show();
  }

  function lost(error) {
    clearInterval(ticking);
    gone(error);
  }

  async function closed() {
    // Over before it was followed, or its record is being forgotten.
    if (ended) return;
    try {
      end(await get(place, { signal }));
    } catch (error) {
      if (error.name !== "AbortError") lost(error);
    }
  }

  show();
  const ticking = setInterval(show, TICK_MS);
  signal.addEventListener("abort", () => clearInterval(ticking));
  events(`${place}/events`, {
    onEvent: happened,
    onEnd: closed,
    onError: (problem, attempt) => {
      if (attempt === null) return lost(problem);
      connected = false;
      return show();
    },
    signal,
  });
  return h("div", { class: "job-live" }, h("div", { class: "job-line" }, state, words), bar);
}

/** A job that goes on, as its record tells it now. */
export function jobLine(job) {
  return h(
    "div",
    { class: "job-live" },
    h(
      "div",
      { class: "job-line" },
      h("span", { class: "job-state" }, `${kindOf(job)} `, stateBadge(job)),
      h("span", { class: "job-words" }, [far(job), job.error ?? job.note].filter(Boolean).join(" · ")),
    ),
  );
}

/** Progress counts rows as they are read; of a sync the last ones are still to be embedded and written then. */
function readToTheEnd(job) {
  const { done = 0, total = 0 } = job.progress ?? {};
  return job.state === "running" && total > 0 && done >= total;
}

/** How far it is; null where nobody knows. */
function far(job) {
  const { done = 0, total = 0 } = job.progress ?? {};
  if (total === 0) return null;
  if (!readToTheEnd(job)) return `${number(done)} of ${many(total, "row")} (${percent(done / total)})`;
  const rest = ["sync", "build"].includes(job.kind) ? "embedding and writing the last rows" : "finishing";
  return `${many(total, "row")} read · ${rest}`;
}

/** What became of a job, in one sentence. */
export function summary(job) {
  if (job.error && job.state !== "succeeded") return job.error;
  const result = job.result;
  if (!result) return job.note ?? job.state;
  const tell = { sync: synced, build: synced, retry: retried, verify: verified }[job.kind];
  const said = tell ? tell(result) : job.state;
  return result.stopped ? `Stopped early. ${said}` : said;
}

function counted(result, names) {
  const parts = names.filter(([name]) => result[name]).map(([name, word]) => `${number(result[name])} ${word}`);
  return parts.length ? `: ${parts.join(", ")}` : "";
}

function paused(result) {
  return result.paused ? ` ${PAUSED[result.paused] ?? `Paused: ${result.paused}.`}` : "";
}

function synced(result) {
  const told = counted(result, [
    ["upserted", "written"],
    ["unchanged", "unchanged"],
    ["deleted", "deleted"],
    ["empty", "empty"],
    ["quarantined", "quarantined"],
    ["superseded", "superseded"],
  ]);
  return `${many(result.read ?? 0, "row")} read${told}.${paused(result)}`;
}

function retried(result) {
  const told = counted(result, [
    ["upserted", "repaired"],
    ["empty", "empty"],
    ["gone", "no longer in the source"],
    ["quarantined", "still quarantined"],
  ]);
  return `${many(result.retried ?? 0, "row")} retried${told}.`;
}

function verified(result) {
  if (result.stopped) return "The check is incomplete.";
  const told = counted(result, [
    ["missing", "missing"],
    ["stale", "stale"],
    ["orphaned", "orphaned"],
    ["duplicates", "duplicate"],
    ["bad_vectors", "with damaged vectors"],
  ]);
  const mended = result.repaired ? ` ${many(result.repaired, "row")} repaired.` : "";
  const verdict = result.ok ? "No differences" : "Differs from the source";
  return `${verdict}: ${many(result.rows ?? 0, "row")} stored${told.replace(":", ",")}.${mended}${paused(result)}`;
}

/** Everything that a finished job's report holds, folded away; null when there is none. */
export function report(job) {
  if (!job.result) return null;
  const pairs = Object.entries(job.result).filter(([name]) => name !== "collection");
  return h(
    "details",
    null,
    h("summary", null, "Report"),
    facts(pairs.map(([name, value]) => [name.replaceAll("_", " "), plain(value)])),
  );
}

function plain(value) {
  if (value === null) return "";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number") return measure(value);
  if (Array.isArray(value)) return value.map(plain).join("; ");
  if (typeof value !== "object") return String(value);
  return Object.entries(value)
    .map(([name, inner]) => `${name.replaceAll("_", " ")} ${plain(inner)}`)
    .join(", ");
}
