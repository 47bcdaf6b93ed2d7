// The page's data: types, and the parts that are unpacked when they are first needed.
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
 * @property {boolean} [unscored]
 * @property {number} [candidate]
 * @property {number} [candidates]
 * @property {number} [score]
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
 * @property {[string, number, number][]} skips  node, turn, round
 * @property {CallNumbers[]} calls
 * @property {number} chunk
 * @property {number} slot  its place in the chunk
 *
 * @typedef {{text: string, truth: string, source: string}} Problem
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

/** @type {Map<string, Promise<any>>} */
const parts = new Map();

/**
 * Unpack a part of the page, once.
 * @param {string} name
 * @returns {Promise<any>}
 */
export function load(name) {
  let part = parts.get(name);
  if (part === undefined) {
    part = unpack(name);
    parts.set(name, part);
  }
  return part;
}

/** @returns {Promise<Index>} */
export const loadIndex = () => load("index");

/** @returns {Promise<Vocabularies>} */
export const loadVocabularies = () => load("vocabularies");

/** @returns {Promise<Continuation[][]>}  by effect */
export const loadContinuations = () => load("continuations");

/**
 * @param {number} number
 * @returns {Promise<Chunk>}
 */
export const loadChunk = (number) => load(`chunk-${number}`);

/** @param {string} name */
async function unpack(name) {
  const element = document.getElementById(name);
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
