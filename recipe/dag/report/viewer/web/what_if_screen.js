// What if: recorded episodes played again with one change, beside the record.

import { html, useMemo, useState } from "./html.js";
import { agentColor } from "./color.js";
import { counted, number, signed } from "./format.js";
import { whereOf } from "./group_screen.js";
import { nameOf, saidIn, SideBySide } from "./side_by_side.js";
import { mean } from "./statistics.js";
import { excerpt, visible } from "./text.js";
import { Choice, Link, LongText, Outcome, Signed, Waiting } from "./ui.js";
import { useContinuations, useDetail } from "./use_data.js";
/** @import { Effect, SlotName } from "./data.js" */
/** @import { Model } from "./model.js" */
/** @import { Route } from "./route.js" */

/** @typedef {{effect: Effect, at: number}} Numbered  an effect, and its place among those of the page */

/** @param {{model: Model, route: Route}} props */
export function WhatIfScreen({ model, route }) {
  const effects = model.effects;
  const chosen = route.call === null ? undefined : effects[route.call];
  const tables = useMemo(() => tablesOf(effects), [effects]);
  const most = Math.max(...effects.map((effect) => Math.abs(effect.interval?.[0] ?? 0)), 1e-9);
  if (effects.length === 0) {
    return html`<p class="empty">No episode was played again. verl-dag replay RUN -o FILE.html does it.</p>`;
  }
  return html`<h1>What if <small>recorded episodes, played again with one change</small></h1>
    <p class="hint">Mean outcome without → with the change, and the difference with its 95 % bootstrap interval.
      Continuations are compared in pairs with the same seeds. The calls before keep their words, and so do those that
      cannot react.</p>
    ${tables.map((table) => html`<${EffectTable} key=${table.title} table=${table} model=${model} most=${most}
      chosen=${route.call} />`)}
    ${chosen !== undefined && html`<${Detail} key=${route.call} effect=${chosen} at=${route.call} model=${model} />`}`;
}

/** @typedef {{title: string, problem: string, steps: number[], rows: {name: SlotName, agent: string,
 *   cells: Map<number, Numbered>}[]}} Table */

/**
 * The effects of one change on one problem: calls by steps.
 * @param {Effect[]} effects
 * @returns {Table[]}
 */
function tablesOf(effects) {
  /** @type {Map<string, Table>} */
  const tables = new Map();
  effects.forEach((effect, at) => {
    const { change, split, uid, index } = effect;
    const did = whatOf(effect, change.kind === "swap" || change.agent !== "");
    const title = `${did}: ${uid}, number ${index} of its group, ${split}`;
    const table = tables.get(title) ?? { title, problem: uid, steps: [], rows: [] };
    tables.set(title, table);
    if (!table.steps.includes(effect.step)) {
      table.steps.push(effect.step);
    }
    let row = table.rows.find((one) => nameOf(one.name) === nameOf(effect.at));
    if (row === undefined) {
      row = { name: effect.at, agent: effect.agent, cells: new Map() };
      table.rows.push(row);
    }
    row.cells.set(effect.step, { effect, at });
  });
  return [...tables.values()];
}

/** @param {{table: Table, model: Model, most: number, chosen: number | null}} props */
function EffectTable({ table, model, most, chosen }) {
  const any = [...table.rows[0].cells.values()][0].effect;
  const episode = model.episodeAt(any);
  const problem = episode && model.index.problems[episode.problem].text;
  return html`<section><h2>${visible(table.title)}</h2>
    ${problem && html`<${LongText} label="problem" text=${problem} />`}
    <div class="scroll"><table class="siblings effects"><thead><tr><th>call</th>
      ${table.steps.map((step) => html`<${StepHead} key=${step} step=${step} table=${table} model=${model} />`)}
      </tr></thead>
      <tbody>${table.rows.map(
        (row) => html`<tr key=${nameOf(row.name)}>
          <th style=${{ color: agentColor(model.agents, row.agent) }}>${visible(nameOf(row.name))}</th>
          ${table.steps.map((step) => html`<${Cell} key=${step} cell=${row.cells.get(step)} most=${most}
            chosen=${chosen} />`)}
        </tr>`,
      )}</tbody></table></div></section>`;
}

