// An episode on a time axis: a lane per agent, a cell per call, and its tools within.

import { html } from "./html.js";
import { agentColor } from "./color.js";
import { number, seconds, signed } from "./format.js";
/** @import { CallNumbers, Episode } from "./data.js" */

/**
 * @param {{episode: Episode, agents: string[], chosen: number | null, choose: (position: number) => void}} props
 */
export function Lanes({ episode, agents, chosen, choose }) {
  const whole = episode.calls.reduce((end, call) => Math.max(end, call.start + call.seconds), 1e-9);
  const present = agents.filter((agent) => episode.calls.some((call) => call.agent === agent));
  const left = (/** @type {number} */ at) => `${(100 * at) / whole}%`;
  return html`<div class="lanes" role="group" aria-label="calls over time">
    ${present.map(
      (agent) => html`<div key=${agent} class="lane">
      <span class="who" style=${{ color: agentColor(agents, agent) }}>${agent}</span>
      <div class="track">
        ${episode.calls.map(
          (call, at) =>
            call.agent === agent &&
            html`<button key=${at} class=${cellClass(call, at === chosen)}
            aria-label=${`call ${at}, ${call.node}, from ${seconds(call.start)} for ${seconds(call.seconds)}`}
            title=${describe(call)} aria-pressed=${at === chosen} onClick=${() => choose(at)}
            style=${{ left: left(call.start), width: left(call.seconds), borderColor: agentColor(agents, agent), "--agent": agentColor(agents, agent) }}>
          ${(call.tools ?? []).map(
            (tool, place) =>
              tool.start_seconds !== undefined &&
              tool.start_seconds !== null &&
              call.seconds > 0 &&
              html`<span key=${place}
            class=${`tool ${tool.status}`} title=${`${tool.name}: ${tool.status}, ${seconds(tool.seconds)}`}
            style=${{ left: `${(100 * (tool.start_seconds - call.start)) / call.seconds}%`, width: `${(100 * (tool.seconds + (tool.waited ?? 0))) / call.seconds}%` }}></span>`,
          )}
        </button>`,
        )}
      </div>
    </div>`,
    )}
    <div class="lane axis"><span class="who"></span><div class="track">
      ${[0, 0.25, 0.5, 0.75, 1].map((share) => html`<span key=${share} style=${{ left: `${100 * share}%` }}>${seconds(share * whole)}</span>`)}
    </div></div>
  </div>`;
}

/**
 * @param {CallNumbers} call
 * @param {boolean} chosen
 */
const cellClass = (call, chosen) =>
  ["cell", chosen && "chosen", call.dropped && "dropped", call.done && "done"].filter(Boolean).join(" ");

/** @param {CallNumbers} call */
export function describe(call) {
  const where = `${call.node}${call.turn ? `, turn ${call.turn}` : ""}${call.round ? `, round ${call.round}` : ""}`;
  const tools = call.tools?.length ? `, ${call.tools.length} tool calls` : "";
  return `${where}: reward ${signed(call.reward)}, advantage ${signed(call.advantage)}, ${number(call.tokens, 0)} tokens, ${seconds(call.seconds)}${tools}`;
}
