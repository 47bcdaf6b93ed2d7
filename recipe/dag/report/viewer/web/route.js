// Where the reader is: the part of the address after #. Every call has an address of its own. Pure.

/**
 * @typedef {object} Route
 * @property {string} screen  run, problems, group, episode, tokens, credit or what-if
 * @property {number | null} step  null: the last one
 * @property {string} split
 * @property {string} uid
 * @property {number} index
 * @property {number | null} call  position of a call, or of an effect; null: none is chosen
 * @property {string} column  what tokens are coloured by; empty: the first that there is
 */

export const SCREENS = ["run", "problems", "group", "episode", "tokens", "credit", "what-if"];

/** @type {Route} */
const START = { screen: "run", step: null, split: "", uid: "", index: 0, call: null, column: "" };

/**
 * @param {string} hash  such as #/episode/12/train/0-17/3/1
 * @returns {Route}
 */
export function parseRoute(hash) {
  const [screen, step, split, uid, index, call, column] = hash
    .replace(/^#?\/?/, "")
    .split("/")
    .map(decode);
  return {
    screen: SCREENS.includes(screen) ? screen : START.screen,
    step: whole(step),
    split: split ?? "",
    uid: uid ?? "",
    index: whole(index) ?? 0,
    call: whole(call),
    column: column ?? "",
  };
}

/**
 * @param {Partial<Route>} route
 * @returns {string}
 */
export function formatRoute(route) {
  const { screen, step, split, uid, index, call, column } = { ...START, ...route };
  const parts = [screen, step ?? "", split, uid, split === "" || uid === "" ? "" : index, call ?? "", column];
  const text = parts.map((part) => encodeURIComponent(String(part))).join("/");
  return `#/${text.replace(/\/+$/, "")}`;
}

/** @param {string} text */
function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** @param {string | undefined} text */
const whole = (text) => (text !== undefined && /^\d+$/.test(text) ? Number(text) : null);
