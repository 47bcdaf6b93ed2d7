// The run: what it was, its graph with numbers, curves, phases, and alarms in words.

import { html, useMemo, useState } from "./html.js";
import { alarmsAt } from "./alarms.js";
import { agentColor } from "./color.js";
import { Curves } from "./curves.js";
import { counted, percent, seconds, short, signed } from "./format.js";
import { GraphView } from "./graph.js";
import { nodeNumbers } from "./model.js";
import { Phases } from "./phases.js";
import { mean, wilson } from "./statistics.js";
import { visible } from "./text.js";
import { Facts, Link } from "./ui.js";
import { go } from "./use_data.js";
/** @import { Episode, Graph, GraphNode, Index, Metrics } from "./data.js" */
/** @import { Model } from "./model.js" */
/** @import { Route } from "./route.js" */
/** @import { Curve } from "./curves.js" */

/** Curves per agent: heading, key of the metric. */
const PER_AGENT = [
  ["Reward of each agent, mean over its calls", "reward/mean"],
  ["Share of the gradient's tokens", "grad_tokens_share"],
  ["Gradient mass: share of tokens times |advantage|", "grad_mass"],
  ["Groups without a signal", "silent_groups"],
  ["Tokens per call", "response_length/mean"],
];

const SHARES = ["grad_tokens_share", "grad_mass", "silent_groups"];

/** @param {{model: Model, route: Route, wide: boolean}} props */
export function RunScreen({ model, route, wide }) {
  const { index } = model;
  const step = route.step ?? index.metrics.steps.at(-1) ?? model.lastStep;
  const choose = (/** @type {number} */ chosen) => go({ screen: "run", step: chosen });
  const alarms = alarmsAt(index, index.metrics.steps.indexOf(step));
  return html`<${About} run=${index.run} />
    ${model.steps.length === 0 && html`<p class="empty">Nothing is recorded yet.</p>`}
    <${Steps} steps=${model.steps} step=${step} choose=${choose} />
    ${alarms.length > 0 && html`<ul class="alarms" role="status">
      ${alarms.map((alarm) => html`<li key=${alarm}>${visible(alarm)}</li>`)}</ul>`}
    ${model.steps.length > 0 && html`<${NodesOfStep} model=${model} step=${step} wide=${wide} />`}
    ${index.metrics.steps.length > 0 && html`<section><h2>Curves</h2>
      <p class="hint">A click chooses the step. Shaded: 95 % interval over the episodes.</p>
      <div class="grid">
        <${Standard} index=${index} step=${step} choose=${choose} />
        <${Phases} metrics=${index.metrics} at=${step} choose=${choose} />
        <${Other} metrics=${index.metrics} step=${step} choose=${choose} />
      </div></section>`}`;
}

/** @param {{run: Record<string, any>}} props */
function About({ run }) {
  const commit =
    run.checkout?.commit && `${run.checkout.commit.slice(0, 10)}${run.checkout.dirty ? " and changes" : ""}`;
  /** @type {[string, any][]} */
  const facts = [
    ["estimator", run.algorithm.estimator],
    ["seed", run.seed],
    ["started", run.started],
    ["commit", commit],
    ["verl-dag", run.versions?.["verl-dag"]],
    ["machine", run.machine],
    ["final accuracy", run.summary?.final_accuracy === undefined ? null : percent(run.summary.final_accuracy)],
  ];
  for (const [name, { model, frozen, api }] of Object.entries(run.policies)) {
    facts.push([`policy ${name}`, [model, frozen && "frozen", api && "behind an API"].filter(Boolean).join(", ")]);
  }
  return html`<header class="about"><h1>${visible(run.workflow ?? "run")} <small>${visible(run.name)}</small></h1>
    ${run.description && html`<p>${visible(run.description)}</p>`}
    <${Facts} facts=${facts} />
    ${run.command && html`<details><summary>Command</summary><pre>${visible(run.command.join(" "))}</pre></details>`}
  </header>`;
}

/** @param {{steps: number[], step: number, choose: (step: number) => void}} props */
export function Steps({ steps, step, choose }) {
  if (steps.length < 2) {
    return null;
  }
  const at = Math.max(0, steps.indexOf(step));
  return html`<label class="steps">step <b>${step}</b>
    <input type="range" min="0" max=${steps.length - 1} value=${at}
      onInput=${(/** @type {any} */ event) => choose(steps[Number(event.target.value)])} />
  </label>`;
}

