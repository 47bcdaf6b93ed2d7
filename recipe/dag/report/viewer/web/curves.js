// Curves over the steps, drawn by uPlot.

import { html, useEffect, useRef } from "./html.js";
import { count, short } from "./format.js";

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
 *   range?: [number, number], held?: boolean}} props  steps: or other places; at: the chosen one; range: of the values,
 *   if it is not theirs; held: a value counts until the next one
 */
export function Curves({ title, steps, curves, at, choose, range, held }) {
  const place = useRef(/** @type {HTMLDivElement | null} */ (null));
  const shown = useRef({ steps, at, choose });
  shown.current = { steps, at, choose };
  const plot = useRef(/** @type {any} */ (null));
  const shape = JSON.stringify([title, curves.map((one) => [one.label, one.color, one.interval !== undefined])]);
  useEffect(() => {
    const element = place.current;
    if (element === null) {
      return undefined;
    }
    const { uPlot } = /** @type {any} */ (globalThis);
    const own = new uPlot(options(element, curves, shown, range), columns(steps, curves), element);
    plot.current = own;
    const observer = new ResizeObserver(() => own.setSize({ width: element.clientWidth, height: HEIGHT }));
    observer.observe(element);
    const theme = matchMedia("(prefers-color-scheme: dark)");
    const redraw = () => own.status === 1 && own.redraw();
    theme.addEventListener("change", redraw);
    addEventListener("theme", redraw);
    return () => {
      observer.disconnect();
      theme.removeEventListener("change", redraw);
      removeEventListener("theme", redraw);
      own.destroy();
    };
  }, [shape]);
  useEffect(() => {
    if (plot.current.status === 1) {
      plot.current.setData(columns(steps, curves));
    }
  }, [steps, at]);
  const valueAt = (/** @type {Curve} */ { values }) =>
    held
      ? values.findLast((value, position) => value !== null && steps[position] <= at)
      : values[steps.indexOf(at)];
  const last = curves.map((one) => `${one.label} ${short(valueAt(one) ?? one.values.at(-1))}`).join(", ");
  return html`<figure class="curves"><figcaption>${title}</figcaption>
    <div ref=${place} role="img" aria-label=${`${title}: ${last}`}></div>
    <ul class="legend">${curves.map(
      (one) => html`<li key=${one.label}>
      <span class="swatch" style=${{ background: one.color }}></span>${one.label}
      <b>${short(valueAt(one))}</b></li>`,
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
 * @param {Curve[]} curves
 * @param {{current: {steps: number[], at: number, choose: (step: number) => void}}} shown
 * @param {[number, number]} [range]
 */
function options(element, curves, shown, range) {
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
      { ...axis, size: 28, values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map(count) },
      { ...axis, size: 46, values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map(short) },
    ],
    series: [
      {},
      ...curves.map((one) => ({
        label: one.label,
        stroke: () => resolved(element, one.color),
        width: 2,
        spanGaps: true,
        points: { show: isShort },
      })),
      ...banded.flatMap((one) =>
        [edge, edge].map((each, side) => ({ ...each, spanGaps: true, label: `${one.label} ${side}` })),
      ),
    ],
    bands: banded.map((one, place) => {
      const first = 1 + curves.length + 2 * place;
      return {
        series: [first + 1, first],
        fill: () => resolved(element, `color-mix(in srgb, ${one.color} 18%, transparent)`),
      };
    }),
    hooks: {
      draw: [(/** @type {any} */ plot) => mark(plot, shown.current.at)],
      ready: [
        (/** @type {any} */ plot) =>
          plot.over.addEventListener("click", () => {
            const nearest = plot.cursor.idx;
            if (nearest !== null && nearest !== undefined) {
              shown.current.choose(shown.current.steps[nearest]);
            }
          }),
      ],
    },
  };
}

/**
 * Whether a curve has too few values to be seen as a line.
 * @param {any} plot
 * @param {number} series
 */
const isShort = ({ data }, series) =>
  data[series].filter((/** @type {number | null} */ value) => value !== null).length < 3;

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
