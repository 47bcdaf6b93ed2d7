// The time of each step, by phase.

import { html } from "./html.js";
import { seconds } from "./format.js";
/** @import { Metrics } from "./data.js" */

/** Parts of `timing/step`; what they leave is `other`. */
const PHASES = [
  ["rollout", "hsl(212 60% 52%)"],
  ["gap", "hsl(0 0% 60%)"],
  ["train", "hsl(35 80% 50%)"],
  ["sync", "hsl(285 45% 58%)"],
  ["validation", "hsl(150 45% 45%)"],
];

/**
 * @param {Metrics} metrics
 * @param {number} at  position of the step
 * @returns {{name: string, color: string, seconds: number}[]}
 */
function phasesAt(metrics, at) {
  const parts = PHASES.map(([name, color]) => ({ name, color, seconds: metrics.series[`timing/${name}`]?.[at] ?? 0 }));
  const whole = metrics.series["timing/step"]?.[at] ?? 0;
  const rest = whole - parts.reduce((sum, part) => sum + part.seconds, 0);
  return [...parts, { name: "other", color: "var(--line)", seconds: Math.max(0, rest) }].filter(
    (part) => part.seconds > 0,
  );
}

/** @param {{metrics: Metrics, at: number, choose: (step: number) => void}} props */
export function Phases({ metrics, at, choose }) {
  const { steps, series } = metrics;
  if (series["timing/step"] === undefined) {
    return null;
  }
  const most = series["timing/step"].reduce((/** @type {number} */ a, b) => Math.max(a, b ?? 0), 0);
  const chosen = phasesAt(metrics, steps.indexOf(at));
  return html`<figure class="phases"><figcaption>Seconds of each step, by phase</figcaption>
    <div class="bars" role="img"
      aria-label=${`step ${at}: ${chosen.map((part) => `${part.name} ${seconds(part.seconds)}`).join(", ")}`}>
      ${steps.map(
        (step, place) => html`<div key=${step} class=${step === at ? "bar chosen" : "bar"} onClick=${() => choose(step)}
        title=${`step ${step}: ${seconds(series["timing/step"][place])}`}>
        ${phasesAt(metrics, place).map((part) => html`<span key=${part.name}
          style=${{ height: `${(100 * part.seconds) / most}%`, background: part.color }}></span>`)}
      </div>`,
      )}
    </div>
    <ul class="legend">${chosen.map(
      (part) => html`<li key=${part.name}><span class="swatch" style=${{ background: part.color }}></span>
      ${part.name} <b>${seconds(part.seconds)}</b></li>`,
    )}</ul>
  </figure>`;
}
