// The workflow's graph, with numbers at its nodes. Places come from recipe/dag/report/viewer/graph.py.

import { html } from "./html.js";
import { agentColor } from "./color.js";
import { excerpt } from "./text.js";
/** @import { Graph, GraphNode, Place } from "./data.js" */

const WIDTH = 168;
const GAP = [28, 14];
const LINE = 16;

/**
 * @param {{graph: Graph, agents: string[], numbers: (node: GraphNode) => string[], wide: boolean}} props  numbers: the
 *   lines at a node; wide: ranks go to the right, otherwise down
 */
export function GraphView({ graph, agents, numbers, wide }) {
  const lines = new Map(graph.nodes.map((node) => [node.id, numbers(node)]));
  const height = LINE * (1 + Math.max(...[...lines.values()].map((own) => own.length))) + 14;
  const [along, across] = wide ? [WIDTH + GAP[0], height + GAP[1]] : [height + GAP[0], WIDTH + GAP[1]];
  const places = graph.edges.flatMap((edge) => edge.places).concat(graph.nodes.map((node) => node.place));
  const widest = Math.max(...places.map((place) => Math.abs(place[1])));
  const ranks = Math.max(...places.map((place) => place[0]));
  /** @param {Place} place */
  const middle = ([rank, beside]) => {
    const [main, side] = [
      rank * along + (wide ? WIDTH : height) / 2 + 4,
      (beside + widest) * across + (wide ? height : WIDTH) / 2 + 4,
    ];
    return wide ? [main, side] : [side, main];
  };
  const [long, broad] = [
    ranks * along + (wide ? WIDTH : height) + 8,
    2 * widest * across + (wide ? height : WIDTH) + 8 + 24,
  ];
  const size = wide ? [long, broad] : [broad, long];
  const curve = (/** @type {{places: Place[], loop: boolean}} */ edge) =>
    (edge.loop ? backward : forward)(edge.places.map(middle), height, wide);
  const label = `the workflow: ${graph.nodes.map((node) => node.id).join(", ")}`;
  return html`<div class="graph"><svg width=${size[0]} height=${size[1]} role="img" aria-label=${label}>
    <defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">
      <path d="M0 0L8 4L0 8z" class="arrow" /></marker></defs>
    ${graph.edges.map(
      (edge, at) => html`<path key=${at} class=${edge.loop ? "edge loop" : "edge"} d=${curve(edge)}
        marker-end="url(#arrow)" />`,
    )}
    ${graph.nodes.map((node) => {
      const [x, y] = middle(node.place);
      const corner = `translate(${x - WIDTH / 2} ${y - height / 2})`;
      const color = agentColor(agents, node.agent);
      const own = [`${excerpt(node.id, 22)}${node.when ? " ?" : ""}`, ...(lines.get(node.id) ?? [])];
      return html`<g key=${node.id} class=${`node ${node.kind}`} transform=${corner}>
        <rect width=${WIDTH} height=${height} rx=${node.kind === "agent" ? 4 : 14} style=${{ stroke: color }} />
        ${own.map((line, row) => html`<text key=${row} x="9" y=${17 + LINE * row}>${excerpt(line, 27)}</text>`)}
      </g>`;
    })}
  </svg></div>`;
}

/**
 * A curve through the places, from the border of the first node to that of the last.
 * @param {number[][]} points
 * @param {number} height
 * @param {boolean} wide
 */
function forward(points, height, wide) {
  const offset = wide ? [WIDTH / 2, 0] : [0, height / 2];
  const own = points.map(([x, y], at) => {
    const side = at === 0 ? 1 : at === points.length - 1 ? -1 : 0;
    return [x + side * offset[0], y + side * offset[1]];
  });
  return own.reduce((path, [x, y], at) => {
    if (at === 0) {
      return `M${x} ${y}`;
    }
    const [fromX, fromY] = own[at - 1];
    const half = wide ? (x - fromX) / 2 : (y - fromY) / 2;
    return (
      path +
      (wide
        ? `C${fromX + half} ${fromY} ${x - half} ${y} ${x} ${y}`
        : `C${fromX} ${fromY + half} ${x} ${y - half} ${x} ${y}`)
    );
  }, "");
}

/**
 * A curve back to the first node of a loop, past its side.
 * @param {number[][]} points
 * @param {number} height
 * @param {boolean} wide
 */
function backward(points, height, wide) {
  const [[fromX, fromY], [x, y]] = points;
  const bow = 22;
  if (wide) {
    const [under, low] = [fromY + height / 2, y + height / 2];
    return `M${fromX} ${under}C${fromX} ${under + bow} ${x} ${low + bow} ${x} ${low}`;
  }
  const [beside, right] = [fromX + WIDTH / 2, x + WIDTH / 2];
  return `M${beside} ${fromY}C${beside + bow} ${fromY} ${right + bow} ${y} ${right} ${y}`;
}
