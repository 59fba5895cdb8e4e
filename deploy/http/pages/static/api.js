// Calls of the server with the key that was typed in, which stays in this tab.
const KEY = "manta-key";

export const savedKey = () => sessionStorage.getItem(KEY) ?? "";

export function saveKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

// Whether the server asks for keys. One that can't be asked may.
export async function asksForKey() {
  try {
    const response = await fetch(new URL("pages/access.json", document.baseURI));
    return (await response.json()).keys;
  } catch {
    return true;
  }
}

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// The response of `path` (relative to the server's root). Throws an ApiError with the server's words.
export async function call(path, options = {}) {
  const key = savedKey();
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server can't be reached.", 0);
  }
  if (!response.ok) throw new ApiError(await words(response), response.status);
  return response;
}

async function words(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300) || `The server answered with status ${response.status}.`;
  }
}

const READ_ON_MS = 90_000;
const PAUSE_MS = 500;
const LOST = "The connection was lost before the answer was complete.";

// The JSON of each event of a stream, which is read on where its connection was lost.
export async function* stream(path, options) {
  let response = await call(path, options);
  let count = 0;
  let id = null;
  let lostAt = 0;
  let loss = null;
  // Whether it is to be tried again: what the server said passes, and not for too long.
  const passes = (problem) => {
    lostAt ||= Date.now();
    const isAway = problem.status === 0 || problem.status === 429 || problem.status >= 500;
    return problem instanceof ApiError && isAway && Date.now() < lostAt + READ_ON_MS;
  };
  for (;;) {
    try {
      if (response) {
        for await (const chunk of events(response)) {
          if (chunk.error) throw new ApiError(chunk.error.message, 400);
          id = chunk.id;
          count += 1;
          lostAt = 0;
          yield chunk;
        }
        return;
      }
    } catch (problem) {
      if (id === null || !passes(problem)) throw problem;
      loss = problem;
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    options.signal?.throwIfAborted();
    const rest = `${path}/${encodeURIComponent(id)}?stream=true&starting_after=${count}`;
    response = await call(rest, { signal: options.signal }).catch((problem) => {
      if (!passes(problem)) throw problem.status === 404 ? loss : problem;
      return null;
    });
  }
}

// The JSON of each server-sent event until [DONE].
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((problem) => {
      if (problem.name === "AbortError") throw problem;
      throw new ApiError(LOST, 0);
    });
    if (done) throw new ApiError(LOST, 0);
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
