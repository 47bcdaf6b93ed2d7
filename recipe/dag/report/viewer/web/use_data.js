// Hooks for what is loaded later, and for the address.

import { useEffect, useLayoutEffect, useState } from "./html.js";
import { loadContinuations, loadDetail, loadVocabularies } from "./data.js";
import { formatRoute, parseRoute } from "./route.js";
/** @import { Continuation, Episode, EpisodeDetail, Vocabularies } from "./data.js" */
/** @import { Model } from "./model.js" */
/** @import { Route } from "./route.js" */

/** @typedef {{detail: EpisodeDetail, prompts: string[]}} Loaded */

/**
 * The record of an episode; null until it is loaded.
 * @param {Episode | undefined} episode
 * @returns {Loaded | null}
 */
export const useDetail = (episode) => useDetails([episode])?.[0] ?? null;

/**
 * The records of episodes; null until all are loaded.
 * @param {(Episode | undefined)[]} episodes
 * @returns {(Loaded | undefined)[] | null}
 */
export function useDetails(episodes) {
  const key = episodes.map((one) => one && [one.run, one.generation, one.chunk, one.slot].join("/")).join();
  return useLoaded(() => Promise.all(episodes.map((one) => one && loadDetail(one))), key);
}

/**
 * @param {Model} model
 * @returns {Vocabularies | null}
 */
export const useVocabularies = (model) => useLoaded(() => loadVocabularies(model.run), model.run, model);

/**
 * @param {Model} model
 * @returns {Continuation[][] | null}
 */
export const useContinuations = (model) => useLoaded(() => loadContinuations(model.run), model.run);

/**
 * What a promise brings; null until then. The earlier one stays until a new `version` of the same `key` is there.
 * @template T
 * @param {() => Promise<T>} start
 * @param {string | number} key
 * @param {unknown} [version]
 * @returns {T | null}
 */
function useLoaded(start, key, version) {
  const [loaded, setLoaded] = useState(/** @type {{key: any, value: T} | null} */ (null));
  useEffect(() => {
    let wanted = true;
    start().then((value) => wanted && setLoaded({ key, value }), console.warn);
    return () => {
      wanted = false;
    };
  }, [key, version]);
  return loaded !== null && loaded.key === key ? loaded.value : null;
}

/** @returns {Route} */
export function useRoute() {
  const [route, setRoute] = useState(() => parseRoute(location.hash));
  useLayoutEffect(() => {
    const follow = () => setRoute(parseRoute(location.hash));
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return route;
}

/**
 * The address of a screen, of the run that is shown if the route names none.
 * @param {Partial<Route>} route
 */
export const addressOf = (route) => formatRoute({ run: parseRoute(location.hash).run, ...route });

/** @param {Partial<Route>} route */
export function go(route) {
  location.hash = addressOf(route);
}
