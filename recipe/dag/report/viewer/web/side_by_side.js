// The calls of several episodes beside each other: each text from where they differ on.

import { html } from "./html.js";
import { agentColor } from "./color.js";
import { excerpt, firstDifference, visible } from "./text.js";
/** @import { EpisodeDetail, SlotName } from "./data.js" */

/** @typedef {{node: string, agent: string, turn: number, round: number, text: string}} Said */

/**
 * @param {{heads: any[], columns: (Said[] | undefined)[], agents: string[],
 *   note: (name: string, texts: (string | undefined)[]) => string}} props  note: about a call
 */
export function SideBySide({ heads, columns, agents, note }) {
  /** @type {Map<string, {agent: string, texts: (string | undefined)[]}>} */
  const rows = new Map();
  columns.forEach((calls, at) => {
    for (const { node, agent, turn, round, text } of calls ?? []) {
      const name = nameOf([node, turn, round]);
      const row = rows.get(name) ?? { agent, texts: columns.map(() => undefined) };
      row.texts[at] = text;
      rows.set(name, row);
    }
  });
  return html`<div class="scroll"><table class="siblings"><thead><tr><th>call</th>
      ${heads.map((head, at) => html`<th key=${at}>${head}</th>`)}</tr></thead>
    <tbody>${[...rows].map(([name, { agent, texts }]) => {
      const said = texts.filter((text) => text !== undefined);
      const from = said.length > 1 ? firstDifference(said) : 0;
      const about = note(name, texts);
      return html`<tr key=${name}>
        <th style=${{ color: agentColor(agents, agent) }}>${visible(name)} ${about && html`<small>${about}</small>`}</th>
        ${texts.map((text, at) => html`<td key=${at} class=${text === undefined ? "none" : ""}>${
          text === undefined ? "not called" : html`<${Snippet} text=${text} from=${from} />`
        }</td>`)}</tr>`;
    })}</tbody></table></div>`;
}

/**
 * A text from where it differs on.
 * @param {{text: string, from: number}} props
 */
const Snippet = ({ text, from }) =>
  text === ""
    ? html`<span class="none">(silent)</span>`
    : html`<span class="snippet">${from > 0 ? "… " : ""}${excerpt(text.slice(from), 600) || "(ends here)"}</span>`;

/**
 * The calls of a record that were kept.
 * @param {EpisodeDetail | undefined} record
 * @returns {Said[] | undefined}
 */
export const saidIn = (record) =>
  record?.calls.slice(0, record.calls.length - (record.dropped ?? 0)).map((call) => ({
    node: call.node,
    agent: call.agent,
    turn: call.turn,
    round: call.round,
    text: String(call.completion || call.text || ""),
  }));

/** @param {SlotName} name */
export const nameOf = ([node, turn, round]) => `${node}${turn || round ? `.${turn}` : ""}${round ? `.${round}` : ""}`;
