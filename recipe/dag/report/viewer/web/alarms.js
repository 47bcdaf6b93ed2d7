// What a look at the metrics should not miss, in words. Pure.
/** @import { Index } from "./data.js" */

import { percent } from "./format.js";
import { trend } from "./statistics.js";

/** Share of the gradient's tokens below which an agent hardly learns. */
const LITTLE = 0.05;
/** Standard errors of a trend that is not chance. */
const CERTAIN = 3;

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
    const rises = trend((series[`agent/${agent}/reward/mean`] ?? []).slice(0, at + 1));
    const accuracy = trend((series["episode/accuracy"] ?? []).slice(0, at + 1));
    if (rises !== null && accuracy !== null && rises > CERTAIN && accuracy < 1) {
      found.push(`the reward of ${agent} rises and accuracy does not: look at what it is paid for`);
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
