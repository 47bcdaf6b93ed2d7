// An episode on a time axis: a lane per agent, a cell per call, and its tools within.

import { html } from "./html.js";
import { agentColor } from "./color.js";
import { counted, seconds, signed } from "./format.js";
import { visible } from "./text.js";
/** @import { CallNumbers, Episode, ToolNumbers } from "./data.js" */

/**
 * @param {{episode: Episode, agents: string[], chosen: number | null, choose: (position: number) => void}} props
 */
export function Lanes({ episode, agents, chosen, choose }) {
  const whole = episode.calls.reduce((end, call) => Math.max(end, call.start + call.seconds), 1e-9);
  const present = agents.filter((agent) => episode.calls.some((call) => call.agent === agent));
  const ticks = [0, 0.25, 0.5, 0.75, 1];
  return html`<div class="lanes" role="group" aria-label="calls over time">
    ${present.map(
      (agent) => html`<div key=${agent} class="lane">
        <span class="who" style=${{ color: agentColor(agents, agent) }}>${visible(agent)}</span>
        <div class="track" style=${{ "--agent": agentColor(agents, agent) }}>
          ${episode.calls.map(
            (call, at) =>
              call.agent === agent &&
              html`<${Cell} key=${at} call=${call} at=${at} whole=${whole} chosen=${at === chosen} choose=${choose} />`,
          )}
        </div>
      </div>`,
    )}
    <div class="lane axis"><span class="who"></span><div class="track">
      ${ticks.map((part) => html`<span key=${part} style=${{ left: across(part) }}>${seconds(part * whole)}</span>`)}
    </div></div>
  </div>`;
}

/**
 * @param {{call: CallNumbers, at: number, whole: number, chosen: boolean, choose: (position: number) => void}} props
 */
function Cell({ call, at, whole, chosen, choose }) {
  const kinds = ["cell", chosen && "chosen", call.dropped && "dropped", call.done && "done"].filter(Boolean).join(" ");
  const tools = (call.tools ?? []).filter((tool) => typeof tool.start_seconds === "number" && call.seconds > 0);
  return html`<button class=${kinds} aria-pressed=${chosen} title=${describe(call)} onClick=${() => choose(at)}
      aria-label=${`call ${at}, ${call.node}, from ${seconds(call.start)} for ${seconds(call.seconds)}`}
      style=${{ left: across(call.start / whole), width: across(call.seconds / whole) }}>
    ${tools.map((tool, place) => html`<${ToolMark} key=${place} tool=${tool} call=${call} />`)}
  </button>`;
}

/** @param {{tool: ToolNumbers, call: CallNumbers}} props */
function ToolMark({ tool, call }) {
  const start = ((tool.start_seconds ?? 0) - call.start) / call.seconds;
  const length = (tool.seconds + (tool.waited ?? 0)) / call.seconds;
  const title = visible(`${tool.name}: ${tool.status}, ${seconds(tool.seconds)}`);
  const style = { left: across(start), width: across(length) };
  return html`<span class=${`tool ${tool.status}`} title=${title} style=${style}></span>`;
}

/** @param {number} part */
const across = (part) => `${100 * part}%`;

/** @param {CallNumbers} call */
export function describe(call) {
  const where = `${call.node}${call.turn ? `, turn ${call.turn}` : ""}${call.round ? `, round ${call.round}` : ""}`;
  const tools = call.tools?.length ? `, ${counted(call.tools.length, "tool call")}` : "";
  const credit = `reward ${signed(call.reward)}, advantage ${signed(call.advantage)}`;
  return visible(`${where}: ${credit}, ${counted(call.tokens, "token")}, ${seconds(call.seconds)}${tools}`);
}
