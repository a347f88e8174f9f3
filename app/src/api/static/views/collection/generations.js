// The editions of a collection, one of which serves: switching to a new one, going back, dropping what is not needed.

import { get, post } from "../../api.js";
import { confirmed } from "../../dialogs.js";
import { fill, h } from "../../dom.js";
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

  refuse(error) {
    const why = error.scope ? `Your key lacks the scope ${error.scope}.` : error.message;
    fill(this.list, h("p", { class: "muted" }, `Not shown: ${why}`));
  }

  async load() {
    const all = await get(this.place, this.context);
    if (all.length === 0) {
      fill(this.list, h("p", { class: "muted" }, "None before the first sync."));
      return;
    }
    const [last] = all.filter((each) => each.state === "retired").sort((one, other) => (one.retired < other.retired ? 1 : -1));
    fill(this.list, table({ caption: "Generations", columns: COLUMNS, rows: all.map((each) => this.#row(each, each === last)) }));
  }

  #row(each, back) {
    return [
      String(each.generation),
      [badge(each.state, STATES[each.state]), !each.complete && badge("not complete", "warning")],
      each.model,
      number(each.rows),
      each.last_sync ? moment(each.last_sync) : "–",
      h("code", null, each.table),
      h("div", { class: "buttons" }, this.#actions(each, back)),
    ];
  }

  #actions(each, back) {
    const number_ = each.generation;
    const button = (text, to, work, attributes = {}) =>
      slowButton(text, work, (error) => this.failed(error), { "aria-label": `${text}${to} generation ${number_}`, ...attributes });
    return [
      each.state === "building" && button("Switch", " to", () => this.#switch(number_)),
      each.state === "retired" && back && button("Go back", " to", () => this.#rollback(number_)),
      each.state !== "active" && button("Drop", "", () => this.#drop(number_), { class: "danger" }),
    ];
  }

  async #switch(generation) {
    const text = "Searches are answered from it from now on. The one that serves now is kept, and you can go back to it.";
    if (!(await confirmed(`Let generation ${generation} serve?`, text, "Switch"))) return;
    const done = await post(this.place, { action: "switch", number: generation }, this.context);
    await this.#done(`Generation ${done.generation} serves now.`, done.notes);
  }

  async #rollback(generation) {
    const text = "Searches are answered from the generation before from now on, as it was when it last served.";
    if (!(await confirmed(`Go back to generation ${generation}?`, text, "Go back"))) return;
    const done = await post(this.place, { action: "rollback" }, this.context);
    await this.#done(`Generation ${done.generation} serves again.`, done.notes);
  }

  async #drop(generation) {
    const text = "Its vectors are deleted from the store and cannot be brought back, except by building it again.";
    if (!(await confirmed(`Drop generation ${generation} of ${this.name}?`, text, "Drop"))) return;
    await post(this.place, { action: "drop", number: generation }, this.context);
    await this.#done(`Generation ${generation} is dropped.`, []);
  }

  async #done(sentence, notes) {
    this.context.announce(sentence);
    fill(this.said, note("good", h("p", null, sentence), notes.map((each) => h("p", null, each))));
    await this.load();
    await this.changed();
  }
}
