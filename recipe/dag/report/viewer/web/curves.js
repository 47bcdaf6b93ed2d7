// Curves over the steps, drawn by uPlot.

import { html, useEffect, useRef } from "./html.js";
import { short } from "./format.js";

/**
 * @typedef {object} Curve
 * @property {string} label
 * @property {(number | null)[]} values  per step
 * @property {string} color
 * @property {[number | null, number | null][]} [interval]  shaded
 */

const HEIGHT = 180;

/**
 * @param {{title: string, steps: number[], curves: Curve[], at: number, choose: (step: number) => void,
 *   range?: [number, number]}} props  at: the chosen step; range: of the values, if it is not theirs
 */
export function Curves({ title, steps, curves, at, choose, range }) {
  const place = useRef(/** @type {HTMLDivElement | null} */ (null));
  const shape = JSON.stringify([title, steps.length, curves.map((one) => [one.label, one.color])]);
  useEffect(() => {
    const element = place.current;
    if (element === null) {
      return undefined;
    }
    const { uPlot } = /** @type {any} */ (globalThis);
    const plot = new uPlot(options(element, steps, curves, at, choose, range), columns(steps, curves), element);
    const observer = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height: HEIGHT }));
    observer.observe(element);
    const theme = matchMedia("(prefers-color-scheme: dark)");
    const redraw = () => plot.status === 1 && plot.redraw();
    theme.addEventListener("change", redraw);
    addEventListener("theme", redraw);
    return () => {
      observer.disconnect();
      theme.removeEventListener("change", redraw);
      removeEventListener("theme", redraw);
      plot.destroy();
    };
  }, [shape, at]);
  const last = curves
    .map((one) => `${one.label} ${short(one.values[steps.indexOf(at)] ?? one.values.at(-1))}`)
    .join(", ");
  return html`<figure class="curves"><figcaption>${title}</figcaption>
    <div ref=${place} role="img" aria-label=${`${title}: ${last}`}></div>
    <ul class="legend">${curves.map(
      (one) => html`<li key=${one.label}>
      <span class="swatch" style=${{ background: one.color }}></span>${one.label}
      <b>${short(one.values[steps.indexOf(at)])}</b></li>`,
    )}</ul>
  </figure>`;
}

/**
 * @param {number[]} steps
 * @param {Curve[]} curves
 */
function columns(steps, curves) {
  const bands = curves.flatMap((one) =>
    one.interval ? [one.interval.map((pair) => pair[0]), one.interval.map((pair) => pair[1])] : [],
  );
  return [steps, ...curves.map((one) => one.values), ...bands];
}

/**
 * @param {HTMLElement} element
 * @param {number[]} steps
 * @param {Curve[]} curves
 * @param {number} at
 * @param {(step: number) => void} choose
 * @param {[number, number]} [range]
 */
function options(element, steps, curves, at, choose, range) {
  const axis = {
    stroke: () => variable("--text"),
    grid: { stroke: () => variable("--line"), width: 1 },
    ticks: { stroke: () => variable("--line"), width: 1 },
    font: "11px system-ui, sans-serif",
  };
  const edge = { width: 0, points: { show: false } };
  const banded = curves.filter((one) => one.interval);
  return {
    width: element.clientWidth || 320,
    height: HEIGHT,
    legend: { show: false },
    cursor: { points: { size: 6 } },
    scales: { x: { time: false }, y: range === undefined ? {} : { range } },
    axes: [
      { ...axis, size: 28 },
      { ...axis, size: 46, values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map(short) },
    ],
    series: [
      {},
      ...curves.map((one) => ({
        label: one.label,
        stroke: resolved(element, one.color),
        width: 2,
        spanGaps: true,
        points: { show: one.values.filter((value) => value !== null).length < 3 },
      })),
      ...banded.flatMap((one) =>
        [edge, edge].map((each, side) => ({ ...each, spanGaps: true, label: `${one.label} ${side}` })),
      ),
    ],
    bands: banded.map((one, place) => {
      const first = 1 + curves.length + 2 * place;
      return {
        series: [first + 1, first],
        fill: resolved(element, `color-mix(in srgb, ${one.color} 18%, transparent)`),
      };
    }),
    hooks: {
      draw: [(/** @type {any} */ plot) => mark(plot, at)],
      ready: [
        (/** @type {any} */ plot) =>
          plot.over.addEventListener("click", () => {
            const nearest = plot.cursor.idx;
            if (nearest !== null && nearest !== undefined) {
              choose(steps[nearest]);
            }
          }),
      ],
    },
  };
}

/**
 * Draw a line at the chosen step.
 * @param {any} plot
 * @param {number} step
 */
function mark(plot, step) {
  const x = Math.round(plot.valToPos(step, "x", true));
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = variable("--accent");
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}

/** @param {string} name */
const variable = (name) => resolved(document.body, `var(${name})`);

/**
 * A canvas knows no variables of a style sheet.
 * @param {HTMLElement} element
 * @param {string} color
 */
function resolved(element, color) {
  const before = element.style.color;
  element.style.color = color;
  const value = getComputedStyle(element).color;
  element.style.color = before;
  return value;
}
