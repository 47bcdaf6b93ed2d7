// What is known about the run's episodes: groups, problems over steps, numbers per node and per agent. Pure.
/** @import { CallNumbers, Episode, Index, Problem } from "./data.js" */

import { dominance, mean } from "./statistics.js";

/**
 * @typedef {{step: number, solved: number, graded: number, reward: number | null, episodes: Episode[]}} Cell
 * @typedef {{problem: number, cells: Map<number, Cell>, kind: string}} MatrixRow
 * @typedef {{label: string, solved: number, rest: number, effect: number}} Difference
 *
 * @typedef {object} AgentCredit
 * @property {string} agent
 * @property {number} calls
 * @property {number | null} reward  mean
 * @property {number[]} advantages
 * @property {number | null} size  mean of |advantage|
 * @property {number | null} mass  share of the sum of tokens x |advantage| in its policy
 * @property {number | null} signal  share of its groups in which its rewards differ
 * @property {number | null} agreement  of its advantages with the outcome, from -1 to 1
 */

export class Model {
  /**
   * @param {Index} index
   * @param {number} [run]  its place on the page
   */
  constructor(index, run = 0) {
    this.index = index;
    this.run = run;
    /** @type {Map<string, number> | undefined} */
    this.numbers = undefined;
    this.episodes = index.episodes;
    this.agents = index.agents;
    this.effects = index.effects;
    this.steps = [...new Set([...index.metrics.steps, ...this.episodes.map((one) => one.step)])].sort((a, b) => a - b);
    this.splits = [...new Set(this.episodes.map((one) => one.split))];
    /** @type {Map<string, Episode[]>} */
    this.groups = new Map();
    /** @type {Map<string, Episode[][]>} */
    this.problems = new Map();
    for (const episode of this.episodes) {
      episode.run = run;
      append(this.groups, groupKey(episode), episode);
    }
    for (const group of this.groups.values()) {
      group.sort((a, b) => a.index - b.index);
      append(this.problems, `${group[0].split}/${group[0].problem}`, group);
    }
    for (const groups of this.problems.values()) {
      groups.sort((a, b) => a[0].step - b[0].step);
    }
  }

  /** The last step with episodes of training, or else of anything. */
  get lastStep() {
    const trained = this.episodes.filter((one) => one.split === "train");
    return (trained.length ? trained : this.episodes).reduce((last, one) => Math.max(last, one.step), 0);
  }

  /**
   * @param {{step: number | null, split: string, uid: string}} route
   * @returns {Episode[]}  the siblings; empty if there are none
   */
  groupAt(route) {
    return this.groups.get(groupKey({ ...route, step: route.step ?? 0 })) ?? [];
  }

  /**
   * @param {{step: number | null, split: string, uid: string, index: number}} route
   * @returns {Episode | undefined}
   */
  episodeAt(route) {
    return this.groupAt(route).find((one) => one.index === route.index);
  }

  /**
   * The groups of the same problem and split over the steps.
   * @param {{split: string, problem: number}} episode
   */
  history(episode) {
    return this.problems.get(`${episode.split}/${episode.problem}`) ?? [];
  }

  /**
   * The number of a problem of another run; -1 if this one does not have it.
   * @param {Problem} problem
   */
  numberOf({ key }) {
    this.numbers ??= new Map(this.index.problems.map((one, at) => [one.key, at]));
    return this.numbers.get(key) ?? -1;
  }

  /**
   * @param {number} step
   * @param {string} [split]
   */
  at(step, split = "train") {
    return this.episodes.filter((one) => one.step === step && one.split === split);
  }

  /**
   * Problems over steps, those that were learned first.
   * @param {string} split
   * @returns {{steps: number[], rows: MatrixRow[]}}
   */
  matrix(split) {
    const steps = [...new Set(this.episodes.filter((one) => one.split === split).map((one) => one.step))];
    const rows = [];
    for (const [key, groups] of this.problems) {
      if (key.startsWith(`${split}/`)) {
        const cells = new Map(groups.map((group) => [group[0].step, cellOf(group)]));
        rows.push({ problem: groups[0][0].problem, cells, kind: kindOf([...cells.values()]) });
      }
    }
    return {
      steps: steps.sort((a, b) => a - b),
      rows: rows.sort((a, b) => KINDS.indexOf(a.kind) - KINDS.indexOf(b.kind)),
    };
  }
}

