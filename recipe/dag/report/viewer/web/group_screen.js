// The siblings of one problem side by side: what separated the solved from the rest, and what each call was taught.

import { html } from "./html.js";
import { agentColor } from "./color.js";
import { number, signed } from "./format.js";
import { differences, kept, rewardOf } from "./model.js";
import { Steps } from "./run_screen.js";
import { excerpt, firstDifference, visible } from "./text.js";
import { Link, LongText, Outcome, Signed } from "./ui.js";
import { go, useDetails } from "./use_data.js";
/** @import { CallDetail, CallNumbers, Episode, EpisodeDetail } from "./data.js" */
/** @import { Model } from "./model.js" */
/** @import { Route } from "./route.js" */

/** @param {{model: Model, route: Route}} props */
export function GroupScreen({ model, route }) {
  const group = model.groupAt(route);
  const details = useDetails(group)?.flatMap((one) => one?.detail ?? []) ?? null;
  if (group.length === 0) {
    return html`<p class="empty">No such group. <${Link} to=${{ screen: "problems" }}>All problems<//></p>`;
  }
  const [first] = group;
  const problem = model.index.problems[first.problem];
  const history = model.history(first);
  const goTo = (/** @type {number} */ step) => {
    const other = history.find((one) => one[0].step === step)?.[0];
    go({ screen: "group", step, split: first.split, uid: other?.uid ?? first.uid });
  };
  return html`<h1>Group <small>${visible(first.uid)}, step ${first.step}, ${first.split}</small></h1>
    <${LongText} label="problem" text=${problem.text} />
    ${problem.truth && html`<p>ground truth <code>${excerpt(problem.truth, 400)}</code></p>`}
    <${Steps} steps=${history.map((one) => one[0].step)} step=${first.step} choose=${goTo} />
    <${Separators} group=${group} />
    <${Siblings} model=${model} group=${group} details=${details} />`;
}

/** @param {{group: Episode[]}} props */
function Separators({ group }) {
  const found = differences(group).slice(0, 8);
  if (found.length === 0) {
    return null;
  }
  const explained = "how far the solved are above the others: 1 or −1 if a threshold separates them";
  return html`<section><h2>What separated the solved from the rest</h2><div class="scroll"><table>
    <thead><tr><th>sum per episode</th><th>solved</th><th>others</th><th title=${explained}>effect</th></tr></thead>
    <tbody>${found.map(
      (one) => html`<tr key=${one.label}>
        <td>${visible(one.label)}</td><td>${number(one.solved)}</td><td>${number(one.rest)}</td>
        <td><${Signed} value=${one.effect} most=${1} /></td>
      </tr>`,
    )}</tbody></table></div></section>`;
}

/** @param {{model: Model, group: Episode[], details: EpisodeDetail[] | null}} props */
function Siblings({ model, group, details }) {
  const slots = slotsOf(group);
  const most = Math.max(...group.flatMap((one) => one.calls.map((call) => Math.abs(call.advantage ?? 0))), 1e-9);
  const differing = details && slots.find((slot) => textsAt(slot, details).some((text, _, texts) => text !== texts[0]));
  return html`<section><h2>Episodes side by side</h2>
    ${differing && html`<p class="hint">
      ${`The first call whose texts differ is ${visible(differing.label)}; texts begin where they differ.`}</p>`}
    <div class="scroll"><table class="siblings">
      <thead><tr><th>call</th>
        ${group.map((episode) => html`<${SiblingHead} key=${episode.index} episode=${episode} />`)}
        <th title="of the advantages">sum</th></tr></thead>
      <tbody>${slots.map(
        (slot) => html`<${SlotRow} key=${slot.label} slot=${slot} group=${group} details=${details} most=${most}
          agents=${model.agents} />`,
      )}</tbody>
    </table></div></section>`;
}

/** @param {{episode: Episode}} props */
function SiblingHead({ episode }) {
  return html`<th><${Link} to=${{ screen: "episode", ...whereOf(episode) }}>episode ${episode.index}<//>
    ${episode.forked && html`<small>${visible(episode.forked)}</small>`}
    <${Outcome} episode=${episode} />
    <span title="sum of its calls' rewards">${signed(rewardOf(episode))}</span></th>`;
}

/**
 * A call that the siblings have in common, and its position in each of them.
 * @typedef {{label: string, agent: string, positions: (number | null)[]}} Slot
 */

/** @param {{slot: Slot, group: Episode[], details: EpisodeDetail[] | null, most: number, agents: string[]}} props */
function SlotRow({ slot, group, details, most, agents }) {
  const from = details === null ? 0 : firstDifference(textsAt(slot, details));
  const advantages = group.flatMap((episode, at) => callAt(episode, slot.positions[at])?.advantage ?? []);
  return html`<tr><th style=${{ color: agentColor(agents, slot.agent) }}>${visible(slot.label)}</th>
    ${group.map((episode, at) => {
      const position = slot.positions[at];
      const call = callAt(episode, position);
      if (call === undefined || position === null) {
        return html`<td key=${episode.index} class="none">–</td>`;
      }
      const detail = details?.[at].calls[position];
      const text = detail && `${from > 0 ? "… " : ""}${excerpt(textOf(detail).slice(from), 160) || "(empty)"}`;
      const parts = Object.entries(call.parts).map(([payer, part]) => ` ${payer} ${signed(part)}`);
      const tools = (call.tools ?? []).map((tool) => `${tool.name} ${tool.status}`).join(", ");
      return html`<td key=${episode.index}>
        <${Signed} value=${call.advantage} most=${most} title="advantage" />
        <span class="parts">${visible(`${signed(call.reward)}${parts.join("")}`)}</span>
        <${Link} class="snippet" to=${{ screen: "episode", ...whereOf(episode), call: position }}>${text ?? "…"}<//>
        ${tools && html`<small>${visible(tools)}</small>`}</td>`;
    })}
    <td>${advantages.length ? signed(advantages.reduce((a, b) => a + b, 0)) : "–"}</td></tr>`;
}

/**
 * The calls that the siblings have in common: same node, turn and round.
 * @param {Episode[]} group
 * @returns {Slot[]}
 */
function slotsOf(group) {
  /** @type {Map<string, Slot>} */
  const slots = new Map();
  group.forEach((episode, at) => {
    kept(episode).forEach((call, position) => {
      const label = `${call.node}${call.turn ? ` turn ${call.turn}` : ""}${call.round ? ` round ${call.round}` : ""}`;
      const slot = slots.get(label) ?? { label, agent: call.agent, positions: group.map(() => null) };
      slot.positions[at] = position;
      slots.set(label, slot);
    });
  });
  return [...slots.values()];
}

/**
 * @param {Slot} slot
 * @param {EpisodeDetail[]} details
 */
const textsAt = (slot, details) =>
  slot.positions.flatMap((position, at) => (position === null ? [] : [textOf(details[at].calls[position])]));

/** @param {CallDetail} detail */
export const textOf = (detail) => String(detail.completion || detail.text || "");

/**
 * @param {Episode} episode
 * @param {number | null} position
 * @returns {CallNumbers | undefined}
 */
const callAt = (episode, position) => (position === null ? undefined : episode.calls[position]);

/** @param {Episode} episode */
export const whereOf = ({ run, step, split, uid, index }) => ({ run, step, split, uid, index });
