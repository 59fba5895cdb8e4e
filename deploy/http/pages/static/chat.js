// The page /chat: a conversation, streamed.
import { html, render, useEffect, useRef, useState } from "./htm-preact.js";
import { call, stream } from "./api.js";
import { figures } from "./figures.js";
import { Head } from "./head.js";
import { textParts } from "./text_parts.js";

const SETTINGS = [
  // name in the API, label, attributes of the field
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1, placeholder: "the model's" }],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01, placeholder: "the model's" }],
  ["max_tokens", "Most tokens", { min: 1, step: 1, placeholder: "as many as fit" }],
  ["seed", "Seed", { min: 0, step: 1, placeholder: "random" }],
];

// Code in backticks as code; everything else stays as it is written.
function Text({ text, isOpen }) {
  const shown = {
    text: (piece) => piece,
    code: (piece) => html`<code>${piece}</code>`,
    block: (piece) => html`<pre tabindex="0"><code>${piece}</code></pre>`,
  };
  return html`<div class="text">
    ${textParts(text).map(({ kind, text: piece }) => shown[kind](piece))}${isOpen && html`<span class="cursor" aria-hidden="true"></span>`}
  </div>`;
}

function Turn({ turn }) {
  const who = turn.role === "user" ? "You" : "Model";
  return html`<li class=${`turn ${turn.role}`}>
    <h2>${who}</h2>
    ${turn.reasoning && html`<details><summary>Reasoning</summary><p class="text">${turn.reasoning}</p></details>`}
    <${Text} text=${turn.content} isOpen=${turn.isOpen} />
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
  const [models, setModels] = useState([]);
  const [model, setModel] = useState("");
  const box = useRef(null);
  const end = useRef(null);

  useEffect(() => {
    const onKey = (event) => event.key === "Escape" && stop.current?.abort();
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [turns]);

  async function listModels() {
    const served = (await (await call("v1/models")).json()).data.map((m) => m.id);
    setModels(served);
    return served;
  }

  const onSettings = (event) => {
    // Not before: a server with keys refuses who has not typed one yet.
    if (event.target.open && !models.length) listModels().catch((problem) => setError(problem.message));
  };

  async function send(event) {
    event?.preventDefault();
    const text = draft.trim();
    if (!text) box.current?.focus();
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
      const served = await listModels();
      const messages = before.map(({ role, content }) => ({ role, content }));
      if (system.trim()) messages.unshift({ role: "system", content: system });
      const chosen = Object.entries(settings).filter(([, value]) => value !== "");
      const body = {
        model: served.includes(model) ? model : served[0],
        messages,
        stream: true,
        stream_options: { include_usage: true, continuous_usage_stats: true },
        ...Object.fromEntries(chosen.map(([name, value]) => [name, Number(value)])),
      };
      const asked = {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
        signal: stop.current.signal,
      };
      for await (const chunk of stream("v1/chat/completions", asked)) {
        answer.usage = chunk.usage ?? answer.usage;
        const delta = chunk.choices?.[0]?.delta ?? {};
        if (delta.content || delta.reasoning_content) {
          answer.last = performance.now();
          answer.first ??= answer.last;
          answer.firstTokens ??= answer.usage?.completion_tokens;
          answer.content += delta.content ?? "";
          answer.reasoning += delta.reasoning_content ?? "";
        }
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
      <details class="settings" onToggle=${onSettings}>
        <summary>Settings</summary>
        ${models.length > 1 && html`<label>Model
          <select value=${model || models[0]} onChange=${(e) => setModel(e.target.value)}>
            ${models.map((name) => html`<option value=${name}>${name}</option>`)}
          </select>
        </label>`}
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
          <button type="submit" disabled=${isOpen}>Send</button>
          <button type="button" disabled=${!isOpen} onClick=${() => stop.current?.abort()}>Stop</button>
          <button type="button" class="quiet" disabled=${isOpen || !turns.length} onClick=${clear}>New conversation</button>
        </div>
      </form>
      <span ref=${end}></span>
    </main>`;
}

render(html`<${Chat} />`, document.getElementById("page"));
