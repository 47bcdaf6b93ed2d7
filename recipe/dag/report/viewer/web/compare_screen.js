// Two to four runs at equal numbers of sampled tokens: curves, and the same problems in each.

import { html, useMemo, useState } from "./html.js";
import { placeColor } from "./color.js";
import { curvesOf, nameOfRun, shared } from "./compare.js";
import { Curves } from "./curves.js";
import { count, percent } from "./format.js";
import { whereOf } from "./group_screen.js";
import { cellOf } from "./model.js";
import { CellView } from "./problems_screen.js";
import { intervalOf, MetricName } from "./run_screen.js";
import { saidIn, SideBySide } from "./side_by_side.js";
import { excerpt, visible } from "./text.js";
import { Choice, Link, LongText, Outcome, Waiting } from "./ui.js";
import { go, useDetails } from "./use_data.js";
import { Windowed } from "./windowed.js";
/** @import { Axis, Shared, SharedProblem } from "./compare.js" */
/** @import { Episode } from "./data.js" */
/** @import { Model } from "./model.js" */
/** @import { Route } from "./route.js" */

const ROW = 26;
/** Places of the slider. */
const SLIDER = 200;

/** @param {{models: Model[], route: Route}} props */
export function CompareScreen({ models, route }) {
  const known = useMemo(() => shared(models, route), [models, route.step, route.split]);
  if (models.length === 1) {
    return html`<p class="empty">This page has one run. verl-dag trace RUN RUN2 -o FILE.html compares two to four.</p>`;
  }
  const { axis, limit, rows } = known;
  const most = Math.max(...axis.places.map((own) => own.at(-1) ?? 0));
  const choose = (/** @type {number} */ tokens) => go({ ...route, step: Math.round(tokens) });
  const row = rows.find((one) => one.problem === route.call);
  return html`<h1>Compare <small>${models.length} runs at equal ${axis.name === "step" ? "steps" : axis.name}</small></h1>
    <label class="steps">${axis.name} <b>${count(limit)}</b>
      <input type="range" min="0" max=${SLIDER} value=${most ? Math.round((SLIDER * limit) / most) : 0}
        onInput=${(/** @type {any} */ event) => choose((most * Number(event.target.value)) / SLIDER)} /></label>
    <${Runs} models=${models} known=${known} />
    <section><h2>Curves over ${axis.name === "step" ? "steps" : axis.name}</h2>
      <p class="hint">A click chooses where the runs are compared, at first the most that all reach. Shaded: 95 % interval over
        the episodes.</p>
      <div class="grid"><${Charts} models=${models} axis=${axis} limit=${limit} choose=${choose} /></div></section>
    ${known.splits.length > 0 && html`<${Problems} models=${models} route=${route} known=${known} />`}
    ${row !== undefined && html`<${Problem} key=${row.problem} models=${models} row=${row} known=${known} />`}`;
}

/** @param {{models: Model[], known: Shared}} props */
function Runs({ models, known }) {
  const { axis, limit, steps } = known;
  const value = (/** @type {number} */ run, /** @type {string} */ key) => {
    const { places, runs } = curvesOf(models, axis, [key]);
    return runs[run][0].findLast((one, at) => one !== null && places[at] <= limit);
  };
  return html`<div class="scroll"><table><thead><tr><th>run</th><th>workflow</th><th>last step</th><th>compared at step</th>
      <th>accuracy in validation</th><th>in training</th></tr></thead>
    <tbody>${models.map((model) => html`<tr key=${model.run}>
      <th><span class="swatch" style=${{ background: placeColor(model.run) }}></span>${" "}<${Link} to=${{ run: model.run, screen: "run" }}>
        ${visible(nameOfRun(model))}<//></th>
      <td>${visible(model.index.run.workflow ?? "")}</td><td>${model.steps.at(-1) ?? "–"}</td>
      <td>${steps[model.run] < 0 ? "–" : steps[model.run]}</td>
      <td>${percent(value(model.run, "val/accuracy"))}</td><td>${percent(value(model.run, "episode/accuracy"))}</td></tr>`)}
    </tbody></table></div>`;
}

/** @param {{models: Model[], axis: Axis, limit: number, choose: (tokens: number) => void}} props */
function Charts({ models, axis, limit, choose }) {
  const keys = useMemo(
    () => [...new Set(models.flatMap((model) => Object.keys(model.index.metrics.series)))].sort(),
    [models],
  );
  const agents = [...new Set(models.flatMap((model) => model.agents))];
  const [key, setKey] = useState("tokens/sampled");
  /** @type {[string, string, string?][]} */
  const charts = [
    ["Accuracy in validation", "val/accuracy", "val/episode/count"],
    ["Accuracy in training", "episode/accuracy", "episode/count"],
  ];
  for (const agent of agents) {
    charts.push([`Reward of ${visible(agent)}, mean over its calls`, `agent/${agent}/reward/mean`]);
  }
  const shown = charts.filter(([, key]) => keys.includes(key));
  return html`${shown.map(([title, key, counts]) => html`<${Chart} key=${key} title=${title} name=${key} counts=${counts}
      models=${models} axis=${axis} limit=${limit} choose=${choose} />`)}
    <div><${MetricName} keys=${keys} value=${key} choose=${setKey} />
      ${keys.includes(key) && html`<${Chart} key=${key} title=${visible(key)} name=${key} models=${models} axis=${axis}
        limit=${limit} choose=${choose} />`}</div>`;
}