/** @param {{step: number, table: Table, model: Model}} props */
function StepHead({ step, table, model }) {
  const { effect } = [...table.rows.flatMap((row) => row.cells.get(step) ?? [])][0];
  const episode = model.episodeAt(effect);
  return html`<th>step ${step}
    ${episode && html` <${Link} to=${{ screen: "episode", ...whereOf(episode) }}>record<//>
      <${Outcome} episode=${episode} />`}</th>`;
}

/** @param {{cell: Numbered | undefined, most: number, chosen: number | null}} props */
function Cell({ cell, most, chosen }) {
  if (cell === undefined) {
    return html`<td class="none">–</td>`;
  }
  const { effect, at } = cell;
  const { interval } = effect;
  const count = counted(effect.after.length, "continuation");
  return html`<td data-effect=${at}><${Link} to=${routeOf(effect, at)} current=${at === chosen} title=${count}>
      ${number(meanOf(effect.before))} → ${number(meanOf(effect.after))}<//>
    ${interval && html` <${Signed} value=${interval[0]} most=${most} title="with the change, minus without it" />
      <small>${signed(interval[1])} to ${signed(interval[2])}</small>`}
    ${effect.change.kind !== "none" && html`<small class="parts">${
      effect.first === null ? "nobody answers otherwise" : `then another answer: ${visible(nameOf(effect.first))}`
    }</small>`}</td>`;
}

/** @param {{effect: Effect, at: number, model: Model}} props */
function Detail({ effect, at, model }) {
  const [draw, setDraw] = useState(0);
  const continuations = useContinuations(model);
  const episode = model.episodeAt(effect);
  const loaded = useDetail(episode);
  const options = effect.after.map((_, number) => String(number + 1));
  const noted =
    effect.repeats === (effect.change.kind === "none")
      ? effect.repeats && "The first continuation is the record, token by token."
      : !effect.repeats && "Without the change, the same seeds do not repeat the record: weights or servers differ.";
  const note = (/** @type {string} */ name, /** @type {(string | undefined)[]} */ [before, after]) =>
    name === nameOf(effect.at) ? "the fork" : before === after ? "the same" : "";
  return html`<section aria-label="continuation">
    <h2>${visible(`${whatOf(effect, true)}, step ${effect.step}, weights ${effect.weights}`)}</h2>
    <${Choice} label="continuation" options=${options} value=${String(draw + 1)}
      choose=${(/** @type {string} */ option) => setDraw(Number(option) - 1)} />
    <span>${`outcome ${number(effect.after[draw])}`}${
      effect.change.kind === "none" ? "" : `, without the change ${number(effect.before[draw])}`
    }, recorded ${number(effect.recorded)}</span>
    ${noted && html`<p class="hint">${noted}</p>`}
    ${
      continuations === null || (episode !== undefined && loaded === null)
        ? html`<${Waiting} what="the continuation" />`
        : html`<${SideBySide} heads=${["record", "with the change"]} agents=${model.agents} note=${note}
            columns=${[saidIn(loaded?.detail), continuations[at][draw]]} />`
    }</section>`;
}

/**
 * @param {Effect} effect
 * @param {boolean} named  name the agent
 */
function whatOf(effect, named) {
  const { kind, agent, text } = effect.change;
  const who = named ? agent || nameOf(effect.at) : "the call";
  const words = { none: "sampled again", silence: "silent", say: `says “${excerpt(text, 60)}”`, swap: `played by ${text}` };
  return `${who} ${words[kind]}`;
}

/**
 * @param {Effect} effect
 * @param {number} at
 */
export function routeOf(effect, at) {
  const { step, split, uid, index } = effect;
  return { screen: "what-if", step, split, uid, index, call: at };
}

/** @param {(number | null)[]} values */
const meanOf = (values) => mean(values.filter((value) => value !== null));
