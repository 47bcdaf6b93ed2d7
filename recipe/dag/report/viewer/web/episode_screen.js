// One episode: lanes over time, and each call, which opens to its prompt, answer, tools and rewards.

import { html, useEffect, useRef } from "./html.js";
import { CallDetailView } from "./call_detail.js";
import { agentColor } from "./color.js";
import { counted, number, seconds, signed } from "./format.js";
import { textOf, whereOf } from "./group_screen.js";
import { describe, Lanes } from "./lanes.js";
import { aboveSiblings, rewardOf } from "./model.js";
import { excerpt, visible } from "./text.js";
import { Facts, Link, LongText, Outcome, Signed, Waiting } from "./ui.js";
import { go, useDetail, useVocabularies } from "./use_data.js";
/** @import { CallDetail, CallNumbers, Episode, EpisodeDetail } from "./data.js" */
/** @import { Model } from "./model.js" */
/** @import { Route } from "./route.js" */

/** @param {{model: Model, route: Route}} props */
export function EpisodeScreen({ model, route }) {
  const episode = model.episodeAt(route);
  const loaded = useDetail(episode);
  const vocabularies = useVocabularies(model);
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    place.current?.querySelector("[data-chosen] .call-head")?.scrollIntoView({ block: "nearest" });
  }, [route.call, loaded === null]);
  if (episode === undefined) {
    return html`<p class="empty">No such episode. <${Link} to=${{ screen: "problems" }}>All problems<//></p>`;
  }
  const choose = (/** @type {number} */ call) => go({ ...route, call: route.call === call ? null : call });
  const most = Math.max(...episode.calls.map((call) => Math.abs(call.advantage ?? 0)), 1e-9);
  const title = visible(`${episode.uid}, number ${episode.index} of its group, step ${episode.step}, ${episode.split}`);
  return html`<h1>Episode <small>${title}</small></h1>
    <${About} model=${model} episode=${episode} detail=${loaded?.detail ?? null} />
    <${Lanes} episode=${episode} agents=${model.agents} chosen=${route.call} choose=${choose} />
    <${RewardFlow} episode=${episode} group=${model.groupAt(route)} agents=${model.agents} />
    <section ref=${place}><h2>Calls</h2>
    ${episode.calls.map(
      (call, at) => html`<article key=${at} id=${`call-${at}`} class=${call.dropped ? "call dropped" : "call"}
          data-call=${at} data-chosen=${route.call === at ? "" : undefined}
          style=${{ borderColor: agentColor(model.agents, call.agent) }}>
        <${Head} call=${call} most=${most} open=${route.call === at} toggle=${() => choose(at)}
          detail=${loaded?.detail.calls[at]} />
        ${route.call === at && loaded === null && html`<${Waiting} what="the call" />`}
        ${route.call === at && loaded !== null && html`<${CallDetailView} call=${call} position=${at} route=${route}
          episode=${episode} detail=${loaded.detail} prompts=${loaded.prompts} vocabularies=${vocabularies} />`}
      </article>`,
    )}
    ${episode.skips.map(
      (skip, at) => html`<p key=${at} class="hint">${visible(`${skip[0]} was skipped${placeOf(skip)}`)}</p>`,
    )}
    </section>`;
}

/**
 * The line of a call, which opens it.
 * @param {{call: CallNumbers, most: number, open: boolean, toggle: () => void, detail: CallDetail | undefined}} props
 */
function Head({ call, most, open, toggle, detail }) {
  const state = [
    call.turn && `turn ${call.turn}`,
    call.round && `round ${call.round}`,
    call.dropped && "not kept",
    call.replayed && "repeated",
    call.done && "ended the episode",
  ];
  return html`<button class="call-head" aria-expanded=${open} title=${describe(call)} onClick=${toggle}>
    <b>${visible(call.node)}</b> ${" "}${call.agent !== call.node && visible(call.agent)}
    ${" "}<span>${state.filter(Boolean).join(", ")}</span>
    <span class="numbers">
      <span>reward ${signed(call.reward)}</span>
      <${Signed} value=${call.advantage} most=${most} title="advantage" />
      <span>${counted(call.tokens, "token")}</span>
      <span>${seconds(call.seconds)}</span>
      ${call.stop && call.stop !== "stop" && html`<span class="stop">${visible(call.stop)}</span>`}
    </span>
    ${!open && detail !== undefined && html`<span class="preview">${excerpt(textOf(detail), 140)}</span>`}
  </button>`;
}

