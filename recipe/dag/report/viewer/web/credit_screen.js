// Credit: what each agent was paid, and how much of the gradient that became.

import { html, useMemo } from "./html.js";
import { agentColor } from "./color.js";
import { counted, number, percent, signed } from "./format.js";
import { whereOf } from "./group_screen.js";
import { Histogram } from "./histogram.js";
import { creditOf, kept } from "./model.js";
import { Steps } from "./run_screen.js";
import { visible } from "./text.js";
import { Link, Outcome, Signed } from "./ui.js";
import { go } from "./use_data.js";
/** @import { CallNumbers, Episode } from "./data.js" */
/** @import { AgentCredit, Model } from "./model.js" */
/** @import { Route } from "./route.js" */

/** Episodes that are listed for an agent. */
const LISTED = 6;

/** @param {{model: Model, route: Route}} props */
export function CreditScreen({ model, route }) {
  const step = route.step ?? model.lastStep;
  const episodes = useMemo(() => model.at(step), [model, step]);
  const rows = useMemo(() => creditOf(episodes, model.agents), [episodes]);
  const steps = [...new Set(model.episodes.filter((one) => one.split === "train").map((one) => one.step))];
  return html`<h1>Credit <small>step ${step}, ${counted(episodes.length, "recorded episode")} of training</small></h1>
    <${Steps} steps=${steps} step=${step}
      choose=${(/** @type {number} */ chosen) => go({ screen: "credit", step: chosen })} />
    <div class="scroll"><table class="credit"><thead><tr><th>agent</th><th>calls</th><th>mean reward</th>
      <th title="share of its groups whose rewards differ; the others teach nothing">groups with signal</th>
      <th title="mean of the advantages' absolute values">|advantage|</th>
      <th title="share of the sum of tokens times |advantage| in its policy">gradient mass</th>
      <th title="how far its advantages are higher in solved episodes: 1 if all are, 0 if they are alike">
        agrees with the outcome</th>
      <th>advantages</th></tr></thead>
      <tbody>${rows.filter((row) => row.calls > 0).map((row) => html`<${AgentRow} key=${row.agent} row=${row}
        agents=${model.agents} />`)}</tbody></table></div>
    ${rows.map((row) => html`<${Carriers} key=${row.agent} agent=${row.agent} episodes=${episodes}
      agents=${model.agents} />`)}`;
}

/** @param {{row: AgentCredit, agents: string[]}} props */
function AgentRow({ row, agents }) {
  const positive = row.advantages.length
    ? row.advantages.filter((value) => value > 0).length / row.advantages.length
    : null;
  const label = positive === null ? "" : `${percent(positive)} above 0`;
  return html`<tr>
    <th style=${{ color: agentColor(agents, row.agent) }}>${visible(row.agent)}</th>
    <td>${row.calls}</td><td>${signed(row.reward)}</td><td>${percent(row.signal)}</td><td>${number(row.size)}</td>
    <td>${percent(row.mass)}</td><td>${signed(row.agreement)}</td>
    <td><${Histogram} values=${row.advantages} bins=${20} label=${label} /></td>
  </tr>`;
}

/** @param {{agent: string, episodes: Episode[], agents: string[]}} props */
function Carriers({ agent, episodes, agents }) {
  const calls = episodes.flatMap((episode) =>
    kept(episode).flatMap((call, at) => (call.agent === agent && call.advantage ? [{ episode, call, at }] : [])),
  );
  const weight = (/** @type {{call: CallNumbers}} */ { call }) => call.tokens * Math.abs(call.advantage ?? 0);
  const largest = calls.sort((a, b) => weight(b) - weight(a)).slice(0, LISTED);
  if (largest.length === 0) {
    return null;
  }
  const most = Math.max(...largest.map(({ call }) => Math.abs(call.advantage ?? 0)));
  return html`<section>
    <h2 style=${{ color: agentColor(agents, agent) }}>${visible(agent)}: the calls with most weight</h2>
    <ul class="carriers">${largest.map(
      ({ episode, call, at }) => html`<li key=${`${episode.uid}/${episode.index}/${at}`}>
        <${Link} to=${{ ...whereOf(episode), screen: "episode", call: at }}>
          ${visible(`${episode.uid}, episode ${episode.index}`)}<//>
        <${Signed} value=${call.advantage} most=${most} title="advantage" />
        <span>${counted(call.tokens, "token")}, reward ${signed(call.reward)}</span>
        <${Outcome} episode=${episode} />
      </li>`,
    )}</ul></section>`;
}
