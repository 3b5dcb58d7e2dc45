// The same request as a curl command and as a Python program. Pure.

const OPENAI = new Set([
  "model", "messages", "stream", "stream_options", "temperature", "top_p", "max_tokens", "seed",
  "presence_penalty", "frequency_penalty", "stop", "logprobs", "top_logprobs", "tools", "tool_choice",
  "parallel_tool_calls", "response_format",
]);

/** A shell command. `keyed`: the server wants a key, which is never printed but named. */
export function curl(url, body, keyed) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = keyed ? '  -H "authorization: Bearer $JSERVE_API_KEY" \\\n' : "";
  return `curl -N '${url}/chat/completions' \\\n  -H 'content-type: application/json' \\\n${key}  -d '${json}'\n`;
}

/** A program for the openai package; fields it does not know travel in extra_body. */
export function python(url, body, keyed) {
  const entries = Object.entries(body);
  const known = entries.filter(([name]) => OPENAI.has(name));
  const extra = entries.filter(([name]) => !OPENAI.has(name));
  const lines = known.map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  if (extra.length) lines.push(`    extra_body=${literal(Object.fromEntries(extra), 1)},`);
  const key = keyed ? 'os.environ["JSERVE_API_KEY"]' : '"none"';
  return `${keyed ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${literal(url, 0)}, api_key=${key})
stream = client.chat.completions.create(
${lines.join("\n")}
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}

/** A value as a Python literal, indented by `depth` levels. */
export function literal(value, depth) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "string") return JSON.stringify(value);
  if (typeof value === "number") return String(value);
  const pad = "    ".repeat(depth + 1);
  const end = "    ".repeat(depth);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value)
    ? value.map((item) => pad + literal(item, depth + 1))
    : Object.entries(value).map(([k, v]) => `${pad}${JSON.stringify(k)}: ${literal(v, depth + 1)}`);
  return parts.length ? `${open}\n${parts.join(",\n")},\n${end}${close}` : open + close;
}
