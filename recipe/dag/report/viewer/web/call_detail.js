// Everything that the record holds of one call.

import { html } from "./html.js";
import { counted, seconds, short } from "./format.js";
import { whereOf } from "./group_screen.js";
import { commonPrefix, visible } from "./text.js";
import { segments } from "./tokens.js";
import { Facts, Link, LongText } from "./ui.js";
/** @import { CallDetail, CallNumbers, Episode, EpisodeDetail, Vocabularies } from "./data.js" */
/** @import { Route } from "./route.js" */
/** @import { Segment } from "./tokens.js" */

/** Characters that a prompt must share with an earlier one before they are folded. */
const SHARED = 200;
/** Characters of a prompt that is not folded. */
const UNFOLDED = 3000;
/** Parts of a response that are shown; its tokens are all on their own screen. */
const MOST_PARTS = 400;

/**
 * @param {{call: CallNumbers, position: number, episode: Episode, detail: EpisodeDetail, prompts: string[],
 *   vocabularies: Vocabularies | null, route: Route}} props
 */
export function CallDetailView({ call, position, episode, detail, prompts, vocabularies, route }) {
  const own = detail.calls[position];
  const prompt = prompts[own.prompt] ?? "";
  const fold = sharedWith(
    prompt,
    detail.calls.slice(0, position).map((other) => prompts[other.prompt] ?? ""),
  );
  const parts = segments(own, vocabularies?.[call.policy]);
  const before = own.tool_results.filter(
    (/** @type {any} */ tool) => parts === null && (tool.generation ?? 0) < own.generations,
  );
  const after = own.tool_results.filter((/** @type {any} */ tool) => !before.includes(tool));
  const tokens = { ...whereOf(episode), screen: "tokens", call: position, column: route.column };
  const shown = (/** @type {any} */ tool, /** @type {number} */ at) => html`<${Tool} key=${at} tool=${tool} />`;
  return html`<div class="detail">
    ${own.observation && html`<${Section} name="observation" text=${own.observation} />`}
    ${prompt !== "" && html`<details open=${prompt.length < UNFOLDED}>
      <summary>prompt, ${counted(call.prompt_tokens, "token")}</summary>
      <${LongText} label="prompt" text=${prompt} fold=${fold} />
    </details>`}
    ${prompt === "" && html`<${Messages} messages=${own.messages} asked=${own.asked ?? []} />`}
    ${before.map(shown)}
    ${parts !== null && parts.length > 1
      ? html`<h3>answer, ${counted(own.generations, "generation")}</h3><${Parts} parts=${parts} />`
      : html`<${Section} name="answer" text=${own.completion || own.text || "(empty)"} />`}
    ${after.map(shown)}
    ${own.completion && html`<${Section} name="passed on, as the hook wrote it" text=${own.text || "(empty)"} />`}
    ${hasKeys(own.parsed) && html`<${Section} name="parsed" text=${JSON.stringify(own.parsed, null, 2)} />`}
    ${own.next_observation && html`<${Section} name="what the environment answered" text=${own.next_observation} />`}
    ${hasKeys(own.env_info) && html`<${Section} name="its info" text=${JSON.stringify(own.env_info, null, 2)} />`}
    <${Facts} facts=${factsOf(call, own)} />
    ${own.response_ids.length > 0 && html`<p><${Link} to=${tokens}>
      its ${counted(own.response_ids.length, "token")}<//></p>`}
  </div>`;
}

/**
 * Sampled parts of a response, and between them those of the template and the tools.
 * @param {{parts: Segment[]}} props
 */
function Parts({ parts }) {
  const spans = parts.slice(0, MOST_PARTS).map((part, at) => {
    const text = visible(part.text.length > UNFOLDED ? `${part.text.slice(0, UNFOLDED)} …` : part.text);
    return html`<span key=${at} class=${part.sampled ? "" : "masked"}>${text}</span>`;
  });
  return html`<div class="text"><pre dir="auto">${spans}</pre></div>`;
}

/** @param {{name: string, text: string}} props */
const Section = ({ name, text }) => html`<h3>${name}</h3><${LongText} label=${name} text=${text} />`;

/** @param {{tool: any}} props */
function Tool({ tool }) {
  const { code, ...rest } = tool.arguments ?? {};
  const errors = tool.stderr && !String(tool.text).includes(tool.stderr.trim()) ? tool.stderr : "";
  const title = [
    `${tool.name}: ${tool.status}, ${seconds(tool.seconds)}`,
    tool.waited && `after waiting ${seconds(tool.waited)}`,
    tool.attempts > 1 && `${tool.attempts} attempts`,
  ];
  return html`<section class=${`tool-call ${tool.status}`}><h3>${visible(title.filter(Boolean).join(", "))}</h3>
    ${hasKeys(rest) && html`<${LongText} label="arguments" text=${JSON.stringify(rest, null, 1)} />`}
    ${code !== undefined && html`<${LongText} label="program" text=${String(code)} />`}
    <${LongText} label="result" text=${String(tool.text)} />
    ${errors && html`<${LongText} label="stderr" text=${errors} />`}</section>`;
}

/** @param {{messages: any[], asked: number[]}} props */
function Messages({ messages, asked }) {
  return html`${messages.length > 0 && html`<h3>messages</h3>`}
    ${messages.map((message, at) => {
      const text = typeof message.content === "string" ? message.content : JSON.stringify(message, null, 1);
      const role = `${message.role}${asked.includes(at) ? ", asked by a hook" : ""}`;
      return html`<section key=${at} class="message"><b>${visible(role)}</b>
        <${LongText} label=${role} text=${text} /></section>`;
    })}`;
}

/**
 * @param {CallNumbers} call
 * @param {CallDetail} own
 * @returns {[string, any][]}
 */
function factsOf(call, own) {
  const usage = Object.entries(own.usage ?? {}).map(([name, value]) => `${name} ${short(value)}`);
  return [
    ["policy", `${call.policy}, version ${own.weight_version}`],
    ["temperature", own.temperature],
    ["stopped by", own.stop_reason],
    ["generations", own.generations],
    ["model", seconds(own.generation_seconds)],
    ["cached", own.cached_tokens != null && `${counted(own.cached_tokens, "token")} of the prompt`],
    ["candidate", own.candidates > 0 && `${own.candidate + 1} of ${own.candidates}, score ${short(own.score)}`],
    ["branch", own.branch],
    ["trained on", own.train === false && "no"],
    ["usage", usage.join(", ")],
  ];
}

/**
 * The number of characters at the start of a prompt that one of the earlier prompts has, too.
 * @param {string} prompt
 * @param {string[]} earlier
 */
function sharedWith(prompt, earlier) {
  const longest = earlier.reduce((most, other) => Math.max(most, commonPrefix([prompt, other])), 0);
  return longest >= SHARED ? longest : 0;
}

/** @param {any} value */
const hasKeys = (value) => value !== null && value !== undefined && Object.keys(value).length > 0;
