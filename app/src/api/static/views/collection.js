// The page of one collection: its figures, running job, latest jobs, generations and quarantine.

import { get, post } from "../api.js";
import { confirmed } from "../dialogs.js";
import { breakable, fill, h } from "../dom.js";
import { many, moment } from "../figures.js";
import { isOver, jobLine, liveJob } from "../jobs.js";
import { badge, failure, note, number } from "../parts.js";
import { facts, refreshTimes, section, slowButton, whileVisible } from "../widgets.js";
import { freshness, placeOf, writtenByClients } from "./collection/freshness.js";
import { Generations } from "./collection/generations.js";
import { jobsTable, syncedOutside } from "./collection/jobs.js";
import { Quarantine } from "./collection/quarantine.js";

const REFRESH_SECONDS = 5;
const LAST_JOBS = 10;
const METHODS = { full: "full comparison", watermark: "watermark", log: "change log", rowid: "row id", delta: "delta table" };

export async function show(root, context) {
  const page = new Page(root, context, context.parameters.path[0]);
  await page.load();
  whileVisible(() => page.refresh(), REFRESH_SECONDS, context.signal);
}

class Page {
  constructor(root, context, name) {
    this.context = context;
    this.root = root;
    this.name = name;
    this.place = placeOf(name);
    this.live = null;
    this.shown = {};
    this.trouble = h("div");
    this.job = h("div", { class: "live-place" });
    this.figures = h("div", { class: "card" });
    this.rights = h("div");
    this.actions = this.#actions();
    this.advice = h("div");
    this.jobs = h("div");
    const part = { place: this.place, context, failed: (error) => this.#failed(error), started: (job) => this.#started(job) };
    this.quarantine = new Quarantine({ ...part, name });
    this.generations = new Generations({ ...part, name, changed: () => this.refresh() });
    const encoded = encodeURIComponent(name);
    fill(
      root,
      h("p", { class: "small" }, h("a", { href: "#/collections" }, "All collections")),
      h("h1", null, name),
      h("p", null, h("a", { href: `#/search/${encoded}` }, "Search"), " · ", h("a", { href: `#/rows/${encoded}` }, "Rows"), " · ", h("a", { href: `#/map/${encoded}` }, "Map")),
      this.trouble,
      this.figures,
      this.rights,
      this.actions,
      this.job,
      this.advice,
      section("quarantine", "Quarantine", this.quarantine.element),
      section("last-jobs", "Last jobs", this.jobs),
      section("generations", "Generations", this.generations.element),
    );
  }

  async load() {
    const [status, jobs] = await Promise.all([
      get(this.place, this.context).catch((error) => error),
      this.#allowed("jobs", () => this.#jobs()),
    ]);
    const still = jobs?.map((job) => ({ ...job, progress: null })); // its own line shows that
    if (status instanceof Error) {
      // While HANA is away, a job that waits for it is shown all the same.
      if (this.shown.jobs) this.#show("jobs", [still ?? "refused", this.lastSync], () => this.#showJobs(jobs));
      throw status;
    }
    this.byClients = writtenByClients(status);
    this.lastSync = status.last_sync;
    this.#show("figures", { ...status, lag_seconds: null }, () => fill(this.figures, figures(status)));
    fill(this.figures.querySelector(".freshness"), freshness(status));
    refreshTimes(this.root);
    this.#show("jobs", [still ?? "refused", status.last_sync], () => this.#showJobs(jobs));
    await Promise.all([
      // Quarantine and generations change only when these do.
      this.#part(this.quarantine, "quarantine", [status.quarantined, jobs?.[0]?.id, jobs?.[0]?.state]),
      this.#part(this.generations, "generations", [status.generation, status.rows, jobs?.[0]?.id, jobs?.[0]?.state]),
    ]);
  }

  async refresh() {
    try {
      await this.load();
      if (this.troubled) fill(this.trouble);
      this.troubled = false;
    } catch (error) {
      if (error.name === "AbortError") return;
      this.troubled = true;
      fill(this.trouble, failure(error, () => this.refresh()));
    }
  }

  #jobs() {
    return get(`/v1/jobs?limit=${LAST_JOBS}&collection=${encodeURIComponent(this.name)}`, this.context);
  }

