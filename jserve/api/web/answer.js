// One answer on the page: thought, text or tokens, tool calls, error, figures, and the request behind it.

import { copyButton, el } from "./dom.js";
import { markdown } from "./markdown.js";
import { curl, python } from "./snippets.js";
import { tokenView } from "./tokens.js";
import { rate } from "./turns.js";

/** Shows `entry`; `update` after it changed, `end` when it is over.
 *  `request()` gives the body it was asked with, `keyed()` says whether the server wants a key. */
export class AnswerView {
  #entry;
  #showsTokens = false;
  #thoughtTouched = false;

  constructor(entry, { request, keyed, onResults, onRetry }) {
    this.#entry = entry;
    this.thought = el("details.thought", {}, el("summary", {}, "Thought"), el("div.thought-text"));
    this.thought.firstChild.addEventListener("click", () => (this.#thoughtTouched = true));
    this.text = el("div.text");
    this.calls = el("div.calls");
    this.error = el("div.error", { role: "alert" });
    this.figures = el("p.figures");
    this.actions = el("div.actions");
    this.node = el("article.answer", { "aria-label": "Answer", "aria-busy": "true" },
      this.thought, this.text, this.calls, this.error, this.figures, this.actions);
    this.parts = { request, keyed, onResults, onRetry };
    this.update();
  }

  update() {
    const entry = this.#entry;
    const waits = entry.finish === null && entry.error === null;
    this.thought.hidden = !entry.reasoning || this.#showsTokens; // the tokens hold the thought
    this.thought.lastChild.textContent = entry.reasoning.trim();
    if (!this.#thoughtTouched) this.thought.open = waits && !entry.content && !entry.calls.length;
    const begun = entry.content || entry.reasoning || entry.calls.length;
    if (waits && !begun) this.text.replaceChildren(el("span.waiting", {}, "Waiting for the first token"));
    else if (this.#showsTokens) this.text.replaceChildren(tokenView(entry.tokens));
    else this.text.replaceChildren(markdown(entry.content));
    this.calls.replaceChildren(...entry.calls.map((call) => callCard(call)));
    this.figures.textContent = figures(entry);
  }

  end(isLast) {
    const { request, keyed, onResults, onRetry } = this.parts;
    this.node.setAttribute("aria-busy", "false");
    this.update();
    const { error, calls, tokens } = this.#entry;
    this.error.replaceChildren(...(error ? [errorText(error)] : []));
    const resumes = isLast && calls.length && !error ? [resultForm(calls, onResults)] : [];
    this.calls.append(...resumes);
    this.actions.replaceChildren(
      ...(this.#entry.content ? [copyButton("Copy", () => this.#entry.content)] : []),
      ...(tokens.length ? [this.#tokensButton()] : []),
      ...(isLast ? [el("button.quiet", { type: "button", onclick: onRetry }, "Try again")] : []),
      requestBox(request, keyed));
  }

  #tokensButton() {
    const button = el("button.quiet", { type: "button", "aria-pressed": String(this.#showsTokens) }, "Tokens");
    button.addEventListener("click", () => {
      this.#showsTokens = !this.#showsTokens;
      button.setAttribute("aria-pressed", String(this.#showsTokens));
      this.update();
    });
    if (!this.#showsTokens && this.#entry.body.logprobs) button.click();
    return button;
  }
}

function errorText({ message, param }) {
  const field = param && !message.includes(param) ? el("code", {}, param) : null;
  return el("p", {}, field, field ? ": " : null, message);
}

function figures({ stats, finish }) {
  const speed = rate(stats);
  const parts = [
    stats.ttft !== undefined && `TTFT ${Math.round(stats.ttft)} ms`,
    speed !== null && `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`,
    stats.completion && `${stats.completion} tokens${stats.thought ? ` (${stats.thought} thought)` : ""}`,
    stats.prompt && `prompt ${stats.prompt}, ${stats.cached} cached`,
    finish && finish !== "stop" && `ended by ${FINISH[finish] ?? finish}`,
  ];
  return parts.filter(Boolean).join("  ·  ");
}

const FINISH = { length: "length", tool_calls: "tool call", stopped: "you" };

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still on its way
  }
}

function callCard({ name, arguments: text }) {
  return el("div.call", {}, el("div.call-name", {}, el("span", {}, "calls "), el("code", {}, name)),
    el("pre", {}, el("code", {}, pretty(text))));
}

/** What the tools answered, typed by hand: the way on after a tool call. */
function resultForm(calls, onResults) {
  const boxes = calls.map(({ id, name }) => el("textarea", {
    rows: 2, required: true, spellcheck: "false", "aria-label": `Result of ${name}`,
    placeholder: `Result of ${name}`, data: { id },
  }));
  const form = el("form.results", {}, ...boxes,
    el("button", { type: "submit" }, calls.length > 1 ? "Send results" : "Send result"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    onResults(boxes.map((box) => ({ role: "tool", id: box.dataset.id, content: box.value })));
  });
  return form;
}

function requestBox(request, keyed) {
  const url = new URL("v1", location.href).href;
  const languages = { curl, Python: python };
  const code = el("code");
  const show = (name) => {
    code.textContent = languages[name](url, request(), keyed());
    for (const tab of tabs) tab.setAttribute("aria-pressed", String(tab.textContent === name));
  };
  const tabs = Object.keys(languages).map((name) =>
    el("button.quiet", { type: "button", "aria-pressed": "false", onclick: () => show(name) }, name));
  const box = el("details.request", {}, el("summary", {}, "Request"),
    el("div.tabs", {}, ...tabs, copyButton("Copy request", () => code.textContent)),
    el("pre", { tabindex: 0, "aria-label": "The request as code" }, code));
  box.addEventListener("toggle", () => box.open && show("curl"));
  return box;
}