/** @param {{model: Model, step: number, wide: boolean}} props */
function NodesOfStep({ model, step, wide }) {
  const trained = model.at(step);
  const episodes = trained.length ? trained : model.at(step, "validation");
  const numbers = useMemo(() => nodeNumbers(episodes), [model, step]);
  const { metrics, agents } = model.index;
  const graph = model.index.graph ?? withoutEdges(episodes);
  const value = (/** @type {string} */ key) => metrics.series[key]?.[metrics.steps.indexOf(step)] ?? null;
  const lines = (/** @type {GraphNode} */ node) => linesOf(node, numbers, value);
  return html`<section><h2>Workflow at step ${step}</h2>
    <p class="hint">${`${counted(episodes.length, "recorded episode")} `}
      ${episodes.length > 0 && html`<${Link} to=${{ screen: "problems", split: episodes[0].split }}>by problem<//>`}</p>
    ${graph.nodes.length > 0 && html`<${GraphView} graph=${graph} agents=${agents} wide=${wide} numbers=${lines} />`}
  </section>`;
}

/**
 * The nodes of a run whose workflow is not recorded, in the order of their first calls.
 * @param {Episode[]} episodes
 * @returns {Graph}
 */
function withoutEdges(episodes) {
  /** @type {Map<string, GraphNode>} */
  const nodes = new Map();
  for (const { node, agent, policy } of episodes.flatMap((one) => one.calls)) {
    if (!nodes.has(node)) {
      nodes.set(node, { id: node, kind: "agent", agent, policy, when: false, place: [nodes.size, 0] });
    }
  }
  return { nodes: [...nodes.values()], edges: [] };
}

/**
 * The numbers at a node.
 * @param {GraphNode} node
 * @param {ReturnType<typeof nodeNumbers>} numbers
 * @param {(key: string) => number | null} value
 */
function linesOf(node, numbers, value) {
  if (node.kind === "train") {
    const time = value(`timing/${node.id}`);
    return time === null ? [] : [seconds(time)];
  }
  if (node.kind === "reward") {
    const paid = numbers.paid.get(node.id);
    return paid === undefined ? [] : [`pays ${signed(mean(paid))} a call`];
  }
  const calls = numbers.calls.get(node.id) ?? [];
  const skipped = numbers.skipped.get(node.id);
  const lines =
    node.agent === null ? [] : [node.agent === node.id ? `policy ${node.policy}` : `${node.agent} (${node.policy})`];
  if (calls.length) {
    const share = value(`agent/${node.agent}/grad_tokens_share`);
    const reward = mean(calls.flatMap((call) => call.reward ?? []));
    lines.push(`reward ${signed(reward)}, ${seconds(mean(calls.map((call) => call.seconds)))}`);
    const tokens = mean(calls.map((call) => call.tokens));
    lines.push(`${counted(tokens, "token", short(tokens))}${share === null ? "" : `, ${percent(share)} of loss`}`);
  }
  return skipped === undefined ? lines : [...lines, `skipped ${counted(skipped, "time")}`];
}

/** @param {{index: Index, step: number, choose: (step: number) => void}} props */
function Standard({ index, step, choose }) {
  const { steps, series } = index.metrics;
  const accuracy = ["episode/accuracy", "val/accuracy"]
    .filter((key) => series[key] !== undefined)
    .map((key) => ({
      label: key === "val/accuracy" ? "validation" : "training",
      values: series[key],
      color: key === "val/accuracy" ? "hsl(35 85% 48%)" : "var(--accent)",
      interval: intervalOf(series[key], series[key === "val/accuracy" ? "val/episode/count" : "episode/count"]),
    }));
  /** @type {{title: string, curves: Curve[], range?: [number, number]}[]} */
  const charts = [{ title: "Accuracy", curves: accuracy, range: [0, 1] }];
  for (const [title, key] of PER_AGENT) {
    const curves = index.agents
      .filter((agent) => series[`agent/${agent}/${key}`] !== undefined)
      .map((agent) => ({
        label: visible(agent),
        values: series[`agent/${agent}/${key}`],
        color: agentColor(index.agents, agent),
      }));
    charts.push({ title, curves, range: SHARES.includes(key) ? [0, 1] : undefined });
  }
  return charts
    .filter((chart) => chart.curves.length > 0)
    .map((chart) => html`<${Curves} key=${chart.title} steps=${steps} at=${step} choose=${choose} ...${chart} />`);
}

/**
 * @param {(number | null)[]} shares
 * @param {(number | null)[] | undefined} counts
 * @returns {[number | null, number | null][]}
 */
export function intervalOf(shares, counts) {
  return shares.map((share, at) => (share === null || !counts?.[at] ? [null, null] : wilson(share, counts[at] ?? 1)));
}

/** @param {{metrics: Metrics, step: number, choose: (step: number) => void}} props */
function Other({ metrics, step, choose }) {
  const keys = useMemo(() => Object.keys(metrics.series).sort(), [metrics]);
  const first = keys.find((key) => key.endsWith("/entropy")) ?? keys[0];
  const [key, setKey] = useState(first);
  const shown = metrics.series[key] === undefined ? first : key;
  const curve = { label: shown, values: metrics.series[shown], color: "var(--accent)" };
  return html`<div><${MetricName} keys=${keys} value=${key} choose=${setKey} />
    <${Curves} key=${shown} title=${shown} steps=${metrics.steps} at=${step} choose=${choose} curves=${[curve]} />
      </div>`;
}

/** @param {{keys: string[], value: string, choose: (key: string) => void}} props */
export function MetricName({ keys, value, choose }) {
  return html`<label class="pick">any metric
      <input list="metrics" value=${value} onInput=${(/** @type {any} */ event) => choose(event.target.value)} /></label>
    <datalist id="metrics">${keys.map((one) => html`<option key=${one} value=${one} />`)}</datalist>`;
}
