// All collections: freshness, running jobs, latest jobs, and buttons to start and cancel jobs. collection.js shows one collection.

import { get, post } from "../api.js";
import { breakable, fill, h } from "../dom.js";
import { many } from "../figures.js";
import { isOver, jobLine, liveJob } from "../jobs.js";
import { badge, failure, note, number } from "../parts.js";
import { refreshTimes, section, slowButton, table, whileVisible } from "../widgets.js";
import * as one from "./collection.js";
import { freshness, placeOf, writtenByClients } from "./collection/freshness.js";
import { jobsTable, syncedOutside } from "./collection/jobs.js";

const REFRESH_SECONDS = 5;
const LAST_JOBS = 20;
const MOST_STREAMS = 3; // a browser has six connections to a service, and the rest of the page needs some
const COLUMNS = [
  { name: "Collection" },
  { name: "Rows", kind: "number" },
  { name: "Chunks", kind: "number" },
  { name: "Freshness", kind: "wide" },
  { name: "Model" },
  { name: "Quarantine", kind: "number" },
  { name: "Actions", kind: "actions" },
];

export function title(parameters) {
  return parameters.path[0] || "Collections";
}

export async function show(root, context) {
  if (context.parameters.path[0]) return one.show(root, context);
  const page = new Overview(root, context);
  await page.load();
  whileVisible(() => page.refresh(), REFRESH_SECONDS, context.signal);
  return undefined;
}

class Overview {
  constructor(root, context) {
    this.context = context;
    this.root = root;
    this.signal = context.signal;
    this.lives = new Map();
    this.fresh = new Map();
    this.last = "";
    this.trouble = h("div", { class: "trouble" });
    this.list = h("div", { class: "list" });
    this.jobs = h("div", { class: "list" });
    this.rights = h("div", null);
    fill(
      root,
      h("h1", null, "Collections"),
      this.trouble,
      this.list,
      section("jobs", "Last jobs", this.rights, this.jobs),
    );
  }

  async load() {
    const [collections, jobs] = await Promise.all([get("/v1/collections", this.context), this.#jobs()]);
    this.#show(collections, jobs);
  }

  /** An error is shown above the page, which stays as it was. */
  async refresh() {
    try {
      await this.load();
      fill(this.trouble);
    } catch (error) {
      if (error.name !== "AbortError") fill(this.trouble, failure(error, () => this.refresh()));
    }
  }

  /** Null: the key may not see jobs. */
  async #jobs() {
    if (this.mayNot) return null;
    try {
      return await get(`/v1/jobs?limit=${LAST_JOBS}`, this.context);
    } catch (error) {
      if (error.status !== 403) throw error;
      this.mayNot = error;
      return null;
    }
  }

  #show(collections, jobs) {
    // Elapsed time and the progress of followed jobs do not rebuild the tables.
    const still = jobs?.map((job) => (this.lives.has(job.id) ? { ...job, progress: null } : job));
    const now = JSON.stringify([collections.map((each) => ({ ...each, lag_seconds: null })), still]);
    if (now === this.last) {
      for (const each of collections) fill(this.fresh.get(each.collection), freshness(each));
      return refreshTimes(this.root);
    }
    this.last = now;
    const running = new Map((jobs ?? []).filter((job) => !isOver(job)).map((job) => [job.id, job]));
    this.#forget(running);
    const focused = document.activeElement?.dataset?.key;
    const rows = collections.map((each) => this.#row(each, running));
    if (collections.length === 0) {
      fill(this.list, note("info", "No collection is configured. ", h("a", { href: "#/tables" }, "Create one from a table"), "."));
    } else {
      fill(this.list, table({ caption: "Collections", columns: COLUMNS, rows }));
    }
    if (jobs === null) {
      fill(this.rights, note("info", `Your key lacks the scope ${this.mayNot.scope ?? "sync"}, so you cannot see or start jobs.`));
      fill(this.jobs);
    } else {
      fill(this.rights);
      fill(this.jobs, syncedOutside(collections, jobs), jobsTable(jobs, "No jobs yet."));
    }
    if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
    return undefined;
  }

  #row(collection, running) {
    const name = collection.collection;
    const job = running.get(collection.job);
    const fresh = h("div", { class: "freshness" }, freshness(collection));
    this.fresh.set(name, fresh);
    const link = h("a", { href: `#/collections/${encodeURIComponent(name)}`, dataset: { key: `${name}/open` } }, name);
    return [
      link,
      number(collection.rows),
      number(collection.chunks),
      [fresh, job && this.#live(job)],
      h("span", { class: "model" }, breakable(collection.model ?? "–")),
      collection.quarantined ? badge(many(collection.quarantined, "row"), "warning") : "0",
      this.mayNot || writtenByClients(collection) ? "" : this.#actions(name, collection.job),
    ];
  }

  #actions(name, job) {
    const failed = (error) => {
      fill(this.trouble, failure(error));
    };
    const button = (text, verb, work) =>
      slowButton(text, () => this.#act(work), failed, { "aria-label": `${text} ${name}`, dataset: { key: `${name}/${verb}` } });
    if (job) {
      const cancel = () => post(`/v1/jobs/${encodeURIComponent(job)}/cancel`, undefined, this.context);
      return h("div", { class: "buttons" }, button("Cancel", "sync", cancel));
    }
    return h(
      "div",
      { class: "buttons" },
      button("Sync", "sync", () => post(`${placeOf(name)}/sync`, {}, this.context)),
      button("Verify", "verify", () => post(`${placeOf(name)}/verify`, {}, this.context)),
    );
  }

  async #act(work) {
    fill(this.trouble);
    await work();
    await this.load();
  }

  #live(job) {
    const live = this.lives.get(job.id);
    if (live) return live.element;
    if (this.lives.size >= MOST_STREAMS || job.state === "queued") return jobLine(job);
    const stop = new AbortController();
    this.signal.addEventListener("abort", () => stop.abort());
    const element = liveJob(job, {
      announce: this.context.announce,
      over: () => this.#ended(job.id),
      gone: () => this.#ended(job.id),
      signal: stop.signal,
    });
    this.lives.set(job.id, { element, stop });
    return element;
  }

  #ended(id) {
    this.lives.get(id)?.stop.abort();
    this.lives.delete(id);
    this.refresh();
  }

  #forget(running) {
    for (const [id, live] of this.lives) {
      if (running.has(id)) continue;
      live.stop.abort();
      this.lives.delete(id);
    }
  }
}
