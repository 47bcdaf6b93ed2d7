// The page that is a file: unpacks the index of each run, and shows them.

import { loadIndex } from "./data.js";
import { place, RUNS, show } from "./main.js";
import { Model } from "./model.js";

try {
  const indexes = await Promise.all(Array.from({ length: RUNS }, (_, run) => loadIndex(run)));
  show(indexes.map((index, run) => new Model(index, run)));
} catch (error) {
  place.textContent = `This page cannot be shown: ${error}`;
  throw error;
}
