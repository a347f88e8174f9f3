// Shared by all views: loading, errors, notes, badges, and numbers and times for people.

import { h } from "./dom.js";

const NOT_CONFIGURED = "OWL-1003";
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

/** A heading for an error: the service's own names HTTP's status. */
const HEADINGS = {
  400: "Invalid request",
  401: "Sign in needed",
  403: "Not allowed",
  404: "Not found",
  409: "Not possible now",
  422: "Invalid request",
  429: "Too many requests",
  503: "Not available now",
};

function headingOf(error) {
  if (error.code === NOT_CONFIGURED) return "Not configured";
  if (error.status === 0) return error.title;
  return HEADINGS[error.status] ?? "Something went wrong";
}

/** An error, in the place of the content it prevents. The button calls `retry`. */
export function failure(error, retry = null) {
  const missing = error.status === 403 && error.scope;
  const said = missing ? `Your key lacks the scope ${error.scope.split(" ").join(" or ")}.` : error.message;
  return h(
    "div",
    { class: "note error", role: "alert" },
    h("p", null, h("strong", null, headingOf(error))),
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

/** A UTC time (ISO, or POSIX seconds) as "3 minutes ago"; the exact time shows on hover. */
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

/** Seconds as "2 h 5 min". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.round(minutes / 1440)} days`;
}
