// Calls of the server: the key, errors in its words, event streams.

import { askKey, key } from "./key.js";
import { readEvents } from "./sse.js";

/** What the server (or the way to it) said instead of an answer. `param`: the field at fault. */
export class ApiError extends Error {
  constructor(message, { param = null, code = null, status = 0 } = {}) {
    super(message);
    Object.assign(this, { param, code, status });
  }
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  const error = body?.error;
  if (!error) return new ApiError(`The server answered ${response.status}.`, { status: response.status });
  return new ApiError(error.message, { ...error, status: response.status });
}

async function send(path, options) {
  const headers = { ...options.headers };
  if (key()) headers.authorization = `Bearer ${key()}`;
  try {
    return await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
}

/** A response with a good status; asks for the key as often as the server refuses it. */
async function call(path, options = {}) {
  for (;;) {
    const response = await send(path, options);
    if (response.ok) return response;
    if (response.status !== 401) throw await failure(response);
    await askKey(Boolean(key()));
  }
}

/** GET, as JSON. */
export async function get(path, signal) {
  return (await call(path, { signal })).json();
}

/** POST of a streamed request: its events as they come. An error inside the stream is thrown. */
export async function* stream(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const response = await call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  try {
    for await (const event of readEvents(response.body)) {
      if (event.error) throw new ApiError(event.error.message, event.error);
      yield event;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError(error.message);
  }
}