/** @param {[string, number, number]} skip */
const placeOf = ([, turn, round]) => `${turn ? ` in turn ${turn}` : ""}${round ? `, round ${round}` : ""}`;

/** @param {{model: Model, episode: Episode, detail: EpisodeDetail | null}} props */
function About({ model, episode, detail }) {
  const problem = model.index.problems[episode.problem];
  const fault = detail?.fault;
  /** @type {[string, any][]} */
  const facts = [
    ["total reward", signed(rewardOf(episode))],
    ["seconds", seconds(episode.seconds)],
    ["turns", episode.turns],
    ["ended by", episode.ended_by || "a fault"],
    ["forked", episode.forked],
    ["attempts", episode.attempts > 1 && episode.attempts],
    ["ground truth", excerpt(problem.truth, 300)],
    ["data", excerpt(problem.source, 60)],
  ];
  for (const [name, value] of Object.entries(detail?.info ?? {})) {
    facts.push([name, typeof value === "number" ? number(value, 3) : excerpt(String(value), 80)]);
  }
  return html`<p>
      <${Outcome} episode=${episode} />
      <${Link} to=${{ screen: "group", ...whereOf(episode), index: 0 }}>its group<//>
    </p>
    ${fault && html`<p class="alarms">${visible(`${fault.boundary} fault in ${fault.where}: ${fault.message}`)}</p>`}
    ${episode.flags && html`<ul class="alarms">${episode.flags.map(({ rule, reason, call }, at) => {
      const node = call === null ? "" : `${episode.calls[call].node}: `;
      return html`<li key=${at}>${visible(`flagged ${rule}: ${node}${reason}`)}</li>`;
    })}</ul>`}
    <${LongText} label="problem" text=${problem.text} />
    <${Facts} facts=${facts} />`;
}

/**
 * Which node paid which call: the parts of the rewards, with the sum below.
 * @param {{episode: Episode, group: Episode[], agents: string[]}} props
 */
function RewardFlow({ episode, group, agents }) {
  const payers = [...new Set(episode.calls.flatMap((call) => Object.keys(call.parts)))];
  const paid = episode.calls.flatMap((call, at) => (call.reward === null ? [] : [{ call, at }]));
  if (payers.length === 0 || paid.length === 0) {
    return null;
  }
  const most = Math.max(...paid.flatMap(({ call }) => Object.values(call.parts).map(Math.abs)), 1e-9);
  /** @type {[string, (call: CallNumbers) => any][]} */
  const rows = [];
  for (const payer of payers) {
    rows.push([payer, (call) => call.parts[payer] !== undefined && html`<${Part} group=${group} call=${call}
      payer=${payer} most=${most} />`]);
  }
  rows.push(["sum", (call) => signed(call.reward)], ["advantage", (call) => signed(call.advantage)]);
  return html`<div class="scroll"><table class="rewards" aria-label="which node paid which call">
    <caption>Parts of the rewards; small: against the mean of the siblings.</caption>
    <thead><tr><th>paid by ↓ to →</th>
      ${paid.map(({ call, at }) => {
        const color = agentColor(agents, call.agent);
        return html`<th key=${at} style=${{ color }}>${nameOf(call)}</th>`;
      })}
    </tr></thead>
    <tbody>${rows.map(
      ([name, cell], row) => html`<tr key=${row} class=${row < payers.length ? "" : "total"}>
        <th>${visible(name)}</th>${paid.map(({ call, at }) => html`<td key=${at}>${cell(call)}</td>`)}
      </tr>`,
    )}</tbody>
  </table></div>`;
}

/** @param {{group: Episode[], call: CallNumbers, payer: string, most: number}} props */
function Part({ group, call, payer, most }) {
  const above = aboveSiblings(group, call, payer);
  return html`<${Signed} value=${call.parts[payer]} most=${most} />
    ${above !== null && html`<small title="against the mean of its siblings">${signed(above)}</small>`}`;
}

/** @param {CallNumbers} call */
const nameOf = (call) =>
  visible(`${call.node}${call.turn ? ` t${call.turn}` : ""}${call.round ? ` r${call.round}` : ""}`);
