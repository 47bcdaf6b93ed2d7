// Runs beside each other when their training had sampled equally many tokens. Pure.
/** @import { Model, Cell } from "./model.js" */
/** @import { Route } from "./route.js" */

import { cellOf } from "./model.js";

/**
 * @typedef {{name: string, places: number[][], limit: number}} Axis  places: of each run's steps; limit: what all reach
 * @typedef {{problem: number, cells: (Cell | undefined)[], spread: number}} SharedProblem  problem: number in the first
 *   run; cells: of each run, at the last step within the limit; spread: largest less smallest share that was solved
 * @typedef {{axis: Axis, limit: number, steps: number[], split: string, splits: string[], rows: SharedProblem[]}} Shared
 *   steps: the last one of each run within the limit
 */

/** @param {Model} model */
export const nameOfRun = (model) => `${model.run + 1} · ${model.index.run.name}`;

/**
 * The steps of each run as sampled tokens of training, those of the step included, or as steps if a run has not counted.
 * @param {Model[]} models
 * @returns {Axis}
 */
export function axisOf(models) {
  const counted = models.every((model) => model.index.metrics.series["tokens/sampled"] !== undefined);
  const places = models.map(({ index: { metrics }, steps }) => {
    let sum = 0;
    return counted ? metrics.steps.map((_, at) => (sum += metrics.series["tokens/sampled"][at] ?? 0)) : steps;
  });
  return { name: counted ? "sampled tokens" : "step", places, limit: Math.min(...places.map((own) => own.at(-1) ?? 0)) };
}

/**
 * Metrics of each run over the places at which any run has the first of them.
 * @param {Model[]} models
 * @param {Axis} axis
 * @param {string[]} keys
 * @returns {{places: number[], runs: (number | null)[][][]}}  runs: per run and key, the values at the places
 */
export function curvesOf(models, axis, keys) {
  const positions = models.map(({ index: { metrics } }, run) => {
    const own = axis.name === "step" ? metrics.steps : axis.places[run];
    return new Map(own.flatMap((place, at) => ((metrics.series[keys[0]]?.[at] ?? null) === null ? [] : [[place, at]])));
  });
  const places = [...new Set(positions.flatMap((own) => [...own.keys()]))].sort((a, b) => a - b);
  const runs = models.map(({ index: { metrics } }, run) =>
    keys.map((key) => places.map((place) => metrics.series[key]?.[positions[run].get(place) ?? -1] ?? null)),
  );
  return { places, runs };
}

/**
 * The problems that the first run and another have, those first in which the runs differ most.
 * @param {Model[]} models
 * @param {Route} route
 * @returns {Shared}
 */
export function shared(models, route) {
  const axis = axisOf(models);
  const limit = route.step ?? axis.limit;
  const steps = models.map((model, run) => {
    const all = axis.name === "step" ? model.steps : model.index.metrics.steps;
    return all[axis.places[run].findLastIndex((place) => place <= limit)] ?? -1;
  });
  const splits = models[0].splits.filter((one) => models.some((model) => model.run > 0 && model.splits.includes(one)));
  const split = splits.includes(route.split) ? route.split : splits.includes("validation") ? "validation" : splits[0];
  const rows = models[0].index.problems.flatMap((own, problem) => {
    const cells = models.map((model, run) => {
      const groups = model.history({ split, problem: model.numberOf(own) });
      const last = groups.findLast((group) => group[0].step <= steps[run]);
      return last && cellOf(last);
    });
    const shares = cells.flatMap((cell) => (cell?.graded ? cell.solved / cell.graded : []));
    const spread = shares.length > 1 ? Math.max(...shares) - Math.min(...shares) : 0;
    return cells[0] && cells.filter(Boolean).length > 1 ? [{ problem, cells, spread }] : [];
  });
  return { axis, limit, steps, split, splits, rows: rows.sort((a, b) => b.spread - a.spread || a.problem - b.problem) };
}
