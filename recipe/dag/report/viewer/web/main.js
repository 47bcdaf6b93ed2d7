// The page: shows the screen that the address names.

import { html, render, useEffect, useLayoutEffect, useState } from "./html.js";
import { AuditScreen } from "./audit_screen.js";
import { CompareScreen } from "./compare_screen.js";
import { CreditScreen } from "./credit_screen.js";
import { EpisodeScreen } from "./episode_screen.js";
import { GroupScreen } from "./group_screen.js";
import { follow, inRun, screen } from "./keys.js";
import { ProblemsScreen } from "./problems_screen.js";
import { parseRoute, SCREENS } from "./route.js";
import { RunScreen } from "./run_screen.js";
import { Help, Search } from "./search.js";
import { TokensScreen } from "./tokens_screen.js";
import { nameOfRun } from "./compare.js";
import { Link } from "./ui.js";
import { go, useRoute } from "./use_data.js";
import { WhatIfScreen } from "./what_if_screen.js";
/** @import { Model } from "./model.js" */

/** @type {Record<string, any>} */
const VIEWS = {
  run: RunScreen,
  problems: ProblemsScreen,
  group: GroupScreen,
  episode: EpisodeScreen,
  tokens: TokensScreen,
  credit: CreditScreen,
  "what-if": WhatIfScreen,
  audit: AuditScreen,
  compare: CompareScreen,
};
/** Elements that take all keys themselves, and those that take Enter. */
const TYPED = "input, textarea, select";
const PRESSED = `${TYPED}, a, button, summary`;
const THEMES = ["light dark", "light", "dark"];

/** @param {{models: Model[], state: string}} props */
function Page({ models, state }) {
  const route = useRoute();
  const model = models[route.run] ?? models[0];
  const [overlay, setOverlay] = useState("");
  const [theme, setTheme] = useState(0);
  const wide = useWide();
  useLayoutEffect(() => {
    const onKey = (/** @type {KeyboardEvent} */ event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) {
        return;
      }
      if (event.key === "Escape" && overlay !== "") {
        setOverlay("");
        return;
      }
      const element = /** @type {Element} */ (event.target);
      if (element.closest(event.key === "Enter" ? PRESSED : TYPED) === null) {
        act(event);
      }
    };
    const act = (/** @type {KeyboardEvent} */ event) => {
      const opened = { "/": "search", "?": "help" }[event.key];
      const route = parseRoute(location.hash); // that of this moment: keys come faster than screens
      const target = overlay === "" && opened === undefined ? follow(event.key, route, models) : null;
      if (opened !== undefined) {
        setOverlay(opened);
      } else if (target !== null) {
        go(target);
      }
      if (opened !== undefined || target !== null) {
        event.preventDefault();
      }
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [overlay, models]);
  useEffect(() => {
    document.documentElement.style.colorScheme = THEMES[theme];
    dispatchEvent(new Event("theme"));
  }, [theme]);
  /** @type {Record<string, boolean>} */
  const empty = {
    credit: !model.splits.includes("train"),
    "what-if": model.effects.length === 0,
    audit: !model.splits.includes("train"),
    compare: models.length === 1,
  };
  const present = SCREENS.filter((name) => !empty[name]);
  return html`<nav aria-label="screens">
      ${present.map((name) => html`<${Link} key=${name} to=${screen(name, route, model)}
        current=${route.screen === name}>${name}<//>`)}
      ${models.length > 1 && route.screen !== "compare" && html`<select aria-label="run" value=${model.run} onChange=${(/** @type {any} */ event) =>
        go(inRun(Number(event.target.value), route, models))}>${models.map((one) => html`<option key=${one.run}
          value=${one.run}>${nameOfRun(one)}</option>`)}</select>`}
      <span class="fill" role="status">${state}</span>
      <button onClick=${() => setOverlay("search")}>search <kbd>/</kbd></button>
      <button onClick=${() => setTheme((theme + 1) % THEMES.length)} aria-label="light or dark">◐</button>
      <button onClick=${() => setOverlay("help")} aria-label="help">?</button>
    </nav>
    <main><${VIEWS[route.screen]} model=${model} models=${models} route=${route} wide=${wide} /></main>
    ${overlay === "search" && html`<${Search} model=${model} close=${() => setOverlay("")} />`}
    ${overlay === "help" && html`<${Help} close=${() => setOverlay("")} />`}`;
}

/** Whether there is room for a graph beside itself. */
function useWide() {
  const query = "(min-width: 900px)";
  const [wide, setWide] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const list = matchMedia(query);
    const follow = () => setWide(list.matches);
    list.addEventListener("change", follow);
    return () => list.removeEventListener("change", follow);
  }, []);
  return wide;
}

export const place = /** @type {HTMLElement} */ (document.getElementById("app"));
/** How many runs the page has. */
export const RUNS = Number(place.dataset.runs);

/**
 * Show runs, in place of what is shown of them.
 * @param {Model[]} models
 * @param {string} [state]  of the connection
 */
export function show(models, state = "") {
  const first = place.querySelector("main") === null;
  if (first) {
    place.textContent = "";
    const start = models[0].effects.length > 0 ? "what-if" : models.length > 1 ? "compare" : "";
    if (location.hash === "" && start !== "") {
      go({ screen: start });
    }
  }
  render(html`<${Page} models=${models} state=${state} />`, place);
  if (first) {
    performance.mark("shown");
  }
}
