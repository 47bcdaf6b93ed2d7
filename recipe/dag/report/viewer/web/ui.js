// Small components that several screens use.

import { html, useState } from "./html.js";
import { signColor } from "./color.js";
import { counted, signed } from "./format.js";
import { visible } from "./text.js";
import { addressOf } from "./use_data.js";
/** @import { Route } from "./route.js" */

/** Characters of a text that are shown at first: a browser that lays out a line of a million is slow. */
const SHOWN = 4000;

/**
 * A text as it is, a part of it first.
 * @param {{text: string, label?: string, fold?: number}} props  fold: characters at the start that are known already
 */
export function LongText({ text, label, fold = 0 }) {
  const [shown, setShown] = useState(SHOWN);
  const [open, setOpen] = useState(false);
  const start = open ? 0 : fold;
  const rest = text.length - start - shown;
  return html`<div class="text" role="region" aria-label=${label}>
    ${
      fold > 0 &&
      html`<button class="more" onClick=${() => setOpen(!open)}>
      ${open ? "fold" : "show"} the ${counted(fold, "character")} that it shares with an earlier prompt</button>`
    }
    <pre dir="auto">${visible(text.slice(start, start + shown))}</pre>
    ${
      rest > 0 &&
      html`<button class="more" onClick=${() => setShown(shown * 8)}>
      ${counted(rest, "more character")}</button>`
    }
  </div>`;
}

/**
 * A signed number on the colour of its size.
 * @param {{value: number | null | undefined, most: number, title?: string}} props
 */
export function Signed({ value, most, title }) {
  return html`<span class="signed" title=${title} style=${{ background: signColor(value, most) }}>${signed(value)}
    </span>`;
}

/**
 * @param {{to: Partial<Route>, class?: string, title?: string, children?: any, current?: boolean}} props
 */
export function Link({ to, children, current, ...rest }) {
  return html`<a href=${addressOf(to)} aria-current=${current ? "true" : undefined} ...${rest}>${children}</a>`;
}

/** @param {{episode: {outcome: number | null, fault?: string}}} props */
export function Outcome({ episode }) {
  const [sign, word, kind] =
    episode.fault !== undefined
      ? ["\u26a0", `lost: ${episode.fault} fault`, "lost"]
      : episode.outcome === null
        ? ["\u25cb", "not graded", "open"]
        : episode.outcome >= 0.5
          ? ["\u2713", "solved", "good"]
          : ["\u2717", "not solved", "bad"];
  return html`<span class=${`outcome ${kind}`}><span aria-hidden="true">${sign}</span> ${word}</span>`;
}

/**
 * Names and values; those without a value are left out.
 * @param {{facts: [string, any][]}} props
 */
export function Facts({ facts }) {
  const known = facts.filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== false);
  return html`<dl>
    ${known.map(
      ([name, value]) => html`<div key=${name}><dt>${visible(name)}</dt><dd>${visible(String(value))}</dd></div>`,
    )}
  </dl>`;
}

/**
 * Buttons of which one is chosen.
 * @param {{label: string, options: string[], value: string, choose: (option: string) => void}} props
 */
export function Choice({ label, options, value, choose }) {
  return html`<div class="choice" role="group" aria-label=${label}>
    ${options.map((option) => html`<button key=${option} aria-pressed=${option === value}
      onClick=${() => choose(option)}>${option}</button>`)}
  </div>`;
}

/**
 * Tell assistive technology and the eye that something takes a moment.
 * @param {{what: string}} props
 */
export const Waiting = ({ what }) => html`<p class="empty" role="status">Unpacking ${what} ...</p>`;
