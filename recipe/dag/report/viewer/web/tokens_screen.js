// The tokens of one call, coloured by a number of each.

import { html, useState } from "./html.js";
import { scaleColor, signColor } from "./color.js";
import { counted, short } from "./format.js";
import { whereOf } from "./group_screen.js";
import { Histogram } from "./histogram.js";
import { visible } from "./text.js";
import { columnsOf, tokenText } from "./tokens.js";
import { Choice, Link, Waiting } from "./ui.js";
import { go, useDetail, useVocabularies } from "./use_data.js";
/** @import { CallDetail } from "./data.js" */
/** @import { Column } from "./tokens.js" */
/** @import { Model } from "./model.js" */
/** @import { Route } from "./route.js" */

/** Tokens that are shown at first. */
const SHOWN = 2000;

/** @param {{model: Model, route: Route}} props */
export function TokensScreen({ model, route }) {
  const episode = model.episodeAt(route);
  const loaded = useDetail(episode);
  const vocabularies = useVocabularies(model);
  const position = route.call ?? 0;
  const call = episode?.calls[position];
  if (episode === undefined || call === undefined) {
    return html`<p class="empty">No such call. <${Link} to=${{ screen: "problems" }}>All problems<//></p>`;
  }
  if (loaded === null || vocabularies === null) {
    return html`<${Waiting} what="the tokens" />`;
  }
  const detail = loaded.detail.calls[position];
  const columns = columnsOf(detail, call.advantage);
  const column = columns.find((one) => one.name === route.column) ?? columns[0];
  const vocabulary = vocabularies[call.policy];
  const unknown = vocabulary === undefined ? "The tokenizer was not found, so tokens are ids." : "";
  return html`<h1>Tokens <small>of ${visible(call.node)} in <${Link}
    to=${{ ...whereOf(episode), screen: "episode", call: position }}>episode ${episode.index} of ${visible(episode.uid)}
    <//>, step ${episode.step}</small></h1>
    ${
      detail.response_ids.length === 0
        ? html`<p class="empty">This call has no token ids.</p>`
        : html`
    <${Choice} label="coloured by" options=${columns.map((one) => one.name)} value=${column.name}
      choose=${(/** @type {string} */ name) => go({ ...route, call: position, column: name })} />
    <p class="hint">${column.name}: ${column.explains}. Hatched tokens were not sampled. ${unknown}</p>
    <div class="side-by-side"><${Strip} key=${`${route.uid}/${position}`} detail=${detail} columns=${columns}
      column=${column} vocabulary=${vocabulary} />
      <${Histogram} values=${column.values.filter((value) => value !== null)} label=${column.name} /></div>`
    }`;
}

/**
 * @param {{detail: CallDetail, columns: Column[], column: Column,
 *   vocabulary: Record<string, string> | undefined}} props
 */
function Strip({ detail, columns, column, vocabulary }) {
  const [shown, setShown] = useState(SHOWN);
  const [at, setAt] = useState(/** @type {number | null} */ (null));
  const colors = colorsOf(column);
  const ids = detail.response_ids;
  const under = (/** @type {any} */ event) => {
    const place = event.target.dataset?.token;
    setAt(place === undefined ? null : Number(place));
  };
  return html`<div><p class="reading" role="status">
    ${at === null ? "Point at a token to read its numbers." : reading(ids[at], at, columns)}</p>
    <div class="tokens" onMouseOver=${under} onFocusIn=${under} onClick=${under}>
      ${ids.slice(0, shown).map((/** @type {number} */ id, /** @type {number} */ place) => {
        const text = tokenText(vocabulary, id);
        return html`<span key=${place} data-token=${place} class=${detail.response_mask[place] ? "" : "masked"}
          style=${{ background: colors[place] }}>${visible(text).replace(/\n/g, "↵\n")}</span>`;
      })}
    </div>
    ${ids.length > shown && html`<button class="more" onClick=${() => setShown(shown * 4)}>
      ${counted(ids.length - shown, "more token")}</button>`}</div>`;
}

/**
 * @param {Column} column
 * @returns {string[]}
 */
function colorsOf({ values, signed }) {
  const present = values.filter((value) => value !== null);
  const most = present.reduce((a, b) => Math.max(a, Math.abs(b)), 0);
  const low = present.reduce((a, b) => Math.min(a, b), Infinity);
  const high = present.reduce((a, b) => Math.max(a, b), -Infinity);
  return values.map((value) => {
    if (value === null) {
      return "transparent";
    }
    return signed ? signColor(value, most) : scaleColor(high === low ? 0.5 : (value - low) / (high - low));
  });
}

/**
 * @param {number} id
 * @param {number} at
 * @param {Column[]} columns
 */
function reading(id, at, columns) {
  const numbers = columns
    .filter((one) => one.name !== "mask" && one.values[at] !== null)
    .map((one) => `${one.name} ${short(one.values[at])}`);
  return `token ${at}, id ${id}${numbers.length ? `: ${numbers.join(", ")}` : ": not sampled"}`;
}
