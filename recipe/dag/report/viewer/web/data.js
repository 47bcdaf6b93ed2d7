// The page's data: types, and the parts of each run that are unpacked when they are first needed.
// recipe/dag/report/viewer/payload.py writes them.

/**
 * @typedef {{name: string, status: string, start_seconds?: number, seconds: number, waited?: number}} ToolNumbers
 *
 * @typedef {object} CallNumbers  the numbers of one call
 * @property {string} node
 * @property {string} agent
 * @property {string} policy
 * @property {number} turn
 * @property {number} round
 * @property {number | null} reward
 * @property {number | null} advantage  mean over its sampled tokens; null if it was not trained on
 * @property {Record<string, number>} parts  the reward by the node that paid it
 * @property {number} start  seconds since the episode's start
 * @property {number} seconds
 * @property {number} prompt_tokens
 * @property {number} tokens  sampled ones
 * @property {string} stop  why the last generation ended
 * @property {ToolNumbers[]} [tools]
 * @property {number} [generations]
 * @property {boolean} [done]
 * @property {boolean} [dropped]  a candidate that was not kept, or the call that judged it
 * @property {boolean} [untrained]
 * @property {boolean} [replayed]  repeats the episode that this one was forked from
 * @property {boolean} [unscored]
 * @property {number} [candidate]
 * @property {number} [candidates]
 * @property {number} [score]
 *
 * @typedef {{rule: string, reason: string, call: number | null}} Flag  call: its position; null: the whole episode
 *
 * @typedef {object} Episode  an episode's numbers
 * @property {number} step
 * @property {string} split  train or validation
 * @property {string} uid
 * @property {number} index
 * @property {number} problem  index of `Index.problems`
 * @property {number | null} outcome
 * @property {number} seconds
 * @property {number} turns
 * @property {number} attempts
 * @property {string} ended_by
 * @property {string} [fault]
 * @property {Flag[]} [flags]  what the rules of `report.monitors` found
 * @property {string} [forked]  what it is a fork of, in training
 * @property {[string, number, number][]} skips  node, turn, round
 * @property {CallNumbers[]} calls
 * @property {number} run  place of its run on the page
 * @property {string} [generation]  of its run's record, which a resume replaces while it is watched
 * @property {number} chunk
 * @property {number} slot  its place in the chunk
 *
 * @typedef {{text: string, truth: string, source: string, key: string}} Problem  text: the start of it; key: a digest of
 *   all of it and of the truth
 * @typedef {[number, number]} Place  rank, and distance from the rank's middle
 * @typedef {{id: string, kind: string, agent: string | null, policy: string | null, when: boolean,
 *   place: Place}} GraphNode
 * @typedef {{nodes: GraphNode[], edges: {places: Place[], loop: boolean}[]}} Graph
 * @typedef {{steps: number[], series: Record<string, (number | null)[]>}} Metrics
 *
 * @typedef {[string, number, number]} SlotName  node, turn, round
 * @typedef {{node: string, agent: string, turn: number, round: number, text: string}[]} Continuation
 *
 * @typedef {object} Effect  a recorded episode, played again with a change
 * @property {number} step
 * @property {string} split
 * @property {string} uid
 * @property {number} index
 * @property {SlotName} at  the call at which it forks
 * @property {string} agent  that call's
 * @property {{kind: "none" | "silence" | "say" | "swap", agent: string, text: string}} change
 * @property {string} weights
 * @property {number | null} recorded
 * @property {(number | null)[]} before  outcomes without the change, one for each of `after`
 * @property {(number | null)[]} after
 * @property {[number, number, number] | null} interval  mean difference, and its bounds
 * @property {SlotName | null} first  the first call after the fork with another answer
 * @property {boolean} repeats  whether the first continuation without a change is the record
 *
 * @typedef {object} Index
 * @property {Record<string, any>} run
 * @property {Graph | null} graph
 * @property {string[]} agents
 * @property {Metrics} metrics
 * @property {Problem[]} problems
 * @property {Episode[]} episodes
 * @property {Effect[]} effects
 *
 * @typedef {Record<string, any>} CallDetail  a call's record, and `prompt`, an index of its chunk's prompts
 * @typedef {Record<string, any> & {calls: CallDetail[]}} EpisodeDetail
 * @typedef {{prompts: string[], episodes: EpisodeDetail[]}} Chunk
 * @typedef {Record<string, Record<string, string>>} Vocabularies  token id -> text, by policy
 */

/** @typedef {(run: number, name: string) => Promise<any>} Source */

/** @type {Map<string, Promise<any>>} */
const parts = new Map();
/** @type {Source} */
let source = unpack;

/**
 * Take the parts from elsewhere than the page.
 * @param {Source} other
 */
export function setSource(other) {
  source = other;
}

/**
 * Load a part again when it is needed next.
 * @param {number} run
 * @param {(name: string) => boolean} which
 */
export function forget(run, which) {
  for (const name of [...parts.keys()]) {
    if (name.startsWith(`${run}/`) && which(name.slice(name.indexOf("/") + 1))) {
      parts.delete(name);
    }
  }
}

/**
 * Load a part, once; again if it could not be loaded.
 * @param {number} run
 * @param {string} name
 * @returns {Promise<any>}
 */
function load(run, name) {
  const key = `${run}/${name}`;
  let part = parts.get(key);
  if (part === undefined) {
    part = source(run, name);
    parts.set(key, part);
    part.catch(() => parts.delete(key));
  }
  return part;
}

/**
 * @param {number} run
 * @returns {Promise<Index>}
 */
export const loadIndex = (run) => load(run, "index");

/**
 * @param {number} run
 * @returns {Promise<Vocabularies>}
 */
export const loadVocabularies = (run) => load(run, "vocabularies");

/**
 * @param {number} run
 * @returns {Promise<Continuation[][]>}  by effect
 */
export const loadContinuations = (run) => load(run, "continuations");

/**
 * Load an episode's record, and the prompts of its calls.
 * @param {Episode} episode
 * @returns {Promise<{detail: EpisodeDetail, prompts: string[]}>}
 */
export async function loadDetail({ run, chunk, slot }) {
  const name = `chunk-${chunk}`;
  /** @type {Chunk} */
  let loaded = await load(run, name);
  if (slot >= loaded.episodes.length) {
    forget(run, (other) => other === name); // it has grown since
    loaded = await load(run, name);
  }
  if (slot >= loaded.episodes.length) {
    throw new Error("the run was resumed from an earlier step");
  }
  return { detail: loaded.episodes[slot], prompts: loaded.prompts };
}

/** @type {Source} */
async function unpack(run, name) {
  const element = document.getElementById(`${run}/${name}`);
  if (element === null) {
    throw new Error(`the page has no part ${name}`);
  }
  const text = atob(element.textContent ?? "");
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i += 1) {
    bytes[i] = text.charCodeAt(i);
  }
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}