/**
 * @param {{title: string, name: string, counts?: string, models: Model[], axis: Axis, limit: number,
 *   choose: (tokens: number) => void}} props  counts: the metric with the number of episodes of a share
 */
function Chart({ title, name, counts, models, axis, limit, choose }) {
  const { places, curves } = useMemo(() => {
    const { places, runs } = curvesOf(models, axis, counts === undefined ? [name] : [name, counts]);
    const curves = runs.map(([values, numbers], run) => ({
      label: visible(nameOfRun(models[run])),
      values,
      color: placeColor(run),
      interval: numbers && intervalOf(values, numbers),
    }));
    return { places, curves };
  }, [models, name]);
  return html`<${Curves} title=${title} steps=${places} curves=${curves} at=${limit} choose=${choose} held
    range=${counts && [0, 1]} />`;
}

/** @param {{models: Model[], route: Route, known: Shared}} props */
function Problems({ models, route, known }) {
  const { split, splits, rows } = known;
  const columns = `minmax(9rem, min(44rem, 50vw)) repeat(${models.length}, minmax(2.4rem, 4rem))`;
  const style = { gridTemplateColumns: columns };
  const head = html`<div class="row head" style=${style}><span>problem</span>
    ${models.map(({ run }) => html`<span key=${run} style=${{ color: placeColor(run) }}>run ${run + 1}</span>`)}</div>`;
  const row = (/** @type {SharedProblem} */ { problem, cells }) => html`<div class="row" key=${problem}
      style=${{ ...style, height: `${ROW}px` }}>
    <${Link} class="problem" current=${problem === route.call} to=${{ ...route, call: problem }}>
      ${excerpt(models[0].index.problems[problem].text, 120) || "(empty)"}<//>
    ${cells.map((cell, run) => html`<${CellView} key=${run} cell=${cell} />`)}</div>`;
  return html`<section class="compared"><h2>The same problems</h2>
    <${Choice} label="split" options=${splits} value=${split}
      choose=${(/** @type {string} */ one) => go({ ...route, split: one, call: null })} />
    <p class="hint">Per cent of the recorded episodes that solved it, when it was last seen; the largest differences first. A
      problem opens below.</p>
    <div class="matrix"><${Windowed} items=${rows} height=${ROW} head=${head} row=${row} keyOf=${problemOf}
      chosen=${route.call} label="problems of all runs" />
    </div></section>`;
}

/** @param {SharedProblem} row */
const problemOf = (row) => row.problem;

/** @param {{models: Model[], row: SharedProblem, known: Shared}} props */
function Problem({ models, row, known }) {
  const [number, setNumber] = useState(0);
  const own = models[0].index.problems[row.problem];
  const groups = row.cells.map((cell) => cell?.episodes ?? []);
  const chosen = groups.map((group) => group[Math.min(number, group.length - 1)]);
  const loaded = useDetails(chosen);
  const heads = chosen.map((one, run) => html`<${Head} model=${models[run]} episode=${one} />`);
  const agents = [...new Set(models.flatMap((model) => model.agents))];
  const longest = Math.max(...groups.map((group) => group.length));
  const histories = models.map((model, run) => ({
    run,
    groups: model.history({ split: known.split, problem: model.numberOf(own) }),
    last: known.steps[run],
  }));
  return html`<section aria-label="problem"><h2>In each run</h2>
    <${LongText} label="problem" text=${own.text} />
    ${own.truth && html`<p>ground truth <code>${excerpt(own.truth, 400)}</code></p>`}
    <p class="hint">Over its steps; faint: after the place of the comparison.</p>
    ${histories.map(({ run, groups, last }) => html`<div class="history" key=${run}>
      <span style=${{ color: placeColor(run) }}>run ${run + 1}</span>
      ${groups.map((group) => html`<${CellView} key=${group[0].step} cell=${cellOf(group)}
        faint=${group[0].step > last} />`)}</div>`)}
    ${longest > 1 && html`<${Choice} label="episode" options=${Array.from({ length: longest }, (_, at) => String(at))} value=${String(number)}
      choose=${(/** @type {string} */ option) => setNumber(Number(option))} />`}
    ${loaded === null
      ? html`<${Waiting} what="the episodes" />`
      : html`<${SideBySide} heads=${heads} agents=${agents} note=${same}
          columns=${loaded.map((one) => saidIn(one?.detail))} />`}
    </section>`;
}

/** @param {{model: Model, episode: Episode | undefined}} props */
const Head = ({ model, episode }) => html`<span style=${{ color: placeColor(model.run) }}>run ${model.run + 1}</span>
  ${episode && html` <${Link} to=${{ screen: "episode", ...whereOf(episode) }}>step ${episode.step}<//>
    <${Outcome} episode=${episode} />`}`;

/**
 * @param {string} _
 * @param {(string | undefined)[]} texts
 */
const same = (_, texts) => (texts.every((text) => text === texts[0]) ? "the same" : "");
