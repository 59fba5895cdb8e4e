// The head of both pages: the way to the other one, and the key if the server asks for one.
import { html, useEffect, useState } from "./htm-preact.js";
import { asksForKey, saveKey, savedKey } from "./api.js";

export function Head({ page, onKey }) {
  const [key, setKey] = useState(savedKey());
  const [isAsked, setAsked] = useState(false);
  useEffect(() => void asksForKey().then(setAsked), []);
  const type = (event) => {
    setKey(event.target.value);
    saveKey(event.target.value);
    onKey?.();
  };
  const link = (name, text) =>
    html`<a href=${name} aria-current=${page === name ? "page" : null}>${text}</a>`;
  return html`<header>
    <p class="brand">Manta</p>
    <nav aria-label="Pages">${link("chat", "Chat")} ${link("status", "Status")}</nav>
    ${isAsked && html`<label class="key">API key
      <input type="password" autocomplete="off" spellcheck="false" value=${key} onInput=${type} />
    </label>`}
  </header>`;
}