export const KINDS = ["learned", "forgotten", "mixed", "never solved", "always solved", "seen once", "not graded"];

/** @param {{step: number, split: string, uid: string}} episode */
export const groupKey = (episode) => `${episode.step}/${episode.split}/${episode.uid}`;

/** @param {Episode} episode */
export const isSolved = (episode) => (episode.outcome ?? 0) >= 0.5;

/**
 * @param {Episode} episode
 * @param {string[]} [agents]  whose calls count; all by default
 */
export function rewardOf(episode, agents) {
  const own = kept(episode).filter((call) => agents?.includes(call.agent) ?? true);
  const rewards = own.flatMap((call) => (call.reward === null ? [] : [call.reward]));
  return rewards.length ? rewards.reduce((a, b) => a + b, 0) : null;
}

/** @param {Episode} episode */
export const kept = (episode) => episode.calls.filter((call) => !call.dropped);

/**
 * Forks are in `episodes` alone: there are more of a longer episode, and they repeat it.
 * @param {Episode[]} group
 * @returns {Cell}
 */
export function cellOf(group) {
  const own = group.filter((one) => !one.forked);
  const graded = own.filter((one) => one.outcome !== null);
  const rewards = own.flatMap((one) => rewardOf(one) ?? []);
  const solved = graded.filter(isSolved).length;
  return { step: group[0].step, solved, graded: graded.length, reward: mean(rewards), episodes: group };
}

/**
 * Compare the first and the last third of the steps at which a problem was graded.
 * @param {Cell[]} cells
 */
function kindOf(cells) {
  const shares = cells.filter((cell) => cell.graded > 0).map((cell) => cell.solved / cell.graded);
  if (shares.length === 0) {
    return "not graded";
  }
  if (shares.length === 1) {
    return "seen once";
  }
  if (shares.every((share) => share === 0)) {
    return "never solved";
  }
  if (shares.every((share) => share === 1)) {
    return "always solved";
  }
  const third = Math.max(1, Math.floor(shares.length / 3));
  const change = (mean(shares.slice(-third)) ?? 0) - (mean(shares.slice(0, third)) ?? 0);
  return change > 0.25 ? "learned" : change < -0.25 ? "forgotten" : "mixed";
}

/**
 * Numbers per node over some episodes, without forks.
 * @param {Episode[]} episodes
 */
export function nodeNumbers(episodes) {
  /** @type {Map<string, CallNumbers[]>} */
  const calls = new Map();
  /** @type {Map<string, number>} */
  const skipped = new Map();
  /** @type {Map<string, number[]>} */
  const paid = new Map();
  for (const episode of episodes.filter((one) => !one.forked)) {
    for (const call of kept(episode)) {
      append(calls, call.node, call);
      for (const [payer, part] of Object.entries(call.parts)) {
        append(paid, payer, part);
      }
    }
    for (const [node] of episode.skips) {
      skipped.set(node, (skipped.get(node) ?? 0) + 1);
    }
  }
  return { calls, skipped, paid };
}

/**
 * What each agent earned and what it was taught. Of forks, what they repeat does not count, nor their rewards in the
 * mean.
 * @param {Episode[]} episodes
 * @param {string[]} agents
 * @returns {AgentCredit[]}
 */
export function creditOf(episodes, agents) {
  const mass = new Map();
  const total = new Map();
  for (const call of episodes.flatMap((one) => one.calls)) {
    const part = call.tokens * Math.abs(call.advantage ?? 0);
    mass.set(call.agent, (mass.get(call.agent) ?? 0) + part);
    total.set(call.policy, (total.get(call.policy) ?? 0) + part);
  }
  return agents.map((agent) => {
    const own = episodes.flatMap((one) =>
      kept(one)
        .filter((call) => call.agent === agent && !call.replayed)
        .map((call) => ({ one, call })),
    );
    const trained = own.filter(({ call }) => call.advantage !== null && call.advantage !== undefined);
    const advantages = trained.map(({ call }) => call.advantage ?? 0);
    const groups = new Map();
    for (const { one, call } of own) {
      if (call.reward !== null) {
        append(groups, groupKey(one), call.reward);
      }
    }
    const several = [...groups.values()].filter((rewards) => rewards.length > 1);
    const whole = total.get(own[0]?.call.policy) ?? 0;
    const of = (/** @type {boolean} */ solved) =>
      trained
        .filter(({ one }) => one.outcome !== null && isSolved(one) === solved)
        .map(({ call }) => call.advantage ?? 0);
    return {
      agent,
      calls: own.length,
      reward: mean(own.flatMap(({ one, call }) => (one.forked ? [] : (call.reward ?? [])))),
      advantages,
      size: mean(advantages.map(Math.abs)),
      mass: trained.length && whole ? mass.get(agent) / whole : null,
      signal: several.length ? several.filter((rewards) => new Set(rewards).size > 1).length / several.length : null,
      agreement: dominance(of(true), of(false)),
    };
  });
}

