// The API key: asked for when the server wants one, kept for this tab only (sessionStorage).

import { el } from "./dom.js";

const NAME = "jserve.key";
let asking = null;

export function key() {
  try {
    return sessionStorage.getItem(NAME) ?? "";
  } catch {
    return "";
  }
}

export function forgetKey() {
  sessionStorage.removeItem(NAME);
}

/** Asks for a key; resolves when one was given. One dialog at a time, whoever asks. */
export function askKey(refused) {
  asking ??= new Promise((resolve) => show(refused, resolve)).finally(() => (asking = null));
  return asking;
}

function show(refused, resolve) {
  const input = el("input", {
    id: "key", type: "password", autocomplete: "off", spellcheck: "false", required: true,
    "aria-describedby": "key-note",
  });
  const note = refused ? "The server did not take that key." : "This server asks for an API key.";
  const form = el("form", {},
    el("h2", {}, "API key"),
    el("p", { id: "key-note", class: refused ? "bad" : "note", role: refused ? "alert" : null },
      `${note} It stays in this tab and is forgotten when the tab closes.`),
    el("label", { for: "key" }, "Key"), input,
    el("button.primary", { type: "submit" }, "Continue"));
  const back = document.activeElement;
  const dialog = el("dialog.key", { "aria-label": "API key" }, form);
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(NAME, input.value.trim());
    dialog.close();
    dialog.remove();
    back.blur(); // Chromium gives the focus back without a caret: typing would go nowhere
    back.focus();
    resolve();
  });
  document.body.append(dialog);
  dialog.showModal();
  input.focus();
}
