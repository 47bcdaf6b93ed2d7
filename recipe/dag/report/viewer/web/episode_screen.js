// One episode: lanes over time, and each call, which opens to its prompt, answer, tools and rewards.

import { html, useEffect, useRef } from "./html.js";
import { CallDetailView } from "./call_detail.js";
import { agentColor } from "./color.js";
import { number, seconds, signed } from "./format.js";
import { whereOf } from "./group_screen.js";
import { describe, Lanes } from "./lanes.js";
import { rewardOf } from "./model.js";
import { excerpt, visible } from "./text.js";
import { Link, LongText, Outcome, Signed, Waiting } from "./ui.js";
import { go, useDetail, useVocabularies } from "./use_data.js";
/** @import { CallNumbers, Episode, EpisodeDetail } from "./data.js" */
/** @import { Model } from "./model.js" */
/** @import { Route } from "./route.js" */

/** @param {{model: Model, route: Route}} props */
export function EpisodeScreen({ model, route }) {
  const episode = model.episodeAt(route);
  const loaded = useDetail(episode);
  const vocabularies = useVocabularies();
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    place.current?.querySelector("[data-chosen] .call-head")?.scrollIntoView({ block: "nearest" });
  }, [route.call, loaded === null]);
  if (episode === undefined) {
    return html`<p class="empty">No such episode. <${Link} to=${{ screen: "problems" }}>All problems<//></p>`;
  }
  const choose = (/** @type {number} */ call) => go({ ...route, call: route.call === call ? null : call });
  const most = Math.max(...episode.calls.map((call) => Math.abs(call.advantage ?? 0)), 1e-9);
  return html`<h1>Episode <small>${visible(episode.uid)}, number ${episode.index} of its group, step ${episode.step}, ${episode.split}</small></h1>
    <${Facts} model=${model} episode=${episode} detail=${loaded?.detail ?? null} />
    <${Lanes} episode=${episode} agents=${model.agents} chosen=${route.call} choose=${choose} />
    <${RewardFlow} episode=${episode} agents=${model.agents} />
    <section ref=${place}><h2>Calls</h2>
    ${episode.calls.map(
      (call, at) => html`<article key=${at} id=${`call-${at}`} class=${call.dropped ? "call dropped" : "call"}
        data-call=${at} data-chosen=${route.call === at ? "" : undefined} style=${{ borderColor: agentColor(model.agents, call.agent) }}>
      <button class="call-head" aria-expanded=${route.call === at} title=${describe(call)} onClick=${() => choose(at)}>
        <b>${visible(call.node)}</b>${call.agent !== call.node && html` <span>${visible(call.agent)}</span>`}${" "}
        <span>${[call.turn && `turn ${call.turn}`, call.round && `round ${call.round}`, call.dropped && "not kept", call.done && "ended the episode"].filter(Boolean).join(", ")}</span>
        <span class="numbers"><span>reward ${signed(call.reward)}</span> <${Signed} value=${call.advantage} most=${most} title="advantage" />
          <span>${number(call.tokens, 0)} tokens</span> <span>${seconds(call.seconds)}</span>
          ${call.stop && call.stop !== "stop" && html`<span class="stop">${visible(call.stop)}</span>`}</span>
        ${route.call !== at && html`<span class="preview">${loaded === null ? "" : excerpt(String(loaded.detail.calls[at].completion || loaded.detail.calls[at].text), 140)}</span>`}
      </button>
      ${
        route.call === at &&
        (loaded === null
          ? html`<${Waiting} what="the call" />`
          : html`<${CallDetailView} call=${call} position=${at} episode=${episode} detail=${loaded.detail} prompts=${loaded.prompts} vocabularies=${vocabularies} route=${route} />`)
      }
    </article>`,
    )}
    ${episode.skips.map(([node, turn, round], at) => html`<p key=${at} class="hint">${visible(node)} was skipped in turn ${turn}${round ? `, round ${round}` : ""}</p>`)}
    </section>`;
}

/** @param {{model: Model, episode: Episode, detail: EpisodeDetail | null}} props */
function Facts({ model, episode, detail }) {
  const problem = model.index.problems[episode.problem];
  const facts = [
    ["total reward", signed(rewardOf(episode))],
    ["seconds", seconds(episode.seconds)],
    ["turns", episode.turns],
    ["ended by", episode.ended_by || "a fault"],
    ["attempts", episode.attempts > 1 ? episode.attempts : null],
    ["ground truth", problem.truth && excerpt(problem.truth, 300)],
    ["data", problem.source && excerpt(problem.source, 60)],
    ...Object.entries(detail?.info ?? {}).map(([name, value]) => [
      name,
      excerpt(typeof value === "number" ? number(value, 3) : String(value), 80),
    ]),
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  return html`<p><${Outcome} episode=${episode} /> <${Link} to=${{ screen: "group", ...whereOf(episode), index: 0 }}>its group<//></p>
    ${detail?.fault && html`<p class="alarms">${visible(`${detail.fault.boundary} fault in ${detail.fault.where}: ${detail.fault.message}`)}</p>`}
    <${LongText} label="problem" text=${problem.text} />
    <dl>${facts.map(([name, value]) => html`<div key=${name}><dt>${visible(String(name))}</dt><dd>${value}</dd></div>`)}</dl>`;
}

/**
 * Which node paid which call: the parts of the rewards, with the sum below.
 * @param {{episode: Episode, agents: string[]}} props
 */
function RewardFlow({ episode, agents }) {
  const payers = [...new Set(episode.calls.flatMap((call) => Object.keys(call.parts)))];
  const paid = episode.calls.flatMap((call, at) => (call.reward === null ? [] : [{ call, at }]));
  if (payers.length === 0 || paid.length === 0) {
    return null;
  }
  const most = Math.max(...paid.flatMap(({ call }) => Object.values(call.parts).map(Math.abs)), 1e-9);
  return html`<div class="scroll"><table class="rewards" aria-label="which node paid which call">
    <thead><tr><th>paid by ↓ to →</th>${paid.map(({ call, at }) => html`<th key=${at} style=${{ color: agentColor(agents, call.agent) }}>${nameOf(call)}</th>`)}</tr></thead>
    <tbody>${payers.map(
      (payer) => html`<tr key=${payer}><th>${visible(payer)}</th>
      ${paid.map(({ call, at }) => html`<td key=${at}>${call.parts[payer] === undefined ? "" : html`<${Signed} value=${call.parts[payer]} most=${most} />`}</td>`)}</tr>`,
    )}
      <tr class="total"><th>reward</th>${paid.map(({ call, at }) => html`<td key=${at}>${signed(call.reward)}</td>`)}</tr>
      <tr class="total"><th>advantage</th>${paid.map(({ call, at }) => html`<td key=${at}>${signed(call.advantage)}</td>`)}</tr></tbody>
  </table></div>`;
}

/** @param {CallNumbers} call */
const nameOf = (call) =>
  visible(`${call.node}${call.turn ? ` t${call.turn}` : ""}${call.round ? ` r${call.round}` : ""}`);
