// The quarantined rows of a collection: their reasons, retry and drop.

import { get, post } from "../../api.js";
import { confirmed } from "../../dialogs.js";
import { breakable, fill, h, hidden } from "../../dom.js";
import { keyText, many } from "../../figures.js";
import { ago, badge, note, number } from "../../parts.js";
import { slowButton, table } from "../../widgets.js";

const MOST = 500;
const COLUMNS = [
  { name: "Key" },
  { name: "Stage", kind: "short" },
  { name: "Reason", kind: "wide" },
  { name: "Attempts", kind: "number" },
  { name: "Last seen", kind: "short" },
];

export class Quarantine {
  /** `started` is told the answer that starts a job, `failed` errors. */
  constructor({ place, context, failed, started }) {
    this.place = `${place}/quarantine`;
    this.context = context;
    this.started = started;
    this.failed = failed;
    this.chosen = new Set();
    this.entries = [];
    this.element = h("div");
  }

  async load() {
    this.entries = await get(`${this.place}?limit=${MOST}`, this.context);
    const there = new Set(this.entries.map((entry) => keyText(entry.key)));
    this.chosen = new Set([...this.chosen].filter((key) => there.has(key)));
    this.#show();
  }

  #show() {
    if (this.entries.length === 0) {
      fill(this.element, h("p", { class: "muted" }, "No rows in quarantine."));
      return;
    }
    this.all = h("input", { type: "checkbox", onchange: () => this.#chooseAll(this.all.checked) });
    this.boxes = this.entries.map((entry) => this.#box(entry));
    const rows = this.entries.map((entry, place) => this.#row(entry, this.boxes[place]));
    this.count = h("span", { class: "small muted", role: "status" });
    const failed = (error) => this.failed(error);
    this.retryButton = slowButton("Retry selected", () => this.#retry({ keys: this.#keys() }), failed);
    this.dropButton = slowButton("Drop selected …", () => this.#drop(), failed, { class: "danger" });
    fill(
      this.element,
      h("p", null, "These rows could not be read, embedded or stored. Fix the reason, then retry."),
      h(
        "div",
        { class: "buttons" },
        h("label", { class: "check" }, this.all, "All"),
        this.retryButton,
        slowButton("Retry all", () => this.#retry(), failed),
        this.dropButton,
        this.count,
      ),
      this.entries.length === MOST && note("info", `Only the first ${number(MOST)} rows are shown. “Retry all” retries every row.`),
      table({ caption: "Quarantine", columns: COLUMNS, rows }),
    );
    this.#tell();
  }

  #box(entry) {
    const box = h("input", { type: "checkbox", checked: this.chosen.has(keyText(entry.key)) });
    box.addEventListener("change", () => {
      this.#choose(entry, box.checked);
      this.#tell();
    });
    return box;
  }

  #row(entry, box) {
    return [
      h("label", { class: "check" }, box, hidden("Select "), breakable(keyText(entry.key))),
      entry.stage,
      entry.reason,
      [number(entry.attempts), entry.given_up && badge("given up", "warning")],
      entry.last_seen ? ago(entry.last_seen) : "–",
    ];
  }

  #chooseAll(on) {
    this.boxes.forEach((box, place) => {
      box.checked = on;
      this.#choose(this.entries[place], on);
    });
    this.#tell();
  }

  #choose(entry, on) {
    if (on) this.chosen.add(keyText(entry.key));
    else this.chosen.delete(keyText(entry.key));
  }

  #tell() {
    const chosen = this.chosen.size;
    this.all.checked = chosen === this.entries.length;
    this.all.indeterminate = chosen > 0 && chosen < this.entries.length;
    this.count.textContent = chosen ? `${number(chosen)} selected` : "";
    for (const button of [this.retryButton, this.dropButton]) button.disabled = chosen === 0;
  }

  #keys() {
    return this.entries.filter((entry) => this.chosen.has(keyText(entry.key))).map((entry) => entry.key);
  }

  async #retry(body) {
    await this.started(await post(`${this.place}/retry`, body, this.context));
  }

  async #drop() {
    const keys = this.#keys();
    const text = `This removes the ${keys.length === 1 ? "entry and its reason" : "entries and their reasons"} from quarantine. The source is not changed; the next sync reads the rows again.`;
    if (!(await confirmed(`Drop ${many(keys.length, "entry", "entries")}?`, text, "Drop"))) return;
    const { dropped } = await post(`${this.place}/drop`, { keys }, this.context);
    this.context.announce(`${many(dropped, "entry", "entries")} dropped`);
    this.chosen.clear();
    await this.load();
    await this.started(null);
  }
}
