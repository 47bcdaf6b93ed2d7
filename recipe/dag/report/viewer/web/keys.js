// What each key does.
/** @import { Model } from "./model.js" */
/** @import { Route } from "./route.js" */

import { otherAgent } from "./model.js";
import { SCREENS } from "./route.js";
import { routeOf } from "./what_if_screen.js";

export const KEYS = [
  ["1 to 7", "the screens: run, problems, group, episode, tokens, credit, what-if"],
  ["j k", "next and previous call, or effect"],
  ["l h", "call of the next and of the previous agent"],
  ["] [", "next and previous sibling: the same problem in the same step"],
  ["} {", "the same problem at the next and at the previous step"],
  ["/", "search"],
  ["?", "these keys"],
  ["Esc", "close, or leave the call"],
];

/**
 * The route to which a key leads; null if it leads nowhere.
 * @param {string} key
 * @param {Route} route
 * @param {Model} model
 * @returns {Partial<Route> | null}
 */
export function follow(key, route, model) {
  if (/^[1-7]$/.test(key)) {
    return screen(SCREENS[Number(key) - 1], route, model);
  }
  if ("[]{}".includes(key) && key !== "" && route.screen !== "what-if") {
    return beside(key, route, model);
  }
  if (route.screen === "what-if") {
    const to = { j: (route.call ?? -1) + 1, k: (route.call ?? 0) - 1 }[key];
    return to === undefined || model.effects[to] === undefined ? null : routeOf(model.effects[to], to);
  }
  const episode = model.episodeAt(route);
  if (episode === undefined || !["episode", "tokens"].includes(route.screen)) {
    return null;
  }
  const last = episode.calls.length - 1;
  switch (key) {
    case "j":
      return { ...route, call: Math.min(last, route.call === null ? 0 : route.call + 1) };
    case "k":
      return { ...route, call: Math.max(0, (route.call ?? 1) - 1) };
    case "l":
      return { ...route, call: otherAgent(episode, route.call, 1, model.agents) };
    case "h":
      return { ...route, call: otherAgent(episode, route.call, -1, model.agents) };
    case "Escape":
      return route.screen === "tokens" ? { ...route, screen: "episode" } : { ...route, call: null };
    default:
      return null;
  }
}

/**
 * A screen, of the episode that is open or of the last step's first one.
 * @param {string} name
 * @param {Route} route
 * @param {Model} model
 */
export function screen(name, route, model) {
  const wanted = route.split === "" ? "train" : route.split;
  const same = model.episodes.filter((one) => one.split === wanted);
  const shown = same.length ? same : model.episodes;
  const first = model.episodeAt(route) ?? shown.find((one) => one.step === shown[shown.length - 1].step);
  if (name === "run" || name === "credit") {
    return { screen: name, step: route.step };
  }
  if (name === "what-if") {
    const at = model.effects.findIndex((one) => one.uid === route.uid && one.step === route.step);
    return model.effects.length === 0 ? { screen: name } : routeOf(model.effects[Math.max(at, 0)], Math.max(at, 0));
  }
  if (name === "problems" || first === undefined) {
    return { screen: "problems", split: route.split };
  }
  const { split, uid, index } = first;
  const call = name === "group" ? null : name === "tokens" ? (route.call ?? 0) : route.call;
  return { screen: name, step: first.step, split, uid, index: name === "group" ? 0 : index, call };
}

/**
 * A sibling, or the same problem at another step.
 * @param {string} key
 * @param {Route} route
 * @param {Model} model
 */
function beside(key, route, model) {
  const group = model.groupAt(route);
  if (group.length === 0) {
    return null;
  }
  if (key === "[" || key === "]") {
    const at = group.findIndex((one) => one.index === route.index);
    const other = group[at + (key === "]" ? 1 : -1)];
    return other === undefined || route.screen === "group" ? null : { ...route, index: other.index };
  }
  const history = model.history(group[0]);
  const other = history[history.indexOf(group) + (key === "}" ? 1 : -1)];
  if (other === undefined) {
    return null;
  }
  const index = other.find((one) => one.index === route.index)?.index ?? other[0].index;
  return { ...route, step: other[0].step, uid: other[0].uid, index };
}
