// Problems over steps: which were learned, which were forgotten.

import { html, useMemo, useState } from "./html.js";
import { shareColor } from "./color.js";
import { counted, signed } from "./format.js";
import { whereOf } from "./group_screen.js";
import { KINDS } from "./model.js";
import { excerpt } from "./text.js";
import { Choice, Link } from "./ui.js";
import { go } from "./use_data.js";
import { Windowed } from "./windowed.js";
/** @import { Model, Cell, MatrixRow } from "./model.js" */
/** @import { Route } from "./route.js" */

const ROW = 26;

/** @param {{model: Model, route: Route}} props */
export function ProblemsScreen({ model, route }) {
  const splits = [...model.splits].sort().reverse();
  const split = model.splits.includes(route.split) ? route.split : splits[0];
  const { steps, rows } = useMemo(() => model.matrix(split), [model, split]);
  const kinds = KINDS.filter((kind) => rows.some((row) => row.kind === kind));
  const [kind, setKind] = useState("all");
  const shown = useMemo(
    () => (kind === "all" || !kinds.includes(kind) ? rows : rows.filter((row) => row.kind === kind)),
    [rows, kind],
  );
  const columns = `minmax(9rem, min(34rem, 40vw)) 6.5rem repeat(${steps.length}, minmax(1.6rem, 3rem))`;
  const head = html`<div class="row head" style=${{ gridTemplateColumns: columns }}><span>problem</span>
    <span>over the steps</span>
    ${steps.map((step) => html`<span key=${step}>${step}</span>`)}</div>`;
  const row = (/** @type {MatrixRow} */ { problem, kind: own, cells }) => {
    const { text } = model.index.problems[problem];
    return html`<div class="row" key=${problem} style=${{ gridTemplateColumns: columns, height: `${ROW}px` }}>
      <span class="problem" title=${excerpt(text, 300)}>${excerpt(text, 90)}</span><span class="kind">${own}</span>
      ${steps.map((step) => html`<${CellView} key=${step} cell=${cells.get(step)} />`)}
    </div>`;
  };
  return html`<h1>Problems <small>${rows.length} over ${counted(steps.length, "step")}</small></h1>
    <div class="bar-of-choices">
      <${Choice} label="split" options=${splits} value=${split}
        choose=${(/** @type {string} */ one) => go({ screen: "problems", split: one })} />
      <${Choice} label="kind" options=${["all", ...kinds]} value=${kinds.includes(kind) ? kind : "all"}
        choose=${setKind} />
    </div>
    <p class="hint">A cell: the share of the recorded episodes that solved the problem, in per cent. It opens them.</p>
    <div class="matrix">
      <${Windowed} items=${shown} height=${ROW} head=${head} row=${row} keyOf=${problemOf}
        label="problems over steps" />
    </div>`;
}

/** @param {MatrixRow} row */
const problemOf = (row) => row.problem;

/** @param {{cell: Cell | undefined, faint?: boolean}} props */
export function CellView({ cell, faint = false }) {
  if (cell === undefined) {
    return html`<span></span>`;
  }
  const { step } = cell;
  const share = cell.graded ? cell.solved / cell.graded : null;
  const title = `step ${step}: ${cell.solved} of ${cell.graded} solved, mean reward ${signed(cell.reward)}`;
  return html`<${Link} class=${faint ? "cell faint" : "cell"} to=${{ screen: "group", ...whereOf(cell.episodes[0]), index: 0 }} title=${title}>
    <span style=${{ background: shareColor(share) }}>${share === null ? "·" : (100 * share).toFixed(0)}</span><//>`;
}
