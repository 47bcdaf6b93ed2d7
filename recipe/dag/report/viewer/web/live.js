// The page of `verl-dag watch`: asks the server for what the runs have written since, and shows it where the reader is.
/** @import { Index, Source } from "./data.js" */

import { forget, setSource } from "./data.js";
import { place, RUNS, show } from "./main.js";
import { Model } from "./model.js";

/** Milliseconds between two questions. */
const PAUSE = 1000;

/** @typedef {Index & {version: string, from: {episodes: number, problems: number}}} News */

/**
 * Of a run that cannot be read.
 * @type {Index}
 */
const UNREAD = {
  run: { name: "cannot be read", algorithm: {}, policies: {} },
  graph: null,
  agents: [],
  metrics: { steps: [], series: {} },
  problems: [],
  episodes: [],
  effects: [],
};

/** @type {(Model | null)[]} */
let models = Array(RUNS).fill(null);
const versions = Array(RUNS).fill("");
/** What is wrong with each run. */
const states = Array(RUNS).fill("");
/** @type {[unknown, string]} */
let drawn = [null, ""];

/**
 * The answer; null if there is nothing new. Throws an error whose message says what is wrong, and whose cause is the status
 * of the answer, if there is one.
 * @param {number} run
 * @param {string} name
 * @returns {Promise<any>}
 */
async function ask(run, name) {
  const response = await fetch(`${run}/${name}`).catch(() => {
    throw new Error("verl-dag watch does not answer");
  });
  if (!response.ok) {
    throw new Error(`verl-dag watch, run ${run + 1}: ${await response.text()}`, { cause: response.status });
  }
  return response.status === 204 ? null : response.json();
}

const pause = () => new Promise((done) => setTimeout(done, PAUSE));

function draw() {
  const state = states.find((one) => one !== "") ?? "live";
  if (drawn[0] === models && drawn[1] === state) {
    return;
  }
  drawn = [models, state];
  const ready = models.filter((one) => one !== null);
  if (ready.length === RUNS) {
    show(ready, state);
  } else if (state !== "live") {
    place.textContent = state;
  }
}

/**
 * Return a run with its news.
 * @param {number} run
 * @param {News} news
 */
function added(run, { version, from, ...index }) {
  const before = models[run]?.index;
  forget(run, (name) => name === "vocabularies" || from.episodes === 0);
  const episodes = [...(before?.episodes.slice(0, from.episodes) ?? []), ...index.episodes];
  const problems = [...(before?.problems.slice(0, from.problems) ?? []), ...index.problems];
  for (const episode of index.episodes) {
    episode.generation = version.split(".")[0];
  }
  versions[run] = version;
  return new Model({ ...index, episodes, problems }, run);
}

/**
 * Ask for a run's news for ever.
 * @param {number} run
 */
async function watch(run) {
  for (;;) {
    /** @type {Model | null} */
    let model = models[run];
    try {
      const news = await ask(run, `news?since=${versions[run]}`);
      model = news === null ? model : added(run, news);
      states[run] = "";
    } catch (/** @type {any} */ error) {
      states[run] = error.message;
      model ??= error.cause === undefined ? null : new Model(UNREAD, run); // the others are shown without it
    }
    if (model !== models[run]) {
      models = models.map((one, at) => (at === run ? model : one));
    }
    draw();
    await pause();
  }
}

/** @type {Source} */
async function part(run, name) {
  for (;;) {
    try {
      return await ask(run, name);
    } catch (/** @type {any} */ error) {
      if (error.cause !== undefined) {
        throw error; // of a file that was replaced; the news names other parts
      }
    }
    await pause();
  }
}

setSource(part);
for (let run = 0; run < RUNS; run += 1) {
  watch(run);
}
