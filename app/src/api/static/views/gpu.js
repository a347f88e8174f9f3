// The GPUs: their load over the last minutes, and the settings chosen for the device that computes.

import { get } from "../api.js";
import { lineChart } from "../charts.js";
import { fill, h } from "../dom.js";
import { gibibytes, many, measure } from "../figures.js";
import { badge, failure, loading, note, number } from "../parts.js";
import { facts, section, table, whileVisible } from "../widgets.js";

export const title = "GPU";

const EVERY_SECONDS = 2;
const SPANS_SECONDS = [60, 150, 300];

export async function show(root, context) {
  const cards = new Cards(context);
  const device = h("div", null, loading("Loading the model …"));
  const chosen = section("device", "This device", device);
  fill(root, h("h1", null, "GPU"), cards.element, chosen);
  about(device, context); // shows its errors in its place
  await cards.again();
  chosen.hidden = cards.none;
  if (!cards.refused) whileVisible(() => cards.again(), EVERY_SECONDS, context.signal);
}

class Cards {
  constructor(context) {
    this.context = context;
    this.cards = new Map();
    this.trouble = h("div");
    this.list = h("div");
    this.element = h("div", null, this.trouble, this.list);
  }

  /** An error leaves the earlier figures on the page. */
  async again() {
    try {
      const snapshot = await get("/v1/gpu", this.context);
      this.none = snapshot.devices.length === 0 && snapshot.answered !== false;
      this.context.cards(!this.none);
      this.#show(snapshot);
      if (this.failed) fill(this.trouble);
      this.failed = false;
    } catch (error) {
      if (error.name === "AbortError") return;
      this.failed = true;
      this.refused = error.status === 403;
      fill(this.trouble, failure(error, this.refused ? null : () => this.again()));
    }
  }

  #show(snapshot) {
    if (snapshot.devices.length === 0) {
      this.cards.clear();
      this.#say(snapshot.answered === false ? sentence(snapshot.reason) : "This machine has no NVIDIA GPU. The service computes on the CPU.", snapshot.answered === false);
      return;
    }
    const now = snapshot.devices.map(nameOf);
    if (now.join() !== [...this.cards.keys()].join()) {
      this.cards = new Map(snapshot.devices.map((each) => [nameOf(each), new Card(each)]));
      this.said = null;
      fill(this.list, [...this.cards.values()].map((card) => card.element), versions(snapshot));
    }
    const time = Date.now();
    for (const each of snapshot.devices) this.cards.get(nameOf(each)).add(time, each);
  }

  #say(reason, hangs) {
    if (this.said === reason) return;
    this.said = reason;
    fill(this.list, note(hangs ? "warning" : "info", h("p", { class: "reason" }, reason)));
  }
}

function sentence(text) {
  return `${text.slice(0, 1).toUpperCase()}${text.slice(1)}${text.endsWith(".") ? "" : "."}`;
}

function outOf(value, most, unit) {
  return most === null ? measure(value, unit) : `${measure(value)} of ${measure(most, unit)}`;
}

function nameOf(device) {
  return device.uuid ?? String(device.index);
}

class Card {
  constructor(device) {
    const memory = device.memory_total_bytes === null ? null : device.memory_total_bytes / 2 ** 30;
    const gib = (value) => measure(value, "GiB");
    this.samples = [];
    this.head = h("div", { class: "card-figures" });
    this.reasons = h("div");
    this.charts = [
      chart("Utilisation", "%", [one("Kernels running", "%", "utilization_percent"), one("Memory in use", "%", "memory_utilization_percent")], 100),
      chart("Memory", "GiB", [{ name: "Used", format: gib, of: (each) => (each.memory_used_bytes === null ? null : each.memory_used_bytes / 2 ** 30) }], memory),
      chart("Temperature", "°C", [one("Temperature", "°C", "temperature_celsius")], 100),
      chart("Power", "W", [one("Power", "W", "power_watts"), one("Limit", "W", "power_limit_watts")], null),
    ];
    const id = `card-${device.index}`;
    this.element = h(
      "section",
      { class: "card gpu-card", "aria-labelledby": id },
      h("h2", { id }, `${device.index}: ${device.name}`),
      device.reason && note("warning", device.reason),
      this.head,
      this.reasons,
      h("div", { class: "charts" }, this.charts.map(({ view }) => view.element)),
    );
  }

