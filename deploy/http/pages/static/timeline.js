// The last steps of all engines, drawn from GET /debug/trace (Chrome's trace events).
import { html, useState } from "./htm-preact.js";
import { call } from "./api.js";

const STEPS = 60;
const WIDTH = 1600;
const ROW = 22;
const LABEL = 14;

const ms = (us) => (us / 1000).toLocaleString("en", { maximumFractionDigits: 2 });

// [{name, spans: [{name, at, length}], busy, mean}], times in microseconds from the first span.
export function tracksOf(trace) {
  const names = new Map();
  const tracks = new Map();
  for (const event of trace.traceEvents) {
    const id = `${event.pid}/${event.tid}`;
    if (event.ph === "M" && event.name === "process_name") names.set(`${event.pid}`, event.args.name);
    if (event.ph === "M" && event.name === "thread_name") names.set(id, event.args.name);
    if (event.ph === "X") {
      if (!tracks.has(id)) tracks.set(id, { pid: `${event.pid}`, id, spans: [] });
      tracks.get(id).spans.push({ name: event.name, at: event.ts, length: event.dur });
    }
  }
  const found = [...tracks.values()].filter((track) => track.spans.length);
  const start = Math.min(...found.flatMap((t) => t.spans.map((s) => s.at)));
  const end = Math.max(...found.flatMap((t) => t.spans.map((s) => s.at + s.length)));
  for (const track of found) {
    track.name = `${names.get(track.pid) ?? track.pid}: ${names.get(track.id) ?? track.id}`;
    const sum = track.spans.reduce((total, span) => total + span.length, 0);
    track.mean = sum / track.spans.length;
    track.busy = Math.min(1, sum / Math.max(1, end - start));
    for (const span of track.spans) span.at -= start;
  }
  found.sort((a, b) => a.name.localeCompare(b.name));
  return { tracks: found, length: Math.max(1, end - start) };
}

function Drawing({ tracks, length }) {
  const scale = WIDTH / length;
  const height = tracks.length * (ROW + LABEL);
  return html`<div class="timeline" tabindex="0" role="region" aria-label="Drawing of the steps">
    <svg width=${WIDTH} height=${height} role="img" aria-label="Steps of each role over time; the table below has the figures">
      ${tracks.map((track, i) => html`<g transform=${`translate(0 ${i * (ROW + LABEL)})`}>
        <text x="0" y="11">${track.name}</text>
        ${track.spans.map((span, n) => html`<rect class=${n % 2 ? "odd" : ""} x=${span.at * scale} y=${LABEL}
          width=${Math.max(0.5, span.length * scale)} height=${ROW - 6}>
          <title>${span.name}: ${ms(span.length)} ms</title></rect>`)}
      </g>`)}
    </svg></div>`;
}

export function Timeline() {
  const [trace, setTrace] = useState(null);
  const [isOpen, setOpen] = useState(false);
  const [error, setError] = useState("");

  async function load() {
    setError("");
    try {
      const text = await (await call(`debug/trace?last=${STEPS}`)).text();
      const parsed = JSON.parse(text);
      setTrace({ ...tracksOf(parsed), text });
    } catch (problem) {
      setError(problem.message);
    }
  }
  const toggle = () => {
    setOpen(!isOpen);
    if (!isOpen) load();
  };
  const save = () => {
    const url = URL.createObjectURL(new Blob([trace.text], { type: "application/json" }));
    const link = document.createElement("a");
    link.href = url;
    link.download = "manta-trace.json";
    link.click();
    URL.revokeObjectURL(url);
  };
  return html`<section aria-labelledby="steps"><h2 id="steps">Steps</h2>
    <div class="buttons">
      <button type="button" aria-expanded=${isOpen} aria-controls="timeline" onClick=${toggle}>Timeline</button>
      ${isOpen && html`<button type="button" onClick=${load}>Read again</button>`}
      ${isOpen && trace && html`<button type="button" onClick=${save}>Save for Perfetto</button>`}
    </div>
    <div id="timeline">
      ${error && html`<p class="error" role="alert">${error}</p>`}
      ${isOpen && trace && trace.tracks.length === 0 && html`<p>There was no step yet.</p>`}
      ${isOpen && trace && trace.tracks.length > 0 && html`
        <p class="figures">The last steps of each engine, ${ms(trace.length)} ms in all.</p>
        <${Drawing} tracks=${trace.tracks} length=${trace.length} />
        <div class="scroll" tabindex="0" role="region" aria-label="Figures of the steps"><table>
          <thead><tr><th scope="col">Role</th><th scope="col">Spans</th><th scope="col">Mean, ms</th>
            <th scope="col">Busy</th></tr></thead>
          <tbody>${trace.tracks.map((t) => html`<tr><th scope="row">${t.name}</th><td>${t.spans.length}</td>
            <td>${ms(t.mean)}</td><td>${Math.round(100 * t.busy)} %</td></tr>`)}</tbody>
        </table></div>`}
    </div>
  </section>`;
}
