// A conversation as data: what the stream adds to an answer, and what is sent back with the next request.
// Pure: no document, no network.

import { tokensOf } from "./logprobs.js";

/** An answer before its first event. `body` is its request without the messages. */
export function newAnswer(body) {
  const { messages, ...rest } = body;
  return {
    role: "assistant", content: "", reasoning: "", calls: [], tokens: [],
    finish: null, error: null, stats: {}, body: rest, system: messages[0]?.role === "system" ? messages[0].content : "",
  };
}

/** Adds one chunk of /v1/chat/completions to `answer`, which began at `began` (milliseconds). */
export function addChunk(answer, chunk, began, now) {
  const choice = chunk.choices[0];
  if (chunk.usage) addUsage(answer, chunk.usage);
  if (!choice) return;
  const { stats } = answer;
  stats.ttft ??= now - began;
  stats.took = now - began;
  const { content, tool_calls: calls = [] } = choice.delta;
  const reasoning = choice.delta.reasoning ?? choice.delta.reasoning_content;
  answer.content += content ?? "";
  answer.reasoning += reasoning ?? "";
  for (const call of calls) addCall(answer.calls, call);
  answer.tokens.push(...tokensOf(choice.logprobs));
  answer.finish = choice.finish_reason ?? answer.finish;
}

function addUsage(answer, usage) {
  Object.assign(answer.stats, {
    prompt: usage.prompt_tokens,
    completion: usage.completion_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    thought: usage.completion_tokens_details?.reasoning_tokens ?? 0,
  });
}

function addCall(calls, delta) {
  const call = (calls[delta.index] ??= { id: "", name: "", arguments: "" });
  call.id = delta.id ?? call.id;
  call.name += delta.function?.name ?? "";
  call.arguments += delta.function?.arguments ?? "";
}

/** Tokens per second after the first one; null where there were too few to tell. */
export function rate({ completion, ttft, took }) {
  const seconds = (took - ttft) / 1000;
  return completion > 1 && seconds > 0 ? (completion - 1) / seconds : null;
}

/** The messages of a request that follows `entries`. Answers that came to nothing are left out. */
export function messagesOf(entries) {
  return entries.filter(said).map((entry) => {
    if (entry.role === "tool") return { role: "tool", tool_call_id: entry.id, content: entry.content };
    if (entry.role === "user") return { role: "user", content: entry.content };
    const calls = entry.calls.map(({ id, name, arguments: text }) => ({
      id, type: "function", function: { name, arguments: text },
    }));
    const message = { role: "assistant", content: entry.content };
    return calls.length ? { ...message, tool_calls: calls } : message;
  });
}

const said = (entry) => entry.role !== "assistant" || entry.content !== "" || entry.calls.length > 0;

/** The whole body that answer number `at` was asked with, for the snippets. */
export function bodyOf(entries, at) {
  const { body, system } = entries[at];
  const before = messagesOf(entries.slice(0, at));
  const messages = system ? [{ role: "system", content: system }, ...before] : before;
  const { model, ...rest } = body;
  return { model, messages, ...rest };
}