/**
 * How much more a part of a call's reward is than its mean over the same call of the siblings; null without siblings. A
 * group-relative advantage is the sum of these over the parts, scaled.
 * @param {Episode[]} group
 * @param {CallNumbers} call
 * @param {string} payer
 */
export function aboveSiblings(group, call, payer) {
  const same = (/** @type {CallNumbers} */ { node, turn, round }) =>
    node === call.node && turn === call.turn && round === call.round;
  const parts = group.flatMap((one) => kept(one).filter(same)).map((other) => other.parts[payer] ?? 0);
  const middle = mean(parts);
  return middle === null || parts.length < 2 ? null : (call.parts[payer] ?? 0) - middle;
}

/**
 * What told the solved siblings from the others, without forks: means of numbers per node, the largest effect first.
 * @param {Episode[]} group
 * @returns {Difference[]}
 */
export function differences(group) {
  /** @type {Map<string, [number[], number[]]>} */
  const values = new Map();
  for (const episode of group.filter((one) => one.outcome !== null && !one.forked)) {
    for (const [label, value] of features(episode)) {
      const pair = values.get(label) ?? [[], []];
      pair[isSolved(episode) ? 0 : 1].push(value);
      values.set(label, pair);
    }
  }
  const found = [];
  for (const [label, [solved, rest]] of values) {
    const effect = dominance(solved, rest);
    if (effect !== null && effect !== 0) {
      found.push({ label, solved: mean(solved) ?? 0, rest: mean(rest) ?? 0, effect });
    }
  }
  return found.sort((a, b) => Math.abs(b.effect) - Math.abs(a.effect));
}

/**
 * @param {Episode} episode
 * @returns {Map<string, number>}  sums over the calls of each node
 */
function features(episode) {
  const sums = new Map();
  const add = (/** @type {string} */ label, /** @type {number} */ value) =>
    sums.set(label, (sums.get(label) ?? 0) + value);
  for (const call of kept(episode)) {
    add(`${call.node}: tokens`, call.tokens);
    for (const [payer, part] of Object.entries(call.parts)) {
      add(`${call.node}: reward of ${payer}`, part);
    }
    for (const tool of call.tools ?? []) {
      add(`${call.node}: ${tool.name} succeeded`, tool.status === "success" ? 1 : 0);
    }
  }
  return sums;
}

/**
 * The position of the call of the previous (-1) or next (1) agent, at the same place of its lane if it can be.
 * @param {Episode} episode
 * @param {number | null} position
 * @param {number} direction
 * @param {string[]} agents
 */
export function otherAgent(episode, position, direction, agents) {
  const own = agents.filter((agent) => episode.calls.some((call) => call.agent === agent));
  if (position === null || own.length === 0) {
    return episode.calls.length ? 0 : null;
  }
  const from = episode.calls[position];
  const agent = own[(own.indexOf(from.agent) + direction + own.length) % own.length];
  const lane = episode.calls.flatMap((call, at) => (call.agent === agent ? [at] : []));
  const later = lane.filter((at) => episode.calls[at].turn === from.turn && episode.calls[at].round === from.round);
  return later[0] ?? lane[0];
}

/**
 * @template V
 * @param {Map<string, V[]>} map
 * @param {string} key
 * @param {V} value
 */
function append(map, key, value) {
  const list = map.get(key);
  if (list === undefined) {
    map.set(key, [value]);
  } else {
    list.push(value);
  }
}
