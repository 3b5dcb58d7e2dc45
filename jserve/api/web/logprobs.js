// Log-probabilities as the page keeps and names them. Pure: no document, no network.

const STEPS = [0.95, 0.8, 0.6, 0.4, 0.2, 0.05];

/** The server's logprobs as we keep them: {t: text, p: logprob, a: [[text, logprob], ...]}. */
export function tokensOf(logprobs) {
  return (logprobs?.content ?? []).map((entry) => ({
    t: readable(entry),
    p: entry.logprob,
    a: entry.top_logprobs.map((other) => [readable(other), other.logprob]),
  }));
}

/** A token that is part of a character is shown by its bytes. */
function readable({ token, bytes }) {
  if (!token.includes("\uFFFD") || !bytes) return token;
  return bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
}

/** 0 (certain) to 6 (a surprise). */
export function surprise(logprob) {
  const p = Math.exp(logprob);
  const step = STEPS.findIndex((limit) => p >= limit);
  return step < 0 ? STEPS.length : step;
}

export const percent = (logprob) => {
  const p = 100 * Math.exp(logprob);
  return p >= 99.95 ? "100 %" : p >= 0.1 ? `${p.toFixed(1)} %` : p > 0.0001 ? "< 0.1 %" : "≈ 0 %";
};
