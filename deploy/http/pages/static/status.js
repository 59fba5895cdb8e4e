// The page /status: the replicas, once a second, and the timeline of their steps.
import { html, render, useEffect, useRef, useState } from "./htm-preact.js";
import { call } from "./api.js";
import { Head } from "./head.js";
import { Timeline } from "./timeline.js";

const PERIOD_MS = 1000;
const WORDS = {
  serving: "serving",
  unwell: "not well",
  lost: "lost",
  starting: "starting",
  draining: "draining",
};
const count = (n) => (n ?? 0).toLocaleString("en");
const share = (part, whole) => (whole ? part / whole : 0);
const percent = (value) => `${Math.round(100 * value)} %`;

function Bar({ label, value }) {
  return html`<progress max="1" value=${value} aria-label=${label}></progress>`;
}

function Replica({ replica, rate }) {
  const { stats } = replica;
  const kv = stats && share(stats.kv_used_tokens, stats.kv_total_tokens);
  const hits = stats && share(stats.cached_tokens_total, stats.prompt_tokens_total);
  return html`<li class=${`replica ${replica.state}`} data-state=${replica.state}>
    <h3>Engine ${replica.place} <span class="state">${WORDS[replica.state]}</span></h3>
    ${replica.detail && html`<p class="detail">${replica.detail}</p>`}
    ${stats && html`<dl>
      <div><dt>Running</dt><dd>${count(stats.num_running)}</dd></div>
      <div><dt>Waiting</dt><dd>${count(stats.num_waiting)}</dd></div>
      <div><dt>Tokens/s</dt><dd>${rate === null ? "…" : count(Math.round(rate))}</dd></div>
      <div><dt>Prefix hits</dt><dd>${percent(hits)}</dd></div>
      <div class="wide"><dt>KV cache</dt><dd>${percent(kv)} of ${count(stats.kv_total_tokens)} tokens in use,
        ${" "}${count(stats.kv_cached_tokens)} kept for prefixes
        <${Bar} label=${`KV cache of engine ${replica.place} in use`} value=${kv} /></dd></div>
    </dl>`}
    <ul class="roles" aria-label=${`Roles of engine ${replica.place}`}>
      ${replica.roles.map((role) => html`<li class=${role.wrong ? "wrong" : ""}>
        ${role.role} <span class="pid">pid ${role.pid}</span>
        ${role.wrong && html` <strong>${role.wrong}</strong>`}</li>`)}
    </ul>
    <p class="figures">${replica.replica || "no replica"}${replica.node && `, node ${replica.node}`}</p>
  </li>`;
}

function Ingress({ row }) {
  const silent = row.in_flight === null;
  return html`<li class=${silent ? "wrong" : ""}>${row.ingress || "an ingress"}:
    ${" "}${silent ? "doesn't answer" : `${count(row.in_flight)} ${row.in_flight === 1 ? "request" : "requests"} open`}</li>`;
}

function Status() {
  const [status, setStatus] = useState(null);
  const [rates, setRates] = useState({});
  const [error, setError] = useState("");
  const [news, setNews] = useState("");
  const before = useRef(null);
  const [turn, setTurn] = useState(0);

  useEffect(() => {
    let isOver = false;
    let timer = 0;
    async function look() {
      try {
        const found = await (await call("debug/status")).json();
        if (isOver) return;
        setRates(ratesOf(before.current, found));
        setNews(changes(before.current, found));
        before.current = found;
        setStatus(found);
        setError("");
        timer = setTimeout(look, PERIOD_MS);
      } catch (problem) {
        if (isOver) return;
        setError(problem.message);
        // A wrong key stays wrong until it is changed.
        if (problem.status !== 401 && problem.status !== 403) timer = setTimeout(look, PERIOD_MS);
      }
    }
    timer = setTimeout(look, turn ? 400 : 0); // while a key is typed
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [turn]);

  return html`<${Head} page="status" onKey=${() => setTurn((n) => n + 1)} />
    <main>
      <h1>Status</h1>
      ${error && html`<p class="error" role="alert">${error}</p>`}
      <p class="unseen" role="status">${news}</p>
      ${status && html`
        <p class="figures">${status.models.map((m) => m.model).join(", ")}, Manta ${status.version},
          ${" "}${new Date(status.time * 1000).toLocaleTimeString()}</p>
        ${status.models.map((m, i) => html`
        <section aria-labelledby=${`engines${i}`}><h2 id=${`engines${i}`}>${titleOf(status, m)}</h2>
          ${m.replicas.length === 0 && html`<p>There is no engine yet.</p>`}
          <ul class="replicas">${m.replicas.map(
            (r) => html`<${Replica} key=${r.place} replica=${r} rate=${rates[r.replica] ?? null} />`,
          )}</ul></section>`)}
        <section aria-labelledby="ingresses"><h2 id="ingresses">Ingresses</h2>
          <ul class="plain">${status.ingresses.map((row) => html`<${Ingress} row=${row} />`)}
          ${status.models.map((m) => m.tokenizer_wrong
            && html`<li class="wrong">tokenizer${status.models.length > 1 ? ` of ${m.model}` : ""}: ${m.tokenizer_wrong}</li>`)}</ul></section>`}
      <${Timeline} />
    </main>`;
}

// The heading of a model's engines.
function titleOf(status, model) {
  return status.models.length > 1 ? `Engines of ${model.model}` : "Engines";
}

function replicasOf(status) {
  return status.models.flatMap((m) => m.replicas.map((r) => ({ ...r, id: `${m.model} ${r.place}` })));
}

// Tokens per second of each replica between two looks.
function ratesOf(before, now) {
  if (!before) return {};
  const old = new Map(replicasOf(before).map((r) => [r.replica, r.stats]));
  const seconds = now.time - before.time;
  const rates = {};
  for (const { replica, stats } of replicasOf(now)) {
    const then = old.get(replica);
    if (then && stats && seconds > 0) {
      rates[replica] = Math.max(0, stats.generation_tokens_total - then.generation_tokens_total) / seconds;
    }
  }
  return rates;
}

// What a screen reader should say: which engines have changed their state.
function changes(before, now) {
  if (!before) return "";
  const old = new Map(replicasOf(before).map((r) => [r.id, r.state]));
  const changed = replicasOf(now).filter((r) => old.has(r.id) && old.get(r.id) !== r.state);
  const named = (r) => (now.models.length > 1 ? r.id : r.place);
  return changed.map((r) => `Engine ${named(r)} is ${WORDS[r.state]}.`).join(" ");
}

render(html`<${Status} />`, document.getElementById("page"));
