// The page of `verl-dag watch`: asks the server for what the runs have written since, and shows it where the reader is.
/** @import { Index } from "./data.js" */

import { forget, setSource } from "./data.js";
import { RUNS, show } from "./main.js";
import { Model } from "./model.js";

/** Milliseconds between two questions. */
const PAUSE = 1000;

/** @typedef {Index & {version: string, from: {episodes: number, problems: number}}} News */

/** @type {Model[]} */
let models = [];
const versions = Array(RUNS).fill("");
let state = "";
/** @type {[Model[], string]} */
let drawn = [models, state];

/**
 * The answer; null if there is nothing new. Asks again until the server answers.
 * @param {string} path
 * @returns {Promise<any>}
 */
async function ask(path) {
  for (;;) {
    try {
      const response = await fetch(path);
      if (response.ok) {
        state = "live";
        return response.status === 204 ? null : await response.json();
      }
      state = `verl-dag watch: ${await response.text()}`;
    } catch {
      state = "verl-dag watch does not answer";
    }
    draw();
    await pause();
  }
}

const pause = () => new Promise((done) => setTimeout(done, PAUSE));

function draw() {
  if (models.length > 0 && (drawn[0] !== models || drawn[1] !== state)) {
    drawn = [models, state];
    show(models, state);
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
  versions[run] = version;
  return new Model({ ...index, episodes, problems }, run);
}

setSource((run, name) => ask(`/${run}/${name}`));
for (;;) {
  const news = await Promise.all(versions.map((version, run) => ask(`/${run}/news?since=${version}`)));
  if (news.some((own) => own !== null)) {
    models = news.map((own, run) => (own === null ? models[run] : added(run, own)));
  }
  draw();
  await pause();
}
