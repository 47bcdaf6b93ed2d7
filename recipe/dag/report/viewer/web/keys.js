// What each key does.
/** @import { Model } from "./model.js" */
/** @import { Route } from "./route.js" */

import { flagged, routeOfFlagged } from "./audit.js";
import { shared } from "./compare.js";
import { otherAgent } from "./model.js";
import { SCREENS } from "./route.js";
import { routeOf } from "./what_if_screen.js";

export const KEYS = [
  ["1 to 9", `the screens: ${SCREENS.join(", ")}`],
  ["j k", "next and previous call, effect, flagged episode, or problem to compare"],
  ["Enter", "open the flagged episode"],
  ["l h", "call of the next and of the previous agent"],
  ["] [", "next and previous sibling: the same problem in the same step"],
  ["} {", "the same problem at the next and at the previous step"],
  ["r", "the next run, at the same problem"],
  ["/", "search"],
  ["?", "these keys"],
  ["Esc", "close, or leave the call"],
];

/**
 * The route to which a key leads; null if it leads nowhere.
 * @param {string} key
 * @param {Route} route
 * @param {Model[]} models
 * @returns {Partial<Route> | null}
 */
export function follow(key, route, models) {
  const model = models[route.run] ?? models[0];
  if (/^[1-9]$/.test(key)) {
    return screen(SCREENS[Number(key) - 1], route, model);
  }
  if (route.screen === "compare") {
    return toCompare(key, route, models);
  }
  if (key === "r") {
    return models.length > 1 ? inRun((model.run + 1) % models.length, route, models) : null;
  }
  if (route.screen === "audit") {
    return toFlagged(key, route, model);
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
 * @returns {Partial<Route>}
 */
export function screen(name, route, model) {
  if (route.screen === "compare") {
    // its step counts tokens, and its call is a problem
    return name === "compare" ? route : screen(name, { ...route, screen: name, step: null, call: null }, model);
  }
  if (route.screen === "what-if" && name !== "what-if") {
    // its call is an effect
    return screen(name, { ...route, screen: "episode", call: callOf(route, model) }, model);
  }
  const wanted = route.split === "" ? "train" : route.split;
  const same = model.episodes.filter((one) => one.split === wanted);
  const shown = same.length ? same : model.episodes;
  const first = model.episodeAt(route) ?? shown.find((one) => one.step === shown[shown.length - 1].step);
  if (name === "run" || name === "credit") {
    return { screen: name, step: route.step };
  }
  if (name === "audit") {
    const { step, split, uid, index } = route;
    return model.episodeAt(route)?.flags ? { screen: name, step, split, uid, index } : { screen: name };
  }
  if (name === "what-if") {
    const at = route.screen === name && route.call !== null ? route.call : nearest(route, model);
    return model.effects[at] === undefined ? { screen: name } : routeOf(model.effects[at], at);
  }
  if (name === "compare") {
    return { screen: name, split: route.split, call: model.run === 0 ? (model.groupAt(route)[0]?.problem ?? null) : null };
  }
  if (name === "problems" || first === undefined) {
    return { screen: "problems", split: route.split };
  }
  const { split, uid, index } = first;
  const call = name === "group" ? null : name === "tokens" ? (route.call ?? 0) : route.call;
  return { screen: name, step: first.step, split, uid, index: name === "group" ? 0 : index, call };
}

/**
 * The number of the effect that is the nearest to an episode's call; 0 if none is on its problem.
 * @param {Route} route
 * @param {Model} model
 */
function nearest(route, model) {
  const near = model.effects.map((one, call) => {
    const problem = one.uid === route.uid && one.step === route.step;
    const episode = problem && one.index === route.index;
    return Number(problem) + Number(episode) + Number(episode && callOf({ ...route, call }, model) === route.call);
  });
  return near.indexOf(Math.max(...near));
}

/**
 * The call at which an effect begins; null if none is chosen, or its record is not on the page.
 * @param {Route} route
 * @param {Model} model
 */
function callOf(route, model) {
  const [node, turn, round] = model.effects[route.call ?? -1]?.at ?? [];
  const calls = model.episodeAt(route)?.calls ?? [];
  const call = calls.findIndex((one) => !one.dropped && one.node === node && one.turn === turn && one.round === round);
  return call < 0 ? null : call;
}

/**
 * The next or previous problem of those that are compared.
 * @param {string} key
 * @param {Route} route
 * @param {Model[]} models
 */
function toCompare(key, route, models) {
  if (!"jk".includes(key) || key === "" || models.length < 2) {
    return null;
  }
  const { rows } = shared(models, route);
  const at = rows.findIndex((row) => row.problem === route.call);
  const other = rows[at < 0 ? 0 : at + (key === "j" ? 1 : -1)];
  return other === undefined ? null : { ...route, call: other.problem };
}

/**
 * The next or previous flagged episode, or the one that is chosen, on its own screen.
 * @param {string} key
 * @param {Route} route
 * @param {Model} model
 */
function toFlagged(key, route, model) {
  const rows = flagged(model, route.column);
  const at = rows.findIndex((row) => row.episode === model.episodeAt(route));
  const to = { j: at + 1, k: Math.max(0, at - 1), Enter: at }[key];
  return to === undefined || rows[to] === undefined
    ? null
    : routeOfFlagged(rows[to], key === "Enter" ? { screen: "episode" } : route);
}

/**
 * What a route shows, in another run: the same problem, at the last step up to the same one.
 * @param {number} run
 * @param {Route} route
 * @param {Model[]} models
 * @returns {Partial<Route>}
 */
export function inRun(run, route, models) {
  const [model, other] = [models[route.run] ?? models[0], models[run]];
  if (route.screen === "what-if") {
    return inRun(run, { ...route, screen: "episode", call: callOf(route, model) }, models); // only the first has effects
  }
  const first = model.groupAt(route)[0];
  if (first === undefined) {
    return { ...screen(route.screen, { ...route, uid: "" }, other), run };
  }
  const { split, step } = first;
  const groups = other.history({ split, problem: other.numberOf(model.index.problems[first.problem]) });
  const near = groups.findLast((group) => group[0].step <= step) ?? groups[0];
  if (near === undefined) {
    return { screen: "problems", split, run };
  }
  const episode = near.find((one) => one.index === route.index) ?? near[0];
  return { ...route, run, step: episode.step, uid: episode.uid, index: episode.index };
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
