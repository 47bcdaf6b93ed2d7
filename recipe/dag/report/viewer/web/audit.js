// What the rules of `report.monitors` flagged, and what the reward paid for it. Pure.
/** @import { Episode, Flag } from "./data.js" */
/** @import { Model } from "./model.js" */
/** @import { Route } from "./route.js" */

import { rewardOf } from "./model.js";
import { mean } from "./statistics.js";

/**
 * @typedef {object} Flagged
 * @property {Episode} episode
 * @property {Flag[]} flags
 * @property {number | null} paid  to the agents whose calls are flagged; to all, if the episode is
 * @property {number | null} others  paid to them in the siblings that are not flagged, their mean
 * @property {number | null} gain  the difference
 *
 * @typedef {{rule: string, rows: Flagged[], shares: (number | null)[]}} Fired  shares: flagged, of all episodes of each
 *   step in the metrics
 */

/**
 * The flagged episodes, those first that gained most.
 * @param {Model} model
 * @param {string} rule  empty: any
 * @returns {Flagged[]}
 */
export function flagged(model, rule) {
  const flagsOf = (/** @type {Episode} */ { flags = [] }) => flags.filter((one) => rule === "" || one.rule === rule);
  const rows = model.episodes.flatMap((episode) => {
    const flags = flagsOf(episode);
    if (flags.length === 0) {
      return [];
    }
    const agents = flags.flatMap(({ call }) => (call === null ? model.agents : episode.calls[call].agent));
    const clean = model.groupAt(episode).filter((one) => flagsOf(one).length === 0);
    const paid = rewardOf(episode, agents);
    const others = mean(clean.flatMap((one) => rewardOf(one, agents) ?? []));
    return [{ episode, flags, paid, others, gain: paid === null || others === null ? null : paid - others }];
  });
  return rows.sort((a, b) => (b.gain ?? -Infinity) - (a.gain ?? -Infinity) || 0);
}

/**
 * The rules that looked at the run's episodes, and those that only the record has.
 * @param {Model} model
 * @returns {Fired[]}
 */
export function rulesOf(model) {
  const { series } = model.index.metrics;
  const on = Object.keys(series).filter((key) => key.startsWith("hack/") && key !== "hack/any");
  const found = model.episodes.flatMap(({ flags = [] }) => flags.map((one) => one.rule));
  return [...new Set([...on.map((key) => key.slice("hack/".length)), ...found])].map((rule) => ({
    rule,
    rows: flagged(model, rule),
    shares: series[`hack/${rule}`] ?? [],
  }));
}

/**
 * @param {Flagged} row
 * @param {Partial<Route>} route  what else is shown
 * @returns {Partial<Route>}
 */
export function routeOfFlagged({ episode, flags }, route) {
  const { run, step, split, uid, index } = episode;
  return { ...route, run, step, split, uid, index, call: flags[0].call };
}
