// Where the reader is: the part of the address after #. Every call has an address of its own. Pure.

/**
 * @typedef {object} Route
 * @property {number} run  its place on the page
 * @property {string} screen  one of SCREENS
 * @property {number | null} step  null: the last one; to compare runs, the tokens that their training has sampled
 * @property {string} split
 * @property {string} uid
 * @property {number} index
 * @property {number | null} call  position of a call, of an effect, or of a problem to compare; null: none is chosen
 * @property {string} column  what tokens are coloured by, or the rule that is audited; empty: the first that there is, all
 */

export const SCREENS = ["run", "problems", "group", "episode", "tokens", "credit", "what-if", "audit", "compare"];

/** @type {Route} */
const START = { run: 0, screen: "run", step: null, split: "", uid: "", index: 0, call: null, column: "" };

/**
 * @param {string} hash  such as #/episode/12/train/0-17/3/1, or #/2/episode/... of the second run
 * @returns {Route}
 */
export function parseRoute(hash) {
  const parts = hash
    .replace(/^#?\/?/, "")
    .split("/")
    .map(decode);
  const run = whole(parts[0]);
  const [screen, step, split, uid, index, call, column] = run === null ? parts : parts.slice(1);
  return {
    run: Math.max(0, (run ?? 1) - 1),
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
  const { run, screen, step, split, uid, index, call, column } = { ...START, ...route };
  const parts = [...(run === 0 ? [] : [run + 1]), screen, step ?? "", split, uid, split === "" || uid === "" ? "" : index, call ?? "", column];
  const text = parts.map((part) => encodeURIComponent(String(part).toWellFormed())).join("/");
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
