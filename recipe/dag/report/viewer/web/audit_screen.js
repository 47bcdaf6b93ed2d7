// Audit: which rules fired, on which episodes, and what the reward paid for it.

import { html, useMemo } from "./html.js";
import { unearnedRewards } from "./alarms.js";
import { flagged, routeOfFlagged, rulesOf } from "./audit.js";
import { placeColor } from "./color.js";
import { Curves } from "./curves.js";
import { counted, percent, signed } from "./format.js";
import { isSolved } from "./model.js";
import { mean } from "./statistics.js";
import { excerpt, visible } from "./text.js";
import { Link, Outcome, Signed } from "./ui.js";
import { go } from "./use_data.js";
import { Windowed } from "./windowed.js";
/** @import { Fired, Flagged } from "./audit.js" */
/** @import { Episode } from "./data.js" */
/** @import { Model } from "./model.js" */
/** @import { Route } from "./route.js" */

const ROW = 26;

/** @param {{model: Model, route: Route}} props */
export function AuditScreen({ model, route }) {
  const rules = useMemo(() => rulesOf(model), [model]);
  const alarms = useMemo(() => unearnedRewards(model.index), [model]);
  const fired = rules.filter(({ rows, shares }) => rows.length > 0 || shares.some(Boolean));
  const rest = rules.filter((one) => !fired.includes(one)).map((one) => one.rule);
  return html`<h1>Audit <small>what the rules on hacks of the reward flagged in training</small></h1>
    ${alarms.length > 0 && html`<ul class="alarms">
      ${alarms.map((alarm) => html`<li key=${alarm}>${visible(alarm)}</li>`)}</ul>`}
    ${rules.length === 0 && html`<p class="empty">No rule has looked at an episode of training.
      <code>report.monitors=all</code>, which is the default, turns the rules on.</p>`}
    ${rest.length > 0 && html`<p class=${fired.length ? "hint" : "empty"}>${visible(
      `${fired.length ? "Did not fire" : "No rule fired. These looked"}: ${rest.join(", ")}`,
    )}</p>`}
    ${fired.length > 0 && html`<${Fired} model=${model} route=${route} fired=${fired} />`}`;
}

/** @param {{model: Model, route: Route, fired: Fired[]}} props */
function Fired({ model, route, fired }) {
  const rule = route.column;
  const rows = useMemo(() => flagged(model, rule), [model, rule]);
  const { steps } = model.index.metrics;
  const curves = fired
    .filter((one) => one.shares.length > 0)
    .map((one, place) => ({ label: visible(one.rule), values: one.shares, color: placeColor(place) }));
  const chosen = model.episodeAt(route);
  const choose = (/** @type {number} */ step) => {
    const first = rows.find((row) => row.episode.step === step);
    if (first !== undefined) {
      go(routeOfFlagged(first, { screen: "audit", column: rule }));
    }
  };
  return html`<div class="scroll"><table class="rules"><thead><tr><th>rule</th><th>episodes</th>
      <th>difference</th><th title="sum over the calls of the agents that it flags">paid</th>
      <th title="the same agents, in the siblings that it does not flag">others</th><th>solved</th></tr></thead><tbody>
      ${fired.map((one) => html`<${RuleRow} key=${one.rule} rule=${one.rule} rows=${one.rows} current=${rule} />`)}
      ${fired.length > 1 && html`<${RuleRow} rule="" rows=${flagged(model, "")} current=${rule} />`}
    </tbody></table></div>
    ${curves.length > 0 && html`<div class="grid"><${Curves} title="Flagged share of the episodes" steps=${steps}
      curves=${curves} at=${chosen?.step ?? steps.at(-1)} choose=${choose} /></div>`}
    <${Episodes} rows=${rows} rule=${rule} chosen=${chosen} />`;
}

/** @param {{rule: string, rows: Flagged[], current: string}} props */
function RuleRow({ rule, rows, current }) {
  const graded = rows.filter(({ episode }) => episode.outcome !== null);
  const solved = graded.filter(({ episode }) => isSolved(episode)).length;
  const middle = (/** @type {"paid" | "others" | "gain"} */ name) => mean(rows.flatMap((row) => row[name] ?? []));
  return html`<tr>
    <th><${Link} to=${{ screen: "audit", column: rule }} current=${rule === current}>
      ${visible(rule || "any rule")}<//></th>
    <td>${rows.length}</td><td><${Signed} value=${middle("gain")} most=${1} /></td><td>${signed(middle("paid"))}</td>
    <td>${signed(middle("others"))}</td><td>${graded.length ? percent(solved / graded.length) : "–"}</td></tr>`;
}

/** @param {{rows: Flagged[], rule: string, chosen: Episode | undefined}} props */
function Episodes({ rows, rule, chosen }) {
  const style = { gridTemplateColumns: "minmax(8rem, 14rem) 5rem 4rem 4rem 7rem minmax(22rem, 1fr)" };
  const most = rows.reduce((largest, row) => Math.max(largest, Math.abs(row.gain ?? 0)), 1e-9);
  const head = html`<div class="row head" style=${style}><span>step, episode</span><span>difference</span>
    <span>paid</span><span>others</span><span>outcome</span><span class="reason">rule</span></div>`;
  const row = (/** @type {Flagged} */ one) => {
    const { episode, flags, paid, others, gain } = one;
    const said = flags.map(({ rule, reason }) => `${rule}: ${reason}`).join("; ");
    return html`<div class="row" key=${keyOf(one)} style=${{ ...style, height: `${ROW}px` }}>
      <${Link} class="problem" current=${episode === chosen} to=${routeOfFlagged(one, { screen: "episode" })}>
        ${visible(`${episode.step}, ${episode.uid} number ${episode.index}`)}<//>
      <span><${Signed} value=${gain} most=${most} /></span><span>${signed(paid)}</span><span>${signed(others)}</span>
      <span><${Outcome} episode=${episode} /></span>
      <span class="reason" title=${excerpt(said, 600)}>${excerpt(said, 200)}</span></div>`;
  };
  return html`<section class="compared">
    <h2>${counted(rows.length, "recorded episode")}${rule && ` of ${visible(rule)}`}</h2>
    <p class="hint">The reward of the flagged agents against their mean in the siblings that are not flagged; the largest
      differences first. j and k choose, Enter or a click opens one.</p>
    <div class="matrix"><${Windowed} items=${rows} height=${ROW} head=${head} row=${row} keyOf=${keyOf}
      chosen=${chosen && keyOf({ episode: chosen })} label="flagged episodes" /></div></section>`;
}

/** @param {{episode: Episode}} row */
const keyOf = ({ episode: { step, split, uid, index } }) => [step, split, uid, index].join("/");
