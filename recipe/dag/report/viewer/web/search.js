// Search in the texts of all episodes, and help: the two overlays.

import { html, useEffect, useRef, useState } from "./html.js";
import { loadDetail } from "./data.js";
import { whereOf } from "./group_screen.js";
import { KEYS } from "./keys.js";
import { excerpt, visible } from "./text.js";
import { Link } from "./ui.js";
/** @import { Episode } from "./data.js" */
/** @import { Model } from "./model.js" */

const MOST = 60;

/** @param {{model: Model, close: () => void}} props */
export function Search({ model, close }) {
  const [query, setQuery] = useState("");
  const [found, setFound] = useState(/** @type {Hit[]} */ ([]));
  const [state, setState] = useState("");
  const input = useRef(/** @type {HTMLInputElement | null} */ (null));
  useEffect(() => input.current?.focus(), []);
  useEffect(() => {
    let wanted = true;
    setFound([]);
    if (query.length < 2) {
      setState("Two characters or more: in problems, prompts, answers, tools' results, faults and uids.");
      return undefined;
    }
    const timer = setTimeout(async () => {
      setState("Searching ...");
      const hits = await search(model, query.toLowerCase(), () => wanted).catch(() => null);
      if (wanted && hits === null) {
        setState("The record has changed; open the search again.");
      } else if (wanted && hits !== null) {
        setFound(hits);
        setState(hits.length >= MOST ? `The first ${MOST}:` : `${hits.length} found`);
      }
    }, 200);
    return () => {
      wanted = false;
      clearTimeout(timer);
    };
  }, [query]);
  return html`<${Overlay} label="search" close=${close}>
    <input ref=${input} type="search" aria-label="search" placeholder="search all episodes" value=${query}
      onInput=${(/** @type {any} */ event) => setQuery(event.target.value)} />
    <p class="hint" role="status">${state}</p>
    <ul class="hits">${found.map(
      (hit) => html`<li key=${hit.key}>
        <${Link} to=${hit.to} onClick=${close}>${hit.title}<//><span>${hit.text}</span></li>`,
    )}</ul>
  <//>`;
}

/** @typedef {{key: string, to: any, title: string, text: string}} Hit */

/**
 * @param {Model} model
 * @param {string} query
 * @param {() => boolean} wanted
 * @returns {Promise<Hit[]>}
 */
async function search(model, query, wanted) {
  /** @type {Hit[]} */
  const hits = [];
  for (const episode of [...model.episodes].reverse()) {
    const { detail } = await loadDetail(episode);
    if (!wanted() || hits.length >= MOST) {
      break;
    }
    const problem = model.index.problems[episode.problem].text;
    const about = `${episode.uid} ${problem} ${detail.fault?.message ?? ""}`;
    add(hits, query, about, episode, null, "problem");
    detail.calls.forEach((call, at) => {
      const tools = call.tool_results
        .map((/** @type {any} */ tool) => `${tool.arguments?.code ?? ""}\n${tool.text}`)
        .join("\n");
      add(hits, query, `${call.completion ?? ""}\n${call.text}\n${tools}`, episode, at, call.node);
    });
  }
  return hits.slice(0, MOST);
}

/**
 * @param {Hit[]} hits
 * @param {string} query
 * @param {string} text
 * @param {Episode} episode
 * @param {number | null} call
 * @param {string} where
 */
function add(hits, query, text, episode, call, where) {
  const at = text.toLowerCase().indexOf(query);
  if (at >= 0) {
    const { step, split, uid, index } = episode;
    hits.push({
      key: `${step}/${split}/${uid}/${index}/${call}`,
      to: { screen: "episode", ...whereOf(episode), call },
      title: visible(`step ${step} ${split} ${uid}/${index} ${where}`),
      text: excerpt(text.slice(Math.max(0, at - 30), at + 120), 120),
    });
  }
}

/** @param {{close: () => void}} props */
export function Help({ close }) {
  return html`<${Overlay} label="help" close=${close}><h2>Keys</h2>
    <table><tbody>${KEYS.map(([keys, does]) => html`<tr key=${keys}><th><kbd>${keys}</kbd></th><td>${does}</td></tr>`)}
      </tbody></table>
    <p class="hint">The address names the call that is open: it opens there again. Nothing leaves this page.</p>
    <details><summary>Licences of what the page contains</summary><pre>
      ${document.getElementById("licences")?.textContent}</pre></details>
  <//>`;
}

/** @param {{label: string, close: () => void, children?: any}} props */
function Overlay({ label, close, children }) {
  return html`<div class="shade" onClick=${close}><div class="overlay" role="dialog" aria-modal="true"
    aria-label=${label}
    onClick=${(/** @type {Event} */ event) => event.stopPropagation()}>
    <button class="close" aria-label="close" onClick=${close}>×</button>${children}</div></div>`;
}
