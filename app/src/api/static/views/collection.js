// The page of one collection: its figures, the job that goes on, its last jobs, generations and the rows set aside.

import { get, post } from "../api.js";
import { confirmed } from "../dialogs.js";
import { fill, h } from "../dom.js";
import { many, moment } from "../figures.js";
import { isOver, jobLine, liveJob } from "../jobs.js";
import { badge, failure, note, number } from "../parts.js";
import { facts, refreshTimes, slowButton, whileVisible } from "../widgets.js";
import { freshness, placeOf, writtenByClients } from "./collection/freshness.js";
import { Generations } from "./collection/generations.js";
import { jobsTable } from "./collection/jobs.js";
import { Quarantine } from "./collection/quarantine.js";

const REFRESH_SECONDS = 5;
const LAST_JOBS = 10;

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
      h("p", null, h("a", { href: `#/search/${encoded}` }, "Search it"), " · ", h("a", { href: `#/map/${encoded}` }, "Map of its rows")),
      this.trouble,
      this.figures,
      this.rights,
      this.actions,
      this.job,
      this.advice,
      section("set-aside", "Rows set aside", this.quarantine.element),
      section("last-jobs", "Last jobs", this.jobs),
      section("generations", "Generations", this.generations.element),
    );
  }

  async load() {
    const [status, jobs] = await Promise.all([get(this.place, this.context), this.#allowed("jobs", () => this.#jobs())]);
    this.byClients = writtenByClients(status);
    this.#show("figures", { ...status, lag_seconds: null }, () => fill(this.figures, figures(status)));
    fill(this.figures.querySelector(".freshness"), freshness(status));
    refreshTimes(this.root);
    const still = jobs?.map((job) => ({ ...job, progress: null })); // its own line shows that
    this.#show("jobs", still ?? "refused", () => this.#showJobs(jobs));
    await Promise.all([
      // What is set aside and which generations there are can only have changed when these have.
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

  /** What `work` gives; null when whoever looks may not see it, which is asked once. */
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
    }).then(() => this.refused?.[what] && part.refuse(this.refused[what]));
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
      fill(this.rights, note("info", `Your key lacks the scope ${scope}: you see the figures, and cannot start or follow jobs.`));
      fill(this.jobs, h("p", { class: "muted" }, "Not shown."));
      return;
    }
    const current = jobs.find((job) => !isOver(job)) ?? null;
    this.#follow(current);
    this.cancel.hidden = current === null;
    for (const button of this.starts) button.hidden = current !== null;
    fill(this.advice, current === null && jobs.length > 0 ? this.#advice(jobs[0]) : null);
    fill(this.jobs, jobsTable(jobs, "No job of this collection has run yet.", this.name));
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
      slowButton("Sync, comparing every row", start("sync", { full: true }), failed),
      slowButton("Verify", start("verify", {}), failed),
      slowButton("Verify and repair", () => this.#repair(), failed),
    ];
    this.cancel = slowButton("Cancel the job", () => this.#cancel(), failed, { hidden: true });
    return h("div", { class: "buttons", role: "group", "aria-label": "Actions" }, this.starts, this.cancel);
  }

  async #cancel() {
    if (this.live === null) return;
    await post(`/v1/jobs/${encodeURIComponent(this.live.id)}/cancel`, undefined, this.context);
    this.context.announce("The job finishes the batch in hand and ends");
    await this.refresh();
  }

  async #repair() {
    const text =
      "What does not agree with the source is written anew, and what the source no longer has is deleted from the collection. " +
      "The source itself is not changed.";
    if (!(await confirmed("Verify and repair?", text, "Repair"))) return;
    await this.#started(await post(`${this.place}/verify`, { repair: true }, this.context));
  }

  /** What to do about the last job, where there is something to do. */
  #advice(job) {
    const result = job.result ?? {};
    if (result.paused === "max_deletes" && result.to_delete) {
      const rows = many(result.to_delete, "row");
      const text = `The source no longer has ${rows} that the collection still holds. Were they meant to go? They are deleted from the collection; the source is not changed.`;
      return note(
        "warning",
        h("p", null, `The last sync did not delete ${rows}: that is more than the limit allows at once. If the source has really lost them, delete them here.`),
        this.#asking(`Delete ${rows} …`, "Delete them?", text, "Delete", { max_deletes: 1 }),
      );
    }
    if (result.paused === "schema_changed") {
      const text = "Every row is compared and the texts are made from the columns as they are now. Rows may be written anew.";
      return note(
        "warning",
        h("p", null, "The last sync did nothing: a column in use has another type than before."),
        this.#asking("Accept the change …", "Accept the change of the table?", text, "Accept and sync", { accept_schema: true }),
      );
    }
    if (job.kind === "verify" && result.ok === false && !result.stopped) {
      return note("warning", h("p", null, "The last check found differences from the source. “Verify and repair” mends exactly those."));
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

function section(id, heading, content) {
  return h("section", { "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, heading), content);
}

function figures(status) {
  const table = [status.schema, status.table].filter(Boolean).join(".");
  return facts([
    ["Rows", number(status.rows)],
    ["Chunks", number(status.chunks)],
    ["Freshness", h("div", { class: "freshness" })],
    ["Set aside", status.quarantined ? badge(many(status.quarantined, "row"), "warning") : "0"],
    ["Empty rows", status.empty ? number(status.empty) : null],
    ["Written by others", status.foreign ? many(status.foreign, "record") : null],
    ["Model", status.model ?? "–"],
    ["Dimension", status.dimension],
    ["Generation", status.generation || null],
    ["Key", (status.key ?? []).join(", ")],
    ["Changes are found by", writtenByClients(status) ? null : status.method],
    ["Last sync", status.last_sync && moment(status.last_sync)],
    ["Last comparison of everything", status.last_full && moment(status.last_full)],
    ["Kept in", [status.store, table].filter(Boolean).join(": ")],
  ]);
}
