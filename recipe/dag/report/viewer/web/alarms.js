// What a look at the metrics should not miss, in words. Pure.
/** @import { Index } from "./data.js" */

import { percent } from "./format.js";
import { trend } from "./statistics.js";

/** Share of the gradient's tokens below which an agent hardly learns. */
const LITTLE = 0.05;
/** Standard errors of a trend that is not chance. */
const CERTAIN = 3;
/** Accuracy above which there is nothing left to learn. */
const SOLVED = 0.9;
/** Steps over which trends are taken at most. */
const WINDOW = 40;
/** Steps in a row after which a run warns. */
const PATIENCE = 3;

/**
 * @param {Index} index
 * @param {number} at  position of the step in the metrics
 * @returns {string[]}
 */
export function alarmsAt(index, at) {
  const { series } = index.metrics;
  const value = (/** @type {string} */ key) => series[key]?.[at] ?? null;
  const found = [];
  for (const agent of index.agents) {
    const share = value(`agent/${agent}/grad_tokens_share`);
    if (share !== null && share < LITTLE) {
      found.push(`${agent} supplies ${percent(share)} of the gradient's tokens, so it hardly learns`);
    }
    const silent = value(`agent/${agent}/silent_groups`);
    if (silent !== null && silent > 0.9) {
      found.push(`in ${percent(silent)} of the groups of ${agent} all its advantages are 0`);
    }
    const cut = value(`agent/${agent}/truncated`);
    if (cut !== null && cut > 0.2) {
      found.push(`${percent(cut)} of the calls of ${agent} were cut off: raise its max_tokens`);
    }
    const empty = value(`agent/${agent}/void`);
    if (empty !== null && empty > 0.2) {
      found.push(`${percent(empty)} of the calls of ${agent} are empty`);
    }
    if (isUnearned(index, agent, at)) {
      found.push(unearned(agent));
    }
  }
  const masked = value("episode/masked");
  if (masked !== null && masked > 0.1) {
    found.push(`${percent(masked)} of the episodes were lost to faults`);
  }
  if (value("train/rows") === 0) {
    found.push("no row was trained on");
  }
  return found;
}

/** @param {string} agent */
const unearned = (agent) => `the reward of ${agent} rises and accuracy does not: look at what it is paid for`;

/**
 * Whether the reward of an agent rises while accuracy does not, as recipe/dag/report/starvation.py judges.
 * @param {Index} index
 * @param {string} agent
 * @param {number} at
 */
function isUnearned({ metrics: { series } }, agent, at) {
  const values = (/** @type {string} */ key) => (series[key] ?? []).slice(Math.max(0, at + 1 - WINDOW), at + 1);
  const accuracy = values("episode/accuracy");
  const [rises, learns] = [trend(values(`agent/${agent}/reward/mean`)), trend(accuracy)];
  return rises !== null && learns !== null && rises > CERTAIN && learns < 1 && (accuracy.at(-1) ?? 0) <= SOLVED;
}

/**
 * When the reward of an agent first rose in several steps in a row while accuracy did not: what the run warned of.
 * @param {Index} index
 * @returns {string[]}
 */
export function unearnedRewards(index) {
  const { steps } = index.metrics;
  return index.agents.flatMap((agent) => {
    const rose = steps.map((_, at) => isUnearned(index, agent, at));
    const first = rose.findIndex((_, at) => at + 1 >= PATIENCE && rose.slice(at + 1 - PATIENCE, at + 1).every(Boolean));
    return first < 0 ? [] : [`step ${steps[first]}: ${unearned(agent)}`];
  });
}
