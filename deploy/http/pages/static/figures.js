// What stands below an answer.
const LEAST_SPAN = 100; // ms; tokens that came in less came together, and say nothing of a speed

export const number = (n, digits = 0) =>
  n.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });

// "24 tokens, 310 tokens/s, first after 0.05 s, 16 of 30 prompt tokens cached". `first` and `last` are
// the times (ms) of the first and the last text; `firstTokens` came with the first.
export function figures({ usage, started, first, firstTokens = 1, last }) {
  if (!usage) return "";
  const { completion_tokens: tokens, prompt_tokens: prompt } = usage;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const parts = [`${number(tokens)} tokens`];
  if (tokens > firstTokens && last - first >= LEAST_SPAN) {
    parts.push(`${number(((tokens - firstTokens) * 1000) / (last - first))} tokens/s`);
  }
  if (first) parts.push(`first after ${number((first - started) / 1000, 2)} s`);
  parts.push(`${number(cached)} of ${number(prompt)} prompt tokens cached`);
  return parts.join(", ");
}
