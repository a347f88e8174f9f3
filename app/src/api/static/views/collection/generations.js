// The generations of a collection: switch to a new one, roll back, drop one.

import { get, post } from "../../api.js";
import { confirmed } from "../../dialogs.js";
import { breakable, fill, h } from "../../dom.js";
import { moment } from "../../figures.js";
import { badge, note, number } from "../../parts.js";
import { slowButton, table } from "../../widgets.js";

const COLUMNS = [
  { name: "Number" },
  { name: "State", kind: "short" },
  { name: "Model" },
  { name: "Rows", kind: "number" },
  { name: "Last sync", kind: "short" },
  { name: "Table" },
  { name: "Actions", kind: "actions" },
];
const STATES = { active: "good", building: "info", retired: "" };

export class Generations {
  /** `changed` is called after each change, `failed` is told errors. */
  constructor({ place, context, failed, changed, name }) {
    this.place = `${place}/generations`;
    this.context = context;
    this.failed = failed;
    this.changed = changed;
    this.name = name;
    this.said = h("div");
    this.list = h("div");
    this.element = h("div", null, this.said, this.list);
  }

  async load() {
    const all = await get(this.place, this.context);
    if (all.length === 0) {
      fill(this.list, h("p", { class: "muted" }, "None yet. The first sync makes one."));
      return;
    }
    const [last] = all.filter((each) => each.state === "retired").sort((one, other) => (one.retired < other.retired ? 1 : -1));
    fill(this.list, table({ caption: "Generations", columns: COLUMNS, rows: all.map((each) => this.#row(each, each === last)) }));
  }

  #row(each, back) {
    return [
      String(each.generation),
      [badge(each.state, STATES[each.state]), !each.complete && badge("incomplete", "warning")],
      breakable(each.model),
      number(each.rows),
      each.last_sync ? moment(each.last_sync) : "–",
      h("code", null, breakable(each.table)),
      h("div", { class: "buttons" }, this.#actions(each, back)),
    ];
  }

  #actions(each, back) {
    const number_ = each.generation;
    const button = (text, to, work, attributes = {}) =>
      slowButton(text, work, (error) => this.failed(error), { "aria-label": `${text}${to} generation ${number_}`, ...attributes });
    return [
      each.state === "building" && button("Switch", " to", () => this.#switch(number_)),
      each.state === "retired" && back && button("Roll back", " to", () => this.#rollback(number_)),
      each.state !== "active" && button("Drop", "", () => this.#drop(number_), { class: "danger" }),
    ];
  }

  async #switch(generation) {
    const text = "Searches use it from now on. The current generation is kept, so you can roll back.";
    if (!(await confirmed(`Switch to generation ${generation}?`, text, "Switch"))) return;
    const done = await post(this.place, { action: "switch", number: generation }, this.context);
    await this.#done(`Generation ${done.generation} is active now.`, done.notes);
  }

  async #rollback(generation) {
    const text = "Searches use the previous generation from now on, as it was when it was last active.";
    if (!(await confirmed(`Roll back to generation ${generation}?`, text, "Roll back"))) return;
    const done = await post(this.place, { action: "rollback" }, this.context);
    await this.#done(`Generation ${done.generation} is active again.`, done.notes);
  }

  async #drop(generation) {
    const text = "This deletes its vectors from the store. Only building it again brings them back.";
    if (!(await confirmed(`Drop generation ${generation} of ${this.name}?`, text, "Drop"))) return;
    await post(this.place, { action: "drop", number: generation }, this.context);
    await this.#done(`Generation ${generation} dropped.`, []);
  }

  async #done(sentence, notes) {
    this.context.announce(sentence);
    fill(this.said, note("good", h("p", null, sentence), notes.map((each) => h("p", null, each))));
    await this.load();
    await this.changed();
  }
}
