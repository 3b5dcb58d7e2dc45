// The conversation: what is asked, what comes back, what is kept.

import { AnswerView } from "./answer.js";
import { ApiError, get, stream } from "./api.js";
import { FieldError, controlOf, requestBody } from "./body.js";
import { byId, el, perFrame } from "./dom.js";
import { forgetKey, key } from "./key.js";
import { clearFaults, showFault, values } from "./settings.js";
import { loadConversation, saveConversation } from "./store.js";
import { addChunk, bodyOf, messagesOf, newAnswer } from "./turns.js";

const log = byId("log");
const message = byId("message");
const model = byId("model");
const fault = byId("fault");
const entries = loadConversation();
for (const entry of entries) {
  if (entry.role === "assistant" && !entry.error) entry.finish ??= "stopped"; // the page was closed meanwhile
}
let running = null; // AbortController of the answer that is being written

// --- what is shown

function show(entry, at) {
  if (entry.role === "user") return el("article.asked", { "aria-label": "You" }, entry.content);
  if (entry.role === "tool") {
    return el("article.asked.result", { "aria-label": "Tool result" }, el("span", {}, "tool result"), entry.content);
  }
  return view(entry, at).node;
}

function view(entry, at) {
  const shown = new AnswerView(entry, {
    request: () => bodyOf(entries, at),
    keyed: () => Boolean(key()),
    onResults: (results) => ask(...results),
    onRetry: retry,
  });
  if (running === null || at < entries.length - 1) shown.end(at === entries.length - 1);
  return shown;
}

function redraw() {
  log.replaceChildren(...entries.map(show));
  document.body.toggleAttribute("data-empty", entries.length === 0);
  byId("clear").disabled = entries.length === 0;
}

const nearEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 80;
const toEnd = () => (log.scrollTop = log.scrollHeight);

function setRunning(controller) {
  running = controller;
  byId("send").hidden = controller !== null;
  byId("stop").hidden = controller === null;
}

function showError(text) {
  fault.textContent = text;
  fault.hidden = !text;
}

// --- what is asked

/** Sends the conversation with `asked` behind it; false when a control holds nonsense. */
function ask(...asked) {
  if (running) return false;
  clearFaults();
  showError("");
  let body;
  try {
    body = requestBody(values(), messagesOf([...entries, ...asked]), model.value);
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    showFault(error.field, error.message);
    showError(`Not sent: ${error.field} ${error.message}.`);
    return false;
  }
  entries.push(...asked, newAnswer(body));
  saveConversation(entries);
  setRunning(new AbortController());
  redraw();
  run(body, entries.at(-1), running);
  return true;
}

async function run(body, entry, controller) {
  const shown = view(entry, entries.length - 1);
  log.lastChild.replaceWith(shown.node);
  toEnd();
  const draw = perFrame(() => {
    if (entry.finish !== null || entry.error) return; // the end draws itself
    const follows = nearEnd();
    shown.update();
    if (follows) toEnd();
  });
  const began = performance.now();
  try {
    for await (const chunk of stream("v1/chat/completions", body, controller.signal)) {
      addChunk(entry, chunk, began, performance.now());
      draw();
    }
  } catch (error) {
    fail(entry, error);
  }
  const follows = nearEnd();
  setRunning(null);
  shown.end(true);
  if (follows) toEnd();
  saveConversation(entries);
}

function fail(entry, error) {
  if (error.name === "AbortError") {
    entry.finish = "stopped";
    return;
  }
  if (!(error instanceof ApiError)) console.error(error);
  const { message: text, param = null, code = null } = error;
  entry.error = { message: text, param, code };
  const field = controlOf(param);
  if (field) showFault(field, text);
}

/** Asks the last question again under the settings of now. */
function retry() {
  if (running) return;
  while (entries.at(-1)?.role === "assistant") entries.pop();
  ask();
}

function send() {
  const text = message.value;
  if (!text.trim() || !ask({ role: "user", content: text })) return;
  message.value = "";
  grow();
}

function clear() {
  running?.abort();
  entries.length = 0;
  saveConversation(entries);
  showError("");
  redraw();
  message.focus();
}

// --- the frame around it

function grow() {
  message.style.height = "auto";
  message.style.height = `${Math.min(message.scrollHeight + 2, 240)}px`;
}

async function loadModels() {
  try {
    const { data } = await get("v1/models");
    model.replaceChildren(...data.map(({ id }) => el("option", { value: id }, id)));
    byId("forget").hidden = !key();
    showError("");
  } catch (error) {
    showError(error.message);
    setTimeout(loadModels, 3000);
  }
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
message.addEventListener("input", grow);
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", clear);
byId("forget").addEventListener("click", () => {
  forgetKey();
  loadModels();
});

redraw();
toEnd();
loadModels();
message.focus();
