// Hooks for what is unpacked later, and for the address.

import { useEffect, useState } from "./html.js";
import { loadChunk, loadContinuations, loadVocabularies } from "./data.js";
import { formatRoute, parseRoute } from "./route.js";
/** @import { Chunk, Continuation, Episode, EpisodeDetail, Vocabularies } from "./data.js" */
/** @import { Route } from "./route.js" */

/**
 * The record of an episode; null until it is unpacked.
 * @param {Episode | undefined} episode
 * @returns {{detail: EpisodeDetail, prompts: string[]} | null}
 */
export function useDetail(episode) {
  const chunk = useLoaded(() => (episode === undefined ? null : loadChunk(episode.chunk)), episode?.chunk);
  return chunk === null || episode === undefined
    ? null
    : { detail: chunk.episodes[episode.slot], prompts: chunk.prompts };
}

/**
 * The records of siblings; null until they are unpacked.
 * @param {Episode[]} group
 * @returns {EpisodeDetail[] | null}
 */
export function useDetails(group) {
  /** @type {Chunk | null} */
  const chunk = useLoaded(() => (group.length ? loadChunk(group[0].chunk) : null), group[0]?.chunk);
  return chunk === null ? null : group.map((episode) => chunk.episodes[episode.slot]);
}

/** @returns {Vocabularies | null} */
export const useVocabularies = () => useLoaded(loadVocabularies, "vocabularies");

/** @returns {Continuation[][] | null} */
export const useContinuations = () => useLoaded(loadContinuations, "continuations");

/**
 * @template T
 * @param {() => Promise<T> | null} start
 * @param {string | number | undefined} key
 * @returns {T | null}
 */
function useLoaded(start, key) {
  const [loaded, setLoaded] = useState(/** @type {{key: any, value: T} | null} */ (null));
  useEffect(() => {
    let wanted = true;
    start()?.then((value) => wanted && setLoaded({ key, value }));
    return () => {
      wanted = false;
    };
  }, [key]);
  return loaded !== null && loaded.key === key ? loaded.value : null;
}

/** @returns {Route} */
export function useRoute() {
  const [route, setRoute] = useState(() => parseRoute(location.hash));
  useEffect(() => {
    const follow = () => setRoute(parseRoute(location.hash));
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return route;
}

/** @param {Partial<Route>} route */
export function go(route) {
  location.hash = formatRoute(route);
}
