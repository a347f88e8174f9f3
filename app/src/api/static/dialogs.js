// Dialogs, including the one that asks for the key. One is open at a time; closing it restores the focus.

import { h } from "./dom.js";

const SENDABLE = /^[\x21-\x7e]+$/; // in a header
let made = 0;

/** Opens a modal dialog; resolves with its returnValue once it is closed ("" by Esc). */
export function openDialog(title, content, { wide = false, modal = null } = {}) {
  const before = document.activeElement;
  const id = `dialog-title-${(made += 1)}`; // the one that asks for the key may open over another
  const heading = h("h2", { id, tabindex: "-1" }, title);
  const close = h("button", { type: "button", class: "quiet close", "aria-label": "Close", onclick: () => dialog.close("") }, "✕");
  const dialog = h(
    "dialog",
    { class: wide ? "wide" : null, "aria-labelledby": id },
    h("div", { class: "dialog-head" }, heading, close),
    h("div", { class: "dialog-body" }, content),
  );
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close(""));
  const over = new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (before?.isConnected) before.focus();
      else document.getElementById("main").focus({ preventScroll: true });
      resolve(dialog.returnValue);
    });
  });
  document.body.append(dialog);
  dialog.showModal();
  (dialog.querySelector("[autofocus]") ?? heading).focus();
  modal?.(dialog);
  return over;
}

/** The page beneath changes. */
export function closeDialogs() {
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close("");
}

/** Asks whether to go on; resolves with true or false. */
export async function confirmed(title, text, action = "Continue") {
  let dialog = null;
  const answer = (value) => () => dialog.close(value);
  const content = [
    h("p", null, text),
    h(
      "div",
      { class: "buttons" },
      h("button", { type: "button", class: "primary", onclick: answer("yes") }, action),
      h("button", { type: "button", autofocus: true, onclick: answer("") }, "Cancel"),
    ),
  ];
  return (await openDialog(title, content, { modal: (made) => (dialog = made) })) === "yes";
}

/** Asks for the key; `why`: what was wrong with the one before. Resolves with the key, or null. */
export async function askKey(why) {
  let dialog = null;
  const field = h("input", { type: "password", id: "key", autocomplete: "off", required: true, autofocus: true, spellcheck: "false" });
  if (why) field.setAttribute("aria-describedby", "key-why");
  const submit = (event) => {
    event.preventDefault();
    const key = field.value.trim();
    if (key !== "" && !SENDABLE.test(key)) {
      field.setCustomValidity("The key contains an invalid character. Copy it again.");
      field.reportValidity();
    } else if (key !== "") dialog.close("given");
  };
  field.addEventListener("input", () => field.setCustomValidity(""));
  const form = h(
    "form",
    { onsubmit: submit },
    why && h("p", { class: "note error", id: "key-why", role: "alert" }, why),
    h("p", null, "This service requires a key. Ask your administrator for one, or use a token from your identity provider."),
    h("label", { for: "key" }, "Key or token"),
    field,
    h("p", { class: "small" }, "Kept until this tab is closed and sent only to this service."),
    h("div", { class: "buttons" }, h("button", { type: "submit", class: "primary" }, "Continue")),
  );
  const answer = await openDialog("Sign in", form, { modal: (made) => (dialog = made) });
  const key = field.value.trim();
  field.value = "";
  return answer === "given" && key !== "" ? key : null;
}
