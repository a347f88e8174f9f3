// Talks to the service: requests, the key, errors, event streams. Knows no view.

const KEY = "owl-sap.key";
const RETRY_MS = [500, 1000, 2000, 4000, 8000];
const UNAUTHORIZED = 401;
const NO_CONTENT = 204;

let askForKey = async () => null;
let asking = null;
let declined = false;

/**
 * An error. `status` 0: no response. `code`: OWL-... `scope`: the missing scope, if the service named it. `errors`: [{where,
 * what}] of a body. `toml`: a block for the settings file that the service could not write.
 */
export class Problem extends Error {
  constructor(status, title, detail, { requestId = null, scope = null, retryAfter = null, code = null, errors = [], toml = null } = {}) {
    super(detail || title);
    this.name = "Problem";
    Object.assign(this, { status, title, detail, requestId, scope, retryAfter, code, errors, toml });
  }
}

/** `ask(why)` resolves with a key or null; it is called when the service wants one, once for all requests that wait. */
export function onKeyWanted(ask) {
  askForKey = ask;
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/** True after the user closed the sign-in dialog without a key. Background requests wait until there is one. */
export function signedOut() {
  return declined;
}

export function forgetKey() {
  declined = false;
  sessionStorage.removeItem(KEY);
  document.dispatchEvent(new CustomEvent("owl-key"));
}

function keep(key) {
  sessionStorage.setItem(KEY, key);
  document.dispatchEvent(new CustomEvent("owl-key"));
}

/** The JSON of a GET. Raises Problem; an aborted one raises AbortError. */
export async function get(path, { signal } = {}) {
  return body(await send(path, { signal }));
}

/** The JSON of a POST, null when there is none. `content` undefined: without a body. */
export async function post(path, content, { signal } = {}) {
  const init = { method: "POST", signal };
  if (content !== undefined) {
    init.body = JSON.stringify(content);
    init.headers = { "Content-Type": "application/json" };
  }
  return body(await send(path, init));
}

/** Saves the answer of a GET as a file, with a byte order mark, by which spreadsheets know UTF-8. Raises Problem. */
export async function download(path, accept, filename) {
  const answer = await send(path, { headers: { Accept: accept } });
  let content;
  try {
    content = await answer.blob();
  } catch {
    throw new Problem(0, "Connection lost", "The download ended early. Nothing was saved.");
  }
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(["\ufeff", content], { type: accept }));
  link.download = filename;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/**
 * Follows server-sent events: `onEvent({id, event, data})` with data out of JSON. Goes on behind the last event after a
 * break, `onError(problem, attempt)` tells of each. `onEnd()` once the server has nothing more (after `result`, or 204). A
 * refusal (4xx) ends it with onError(problem, null). `signal` ends it without a word. Resolves when it is over.
 */
export async function events(path, { onEvent, onEnd = () => {}, onError = () => {}, signal } = {}) {
  let last = null;
  let failures = 0;
  while (!signal?.aborted) {
    try {
      const headers = { Accept: "text/event-stream", ...(last === null ? {} : { "Last-Event-ID": last }) };
      const answer = await send(path, { headers, signal });
      if (answer.status === NO_CONTENT) return onEnd();
      for await (const event of parsed(answer.body)) {
        failures = 0;
        if (event.id !== null) last = event.id;
        onEvent({ ...event, data: JSON.parse(event.data) });
        if (event.event === "result") return onEnd();
      }
      throw new Problem(0, "Connection lost", "The event stream ended early.");
    } catch (error) {
      if (signal?.aborted) return undefined;
      const problem = error instanceof Problem ? error : new Problem(0, "Connection lost", String(error.message));
      const refused = problem.status >= 400 && problem.status < 500 && problem.status !== 429;
      onError(problem, refused ? null : failures + 1);
      if (refused) return undefined;
      await pause(RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)], signal);
    }
  }
  return undefined;
}

async function send(path, init) {
  const used = sessionStorage.getItem(KEY);
  const answer = await once(path, init, used);
  if (answer.status === UNAUTHORIZED) {
    const problem = await problemOf(answer);
    if (sessionStorage.getItem(KEY) !== used) return checked(await once(path, init, sessionStorage.getItem(KEY)));
    const key = await wanted(used === null ? null : problem.detail);
    if (key === null) throw problem;
    return send(path, init);
  }
  return checked(answer);
}

async function wanted(why) {
  asking ??= askForKey(why).finally(() => (asking = null));
  const key = await asking;
  declined = key === null;
  if (key !== null) keep(key);
  return key;
}

async function once(path, init, key) {
  const headers = { Accept: "application/json", ...init.headers };
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  try {
    return await fetch(path, { ...init, headers, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "No response", "The service could not be reached. It may be restarting.");
  }
}

async function checked(answer) {
  if (!answer.ok) throw await problemOf(answer);
  return answer;
}

async function problemOf(answer) {
  let told = {};
  try {
    told = await answer.json();
  } catch {
    // Not from this service, perhaps from a proxy: use the status.
  }
  const scope = /scope="([^"]*)"/.exec(answer.headers.get("WWW-Authenticate") ?? "")?.[1] ?? null;
  const title = told.title ?? (answer.statusText || `HTTP ${answer.status}`);
  const detail = typeof told.detail === "string" ? told.detail : told.error?.message;
  return new Problem(answer.status, title, detail ?? title, {
    requestId: told.request_id ?? answer.headers.get("X-Request-ID"),
    retryAfter: answer.headers.get("Retry-After"),
    scope,
    code: told.code ?? null,
    errors: told.errors ?? [],
    toml: told.toml ?? null,
  });
}

async function body(answer) {
  if (answer.status === NO_CONTENT) return null;
  const text = await answer.text();
  return text === "" ? null : JSON.parse(text);
}

async function* parsed(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  let event = blank();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (waiting + value).split(/\r\n|\n|\r(?!$)/);
      waiting = lines.pop();
      for (const line of lines) {
        if (line !== "") field(event, line);
        else if (event.data === null) event = blank();
        else {
          yield event;
          event = blank();
        }
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

function blank() {
  return { id: null, event: "message", data: null };
}

function field(event, line) {
  const colon = line.indexOf(":");
  if (colon === 0) return; // a comment, which keeps the connection open
  const name = colon < 0 ? line : line.slice(0, colon);
  const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
  if (name === "data") event.data = event.data === null ? value : `${event.data}\n${value}`;
  else if (name === "id" || name === "event") event[name] = value;
}

function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
