// The page /chat: a conversation, streamed.
import { html, render, useEffect, useRef, useState } from "./htm-preact.js";
import { ApiError, call, events } from "./api.js";
import { Head } from "./head.js";

const SETTINGS = [
  // name in the API, label, attributes of the field
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1, placeholder: "the model's" }],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01, placeholder: "the model's" }],
  ["max_tokens", "Most tokens", { min: 1, step: 1, placeholder: "as many as fit" }],
  ["seed", "Seed", { min: 0, step: 1, placeholder: "random" }],
];

const SHORTEST_S = 0.1; // between the first and the last text, for a rate that means something

const number = (n, digits = 0) =>
  n.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });

// "24 tokens, 310 tokens/s, first after 0.05 s, 16 of 30 prompt tokens cached"
function figures({ usage, started, first, firstTokens, last }) {
  if (!usage) return "";
  const { completion_tokens: tokens, prompt_tokens: prompt } = usage;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const seconds = (last - first) / 1000;
  const parts = [`${number(tokens)} tokens`];
  // The tokens of the first piece came before the clock began. Pieces that come together have none.
  const timed = tokens - firstTokens;
  if (timed > 0 && seconds >= SHORTEST_S) parts.push(`${number(timed / seconds)} tokens/s`);
  if (first) parts.push(`first after ${number((first - started) / 1000, 2)} s`);
  parts.push(`${number(cached)} of ${number(prompt)} prompt tokens cached`);
  return parts.join(", ");
}

// Text with code in backticks: `words`, or lines between lines of three.
function Text({ text }) {
  const parts = text.split(/^(```[^\n]*\n[^]*?(?:^```[^\S\n]*$|$(?![^])))|(`[^`\n]+`)/m);
  return parts.filter(Boolean).map((part) => {
    const fenced = /^```[^\n]*\n([^]*?)\n?(?:^```[^\S\n]*)?$(?![^])/m.exec(part);
    if (fenced) return html`<pre tabindex="0"><code>${fenced[1]}</code></pre>`;
    const isCode = part.length > 2 && /^`[^`\n]+`$/.test(part);
    return isCode ? html`<code>${part.slice(1, -1)}</code>` : part;
  });
}

function Turn({ turn }) {
  const who = turn.role === "user" ? "You" : "Model";
  return html`<li class=${`turn ${turn.role}`}>
    <h2>${who}</h2>
    ${turn.reasoning && html`<details><summary>Reasoning</summary><p class="text">${turn.reasoning}</p></details>`}
    <div class="text"><${Text} text=${turn.content} />${turn.isOpen && html`<span class="cursor" aria-hidden="true"></span>`}</div>
    ${turn.figures && html`<p class="figures">${turn.figures}</p>`}
  </li>`;
}

function Chat() {
  const [turns, setTurns] = useState([]);
  const [draft, setDraft] = useState("");
  const [system, setSystem] = useState("");
  const [settings, setSettings] = useState({});
  const [error, setError] = useState("");
  const [news, setNews] = useState("");
  const stop = useRef(null);
  const [isOpen, setOpen] = useState(false);
  const box = useRef(null);
  const end = useRef(null);

  useEffect(() => {
    const onKey = (event) => event.key === "Escape" && stop.current?.abort();
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [turns]);

  async function send(event) {
    event?.preventDefault();
    const text = draft.trim();
    if (!text || isOpen) return;
    const before = [...turns, { role: "user", content: text }];
    const answer = { role: "assistant", content: "", reasoning: "", started: performance.now() };
    // Text comes more often than it can be read: it is drawn once a frame.
    let frame = 0;
    const draw = () => {
      frame = 0;
      setTurns([...before, { ...answer, isOpen: true }]);
    };
    stop.current = new AbortController();
    setError("");
    setDraft("");
    setOpen(true);
    setNews("The model is answering.");
    draw();
    let ended = "Answer complete";
    try {
      const model = (await (await call("v1/models")).json()).data[0].id;
      const messages = before.map(({ role, content }) => ({ role, content }));
      if (system.trim()) messages.unshift({ role: "system", content: system });
      const chosen = Object.entries(settings).filter(([, value]) => value !== "");
      const body = {
        model,
        messages,
        stream: true,
        stream_options: { include_usage: true, continuous_usage_stats: true },
        ...Object.fromEntries(chosen.map(([name, value]) => [name, Number(value)])),
      };
      const response = await call("v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
        signal: stop.current.signal,
      });
      for await (const chunk of events(response)) {
        if (chunk.error) throw new ApiError(chunk.error.message, 0);
        const delta = chunk.choices?.[0]?.delta ?? {};
        if (delta.content || delta.reasoning_content) {
          answer.last = performance.now();
          answer.first ??= answer.last;
          answer.content += delta.content ?? "";
          answer.reasoning += delta.reasoning_content ?? "";
        }
        answer.usage = chunk.usage ?? answer.usage;
        if (answer.first) answer.firstTokens ??= answer.usage?.completion_tokens ?? 1;
        answer.figures = figures(answer);
        frame ||= requestAnimationFrame(draw);
      }
    } catch (problem) {
      if (problem.name === "AbortError") {
        ended = "Stopped";
      } else {
        ended = "No complete answer";
        setError(problem.message);
      }
    }
    cancelAnimationFrame(frame);
    stop.current = null;
    answer.figures = figures(answer);
    if (ended === "Stopped") answer.figures = ["stopped", answer.figures].filter(Boolean).join(": ");
    const hasText = answer.content || answer.reasoning;
    setTurns(hasText ? [...before, answer] : turns);
    if (!hasText) setDraft(text);
    setOpen(false);
    setNews(`${ended}. ${answer.figures ?? ""}`);
    box.current?.focus();
  }

  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  const clear = () => {
    setTurns([]);
    setError("");
    setNews("The conversation is empty.");
    box.current?.focus();
  };
  const setting = ([name, label, field]) => html`<label>${label}
    <input type="number" ...${field} value=${settings[name] ?? ""}
      onInput=${(event) => setSettings({ ...settings, [name]: event.target.value })} />
  </label>`;
  return html`<${Head} page="chat" />
    <main class="chat">
      <h1>Chat</h1>
      <details class="settings">
        <summary>Settings</summary>
        <label>System prompt
          <textarea rows="2" value=${system} onInput=${(e) => setSystem(e.target.value)}></textarea>
        </label>
        <div class="fields">${SETTINGS.map(setting)}</div>
      </details>
      ${turns.length === 0 && html`<p class="empty">Nothing has been said yet.</p>`}
      <ol class="turns" aria-label="Conversation">${turns.map((turn) => html`<${Turn} turn=${turn} />`)}</ol>
      ${error && html`<p class="error" role="alert">${error}</p>`}
      <p class="unseen" role="status">${news}</p>
      <form onSubmit=${send}>
        <label for="message">Message</label>
        <textarea id="message" ref=${box} rows="3" value=${draft} aria-describedby="keys"
          onInput=${(e) => setDraft(e.target.value)} onKeyDown=${onKeyDown}></textarea>
        <p id="keys" class="hint">Enter sends, Shift and Enter begins a line, Escape stops.</p>
        <div class="buttons">
          <button type="submit" disabled=${isOpen || !draft.trim()}>Send</button>
          <button type="button" disabled=${!isOpen} onClick=${() => stop.current?.abort()}>Stop</button>
          <button type="button" disabled=${isOpen || !turns.length} onClick=${clear}>New conversation</button>
        </div>
      </form>
      <span ref=${end}></span>
    </main>`;
}

render(html`<${Chat} />`, document.getElementById("page"));
