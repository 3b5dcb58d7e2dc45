// From what the controls hold to the body of POST /v1/chat/completions. Pure: no document, no network.

/** A box's content did not make sense; `field` names the control. */
export class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

const NUMBERS = {
  temperature: [0, 2],
  top_p: [0, 1],
  top_k: [-1, Infinity],
  min_p: [0, 1],
  max_tokens: [1, Infinity],
  seed: [-Infinity, Infinity],
  presence_penalty: [-2, 2],
  frequency_penalty: [-2, 2],
  repetition_penalty: [0, Infinity],
  thinking_token_budget: [-1, Infinity],
};
const WHOLE = new Set(["top_k", "max_tokens", "seed", "thinking_token_budget"]);

/** The request for `messages` under `controls` (name -> text or boolean of each control).
 *  An empty control leaves its field out: the model's default holds. Throws FieldError. */
export function requestBody(controls, messages, model) {
  const body = { model, messages: withSystem(controls.system, messages) };
  for (const name of Object.keys(NUMBERS)) {
    const value = number(name, controls[name]);
    if (value !== undefined) body[name] = value;
  }
  const stop = lines(controls.stop);
  if (stop.length) body.stop = stop;
  if (controls.lane) body.lane = controls.lane;
  if (controls.thinking) body.chat_template_kwargs = { enable_thinking: controls.thinking === "on" };
  if (controls.logprobs) Object.assign(body, { logprobs: true, top_logprobs: alternatives(controls) });
  Object.assign(body, toolFields(controls), schemaFields(controls));
  return { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
}

function withSystem(system, messages) {
  return system?.trim() ? [{ role: "system", content: system }, ...messages] : messages;
}

function lines(text) {
  return (text ?? "").split("\n").filter((line) => line !== "");
}

function alternatives(controls) {
  return number("top_logprobs", controls.top_logprobs, [0, 20], true) ?? 5;
}

function number(name, text, bounds = NUMBERS[name], whole = WHOLE.has(name)) {
  const given = (text ?? "").toString().trim();
  if (given === "") return undefined;
  const value = Number(given);
  if (!Number.isFinite(value) || (whole && !Number.isInteger(value))) {
    throw new FieldError(name, whole ? "must be a whole number" : "must be a number");
  }
  const [low, high] = bounds;
  if (value < low || value > high) {
    const range = high === Infinity ? `at least ${low}` : `from ${low} to ${high}`;
    throw new FieldError(name, `must be ${range}`);
  }
  return value;
}

function toolFields(controls) {
  const tools = parseBox("tools", controls.tools);
  if (tools === undefined) return {};
  checkTools(tools);
  const found = { tools };
  if (controls.tool_choice) found.tool_choice = toolChoice(controls.tool_choice, tools);
  if (controls.single_call) found.parallel_tool_calls = false;
  return found;
}

function toolChoice(choice, tools) {
  if (["auto", "none", "required"].includes(choice)) return choice;
  if (!tools.some((tool) => tool.function.name === choice)) {
    throw new FieldError("tool_choice", `no tool is called ${choice}`);
  }
  return { type: "function", function: { name: choice } };
}

function checkTools(tools) {
  if (!Array.isArray(tools) || !tools.length) {
    throw new FieldError("tools", "must be a list of tools: [{…}]");
  }
  tools.forEach((tool, i) => {
    const fail = (what) => {
      throw new FieldError("tools", `tool ${i + 1}: ${what}`);
    };
    if (!isObject(tool) || tool.type !== "function") fail('"type" must be "function"');
    if (!isObject(tool.function)) fail('"function" must be an object');
    if (typeof tool.function.name !== "string" || !tool.function.name) fail('"function.name" is missing');
    const { parameters } = tool.function;
    if (parameters !== undefined && !isObject(parameters)) fail('"function.parameters" must be a JSON schema');
  });
}

function schemaFields(controls) {
  const schema = parseBox("schema", controls.schema);
  if (schema === undefined) return {};
  if (!isObject(schema)) throw new FieldError("schema", "must be a JSON schema: an object");
  const format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  return { response_format: format };
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function parseBox(field, text) {
  if (!text?.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldError(field, `is not valid JSON${where(text, error)}`);
  }
}

/** Where JSON.parse gave up, as far as the browser says: " (line 3, column 7)". */
function where(text, error) {
  const at = /position (\d+)/.exec(error.message);
  if (!at) return text.trim() ? ": it seems to end too early" : "";
  const before = text.slice(0, Number(at[1])).split("\n");
  return ` (line ${before.length}, column ${before.at(-1).length + 1})`;
}

/** Control that shows the server's `param`: "response_format.json_schema" -> "schema". */
export function controlOf(param) {
  const root = /^[a-z_]*/.exec(param ?? "")[0];
  const names = {
    response_format: "schema",
    structured_outputs: "schema",
    chat_template_kwargs: "thinking",
    max_completion_tokens: "max_tokens",
    parallel_tool_calls: "tools",
    messages: "message",
  };
  return names[root] ?? root;
}