  /** The result of `work`, or null where the key lacks the right; the service is asked only once then. */
  async #allowed(what, work) {
    this.refused ??= {};
    if (this.refused[what]) return null;
    try {
      return await work();
    } catch (error) {
      if (error.status !== 403) throw error;
      this.refused[what] = error;
      return null;
    }
  }

  #part(part, what, signs) {
    return this.#allowed(what, async () => {
      const now = JSON.stringify(signs);
      if (this.shown[what] === now) return;
      await part.load();
      this.shown[what] = now;
    }).then(() => {
      const error = this.refused?.[what];
      if (!error) return;
      const why = error.scope ? `Your key lacks the scope ${error.scope}.` : error.message;
      fill(part.element, h("p", { class: "muted" }, `Not shown: ${why}`));
    });
  }

  #show(what, data, draw) {
    const now = JSON.stringify(data);
    if (this.shown[what] === now) return;
    this.shown[what] = now;
    draw();
  }

  #showJobs(jobs) {
    this.actions.hidden = jobs === null || this.byClients;
    if (jobs === null) {
      const scope = this.refused.jobs.scope ?? "sync";
      fill(this.rights, note("info", `Your key lacks the scope ${scope}, so you cannot see or start jobs.`));
      fill(this.jobs, h("p", { class: "muted" }, "Not shown."));
      return;
    }
    const current = jobs.find((job) => !isOver(job)) ?? null;
    this.#follow(current);
    this.cancel.hidden = current === null;
    for (const button of this.starts) button.hidden = current !== null;
    fill(this.advice, current === null && jobs.length > 0 ? this.#advice(jobs[0]) : null);
    const outside = [{ collection: this.name, last_sync: this.byClients ? null : this.lastSync }];
    fill(this.jobs, syncedOutside(outside, jobs), jobsTable(jobs, "No jobs yet.", this.name));
  }

  #follow(job) {
    if (job !== null && this.live?.id === job.id) return;
    this.live?.stop.abort();
    this.live = null;
    if (job === null) {
      fill(this.job);
      return;
    }
    const stop = new AbortController();
    this.context.signal.addEventListener("abort", () => stop.abort());
    this.live = { id: job.id, stop };
    const over = () => {
      this.live = null;
      fill(this.job);
      this.refresh();
    };
    const gone = () => fill(this.job, jobLine(job));
    fill(this.job, h("div", { class: "card" }, liveJob(job, { announce: this.context.announce, over, gone, signal: stop.signal })));
  }

  #started(job) {
    if (job?.job) this.context.announce("Started");
    return this.refresh();
  }

  #failed(error) {
    fill(this.trouble, failure(error));
  }

  // ------------------------------------------------------------------------------------------------- what can be done

  #actions() {
    const start = (verb, body) => async () => this.#started(await post(`${this.place}/${verb}`, body, this.context));
    const failed = (error) => this.#failed(error);
    this.starts = [
      slowButton("Sync", start("sync", {}), failed, { class: "primary" }),
      slowButton("Full sync", start("sync", { full: true }), failed),
      slowButton("Verify", start("verify", {}), failed),
      slowButton("Verify and repair", () => this.#repair(), failed),
    ];
    this.cancel = slowButton("Cancel the job", () => this.#cancel(), failed, { hidden: true });
    return h("div", { class: "buttons", role: "group", "aria-label": "Actions" }, this.starts, this.cancel);
  }

  async #cancel() {
    if (this.live === null) return;
    await post(`/v1/jobs/${encodeURIComponent(this.live.id)}/cancel`, undefined, this.context);
    this.context.announce("Cancelling after the current batch");
    await this.refresh();
  }

  async #repair() {
    const text =
      "Rows that differ are rewritten, and rows that the source no longer has are deleted from the collection. " +
      "The source is not changed.";
    if (!(await confirmed("Verify and repair?", text, "Repair"))) return;
    await this.#started(await post(`${this.place}/verify`, { repair: true }, this.context));
  }

  /** The next step after the last job, if there is one. */
  #advice(job) {
    const result = job.result ?? {};
    const lost = result.orphaned ?? (result.to_delete ?? 0) - (result.deleted ?? 0) + (result.emptied ?? 0);
    if (["max_deletes", "source_empty"].includes(result.paused) && lost) {
      const rows = many(lost, "row");
      const text = `This deletes what left the source or became blank there from the collection: ${rows}. The source is not changed.`;
      return note(
        "warning",
        h("p", null, `The last ${job.kind === "verify" ? "repair" : "sync"} did not delete what left the source or became blank there: ${rows}. If that was on purpose, delete it here too.`),
        this.#asking(`Delete ${rows} …`, "Delete these rows?", text, "Delete", { max_deletes: 1 }),
      );
    }
    if (result.paused === "schema_changed") {
      const text = "This compares every row and renders the texts from the current columns. Rows that differ are rewritten.";
      return note(
        "warning",
        h("p", null, "The last sync stopped: a column in use has changed its type."),
        this.#asking("Accept the change …", "Accept the changed table?", text, "Accept and sync", { accept_schema: true }),
      );
    }
    if (job.kind === "verify" && result.ok === false && !result.stopped) {
      return note("warning", h("p", null, "The last check found differences from the source. “Verify and repair” fixes exactly those."));
    }
    return null;
  }

  #asking(text, title, question, action, body) {
    const work = async () => {
      if (!(await confirmed(title, question, action))) return;
      await this.#started(await post(`${this.place}/sync`, body, this.context));
    };
    return slowButton(text, work, (error) => this.#failed(error));
  }
}

function figures(status) {
  const table = [status.schema, status.table].filter(Boolean).join(".");
  return facts([
    ["Rows", number(status.rows)],
    ["Chunks", number(status.chunks)],
    ["Freshness", h("div", { class: "freshness" })],
    ["Quarantine", status.quarantined ? badge(many(status.quarantined, "row"), "warning") : "0"],
    ["Empty rows", status.empty ? number(status.empty) : null],
    ["Foreign records", status.foreign ? many(status.foreign, "record") : null],
    ["Model", breakable(status.model ?? "–")],
    ["Dimension", status.dimension],
    ["Generation", status.generation || null],
    ["Key", status.key?.length ? breakable(status.key.join(", ")) : null],
    ["Change detection", writtenByClients(status) ? null : (METHODS[status.method] ?? status.method)],
    ["Last sync", status.last_sync && moment(status.last_sync)],
    ["Last full comparison", status.last_full && moment(status.last_full)],
    ["Stored in", breakable([status.store, table].filter(Boolean).join(": "))],
  ]);
}
