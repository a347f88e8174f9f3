// What every view is made of: waiting, errors, notes, badges, numbers and times as people read them.

import { h } from "./dom.js";

const STEPS = [
  ["year", 31_536_000],
  ["month", 2_592_000],
  ["day", 86_400],
  ["hour", 3_600],
  ["minute", 60],
  ["second", 1],
];

export function loading(text = "Loading …") {
  return h("p", { class: "loading", role: "status" }, text);
}

/** An error in the place of what it kept away. `retry` is called by its button. */
export function failure(error, retry = null) {
  const missing = error.status === 403 && error.scope;
  const said = missing ? `Your key lacks the scope ${error.scope.split(" ").join(" or ")}.` : error.message;
  return h(
    "div",
    { class: "note error", role: "alert" },
    h("p", null, h("strong", null, error.status === 403 ? "Not allowed" : (error.title ?? "Something went wrong"))),
    h("p", null, said),
    error.requestId && h("p", { class: "small" }, "Request ", h("code", null, error.requestId)),
    retry && h("button", { type: "button", onclick: retry }, "Try again"),
  );
}

/** kind: info, warning, error or good. */
export function note(kind, ...children) {
  return h("div", { class: `note ${kind}` }, ...children);
}

/** kind: as of a note, or none. */
export function badge(text, kind = "") {
  return h("span", { class: `badge ${kind}` }, text);
}

export function number(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-GB");
}

/** "3 minutes ago" of a UTC time (ISO, or POSIX seconds), with the time itself on hover. */
export function ago(time) {
  if (time === null || time === undefined) return h("span", null, "never");
  const then = new Date(typeof time === "number" ? time * 1000 : time);
  return h("time", { datetime: then.toISOString(), title: then.toLocaleString("en-GB") }, sinceWords(then));
}

function sinceWords(then) {
  const seconds = (then.getTime() - Date.now()) / 1000;
  if (Math.abs(seconds) < 5) return "just now";
  const [unit, size] = STEPS.find(([, step]) => Math.abs(seconds) >= step) ?? STEPS.at(-1);
  return new Intl.RelativeTimeFormat("en-GB", { numeric: "auto" }).format(Math.round(seconds / size), unit);
}

/** "2 h 5 min" of seconds. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.round(minutes / 1440)} days`;
}