  add(time, device) {
    this.samples.push({ time, device });
    while (time - this.samples[0].time > SPANS_SECONDS.at(-1) * 1000) this.samples.shift();
    fill(this.head, figures(device));
    fill(this.reasons, held(device));
    for (const { view, series } of this.charts) {
      view.update(this.samples.map((sample) => ({ time: sample.time, values: series.map((each) => each.of(sample.device)) })));
    }
  }
}

function one(name, unit, field) {
  return { name, format: (value) => measure(value, unit), of: (device) => device[field] };
}

function chart(name, unit, series, ceiling) {
  return { series, view: lineChart({ title: name, unit, series, spans: SPANS_SECONDS, ceiling }) };
}

function figures(device) {
  const used = device.memory_used_bytes === null ? null : `${gibibytes(device.memory_used_bytes)} of ${gibibytes(device.memory_total_bytes)}`;
  const link = device.pcie_generation === null ? null : `generation ${device.pcie_generation} of ${device.pcie_generation_max ?? "?"}, ${device.pcie_width ?? "?"} lanes`;
  return facts([
    ["Utilisation", device.utilization_percent === null ? "–" : `${device.utilization_percent} %`],
    ["Memory", used ?? "–"],
    ["Temperature", device.temperature_celsius === null ? "–" : `${device.temperature_celsius} °C`],
    ["Power", device.power_watts === null ? "–" : outOf(device.power_watts, device.power_limit_watts, "W")],
    ["Clock", device.sm_clock_mhz === null ? null : outOf(device.sm_clock_mhz, device.sm_clock_max_mhz, "MHz")],
    ["Compute capability", device.compute_capability],
    ["PCIe", link],
    ["Processes", device.processes === null ? null : many(device.processes.length, "process", "processes")],
    ["Memory errors", device.ecc_uncorrected_errors ? badge(`${number(device.ecc_uncorrected_errors)} uncorrected`, "error") : null],
  ]);
}

/** The reasons for a reduced clock. */
function held(device) {
  const reasons = device.throttle ?? [];
  const abnormal = reasons.filter((each) => each.normal === false);
  const kind = abnormal.length ? "warning" : "info";
  return reasons.length ? note(kind, reasons.map((each) => h("p", null, `Clock: ${each.words}.`))) : null;
}

function versions(snapshot) {
  return [
    facts([
      ["Driver", snapshot.driver_version],
      ["Newest CUDA supported", snapshot.cuda_version],
    ]),
    h("p", { class: "small muted" }, sentence(snapshot.note)),
  ];
}

// ------------------------------------------------------------------------------------------------------- the device

async function about(place, context) {
  try {
    const info = await get("/v1/info", context);
    const rows = info.settings.map((each) => [h("code", null, each.name), each.value === null ? "–" : String(each.value), each.reason]);
    fill(
      place,
      h("div", { class: "card" }, profile(info)),
      h("h3", null, "Settings and reasons"),
      table({ caption: "Chosen settings", columns: [{ name: "Setting" }, { name: "Value" }, { name: "Reason", kind: "wide" }], rows }),
    );
  } catch (error) {
    if (error.name !== "AbortError") fill(place, failure(error, () => about(place, context)));
  }
}

function named({ kind, name, failed }) {
  return `${name}${kind === "cuda" ? " (CUDA)" : ""}${failed ? `, failed: ${failed}` : ""}`;
}

function profile({ device, devices, model, dimension, max_tokens: tokens, version }) {
  return facts([
    ["Device", devices.map(named).join("; ")],
    ["Model", model],
    ["Dimension", number(dimension)],
    ["Maximum text length", `${number(tokens)} tokens`],
    ["Precision", h("span", null, device.precision, h("span", { class: "line small muted" }, device.precision_reason))],
    ["Path", h("span", null, device.path, h("span", { class: "line small muted" }, device.path_reason))],
    ["Version", version],
  ]);
}
