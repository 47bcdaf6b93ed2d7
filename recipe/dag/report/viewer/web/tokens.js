// The tokens of a call: their texts, and the numbers that the record has of each. Pure.
/** @import { CallDetail } from "./data.js" */

/**
 * @typedef {{text: string, sampled: boolean}} Segment
 * @typedef {{name: string, explains: string, values: (number | null)[], signed: boolean}} Column
 */

/**
 * The text of a token; its id in brackets if the tokenizer is not known.
 * @param {Record<string, string> | undefined} vocabulary
 * @param {number} id
 */
export const tokenText = (vocabulary, id) => vocabulary?.[id] ?? `⟨${id}⟩`;

/**
 * The response as runs of sampled and of other tokens; null without a vocabulary.
 * @param {CallDetail} call
 * @param {Record<string, string> | undefined} vocabulary
 * @returns {Segment[] | null}
 */
export function segments(call, vocabulary) {
  if (vocabulary === undefined || call.response_ids.length === 0) {
    return null;
  }
  /** @type {Segment[]} */
  const found = [];
  call.response_ids.forEach((/** @type {number} */ id, /** @type {number} */ at) => {
    const sampled = call.response_mask[at] === 1;
    if (found.at(-1)?.sampled !== sampled) {
      found.push({ text: "", sampled });
    }
    found[found.length - 1].text += tokenText(vocabulary, id);
  });
  return found;
}

/**
 * What a call's tokens can be coloured by; null where a token was not sampled.
 * @param {CallDetail} call
 * @param {number | null | undefined} advantage  mean over the call, for a record without the tokens' own
 * @returns {Column[]}
 */
export function columnsOf(call, advantage) {
  const mask = call.response_mask;
  const masked = (/** @type {number[]} */ values) => values.map((value, at) => (mask[at] ? value : null));
  const own = call.token_columns ?? {};
  const server = call.rollout_log_probs;
  /** @type {Column[]} */
  const columns = [];
  if (own.advantage) {
    columns.push({
      name: "advantage",
      explains: "what the update was told of the token",
      values: masked(own.advantage),
      signed: true,
    });
  } else if (advantage !== null && advantage !== undefined) {
    columns.push({
      name: "advantage",
      explains: "the call's mean; report.token_columns=true records each token's",
      values: mask.map((/** @type {number} */ bit) => (bit ? advantage : null)),
      signed: true,
    });
  }
  columns.push({
    name: "log-prob",
    explains: "of the server that sampled it, in nats",
    values: masked(server),
    signed: false,
  });
  if (own.trainer_log_prob) {
    const trainer = own.trainer_log_prob;
    columns.push({
      name: "trainer − server",
      explains: "difference of the log-probs; the importance ratio is its exponential",
      values: masked(trainer.map((/** @type {number} */ value, /** @type {number} */ at) => value - server[at])),
      signed: true,
    });
  }
  for (const [key, explains] of [
    ["entropy", "of the trainer's distribution, in nats"],
    ["value", "of the critic"],
    ["importance", "weight of the token in the loss"],
  ]) {
    if (own[key]) {
      columns.push({ name: key, explains, values: masked(own[key]), signed: key === "value" });
    }
  }
  columns.push({
    name: "mask",
    explains: "sampled tokens; the others are the template's and the tools'",
    values: mask,
    signed: false,
  });
  return columns;
}
