// Numbers as they are shown. Pure.

/**
 * @param {number | null | undefined} value
 * @param {number} [digits]
 */
export function number(value, digits = 2) {
  return value === null || value === undefined ? "\u2013" : minus(value.toFixed(digits));
}

/**
 * A number with its sign.
 * @param {number | null | undefined} value
 */
export function signed(value) {
  if (value === null || value === undefined) {
    return "\u2013";
  }
  const text = value.toFixed(2);
  return minus(value > 0 && Number(text) !== 0 ? `+${text}` : text);
}

/**
 * A number and its noun: 1 call, 2 calls.
 * @param {number | null | undefined} value
 * @param {string} noun
 * @param {string} [text]  how the number is written
 */
export const counted = (value, noun, text = number(value, 0)) => `${text} ${noun}${value === 1 ? "" : "s"}`;

/** @param {number | null | undefined} value */
export function percent(value) {
  return value === null || value === undefined ? "\u2013" : `${(100 * value).toFixed(0)} %`;
}

/** @param {number | null | undefined} value */
export function seconds(value) {
  if (value === null || value === undefined) {
    return "\u2013";
  }
  if (value < 0.01) {
    return `${(1000 * value).toFixed(1)} ms`;
  }
  return value < 1
    ? `${(1000 * value).toFixed(0)} ms`
    : value < 100
      ? `${value.toFixed(1)} s`
      : `${value.toFixed(0)} s`;
}

/** @param {number} value */
export function count(value) {
  return value < 10_000
    ? String(Math.round(value))
    : value < 1e6
      ? `${(value / 1e3).toFixed(0)}k`
      : `${(value / 1e6).toFixed(1)}M`;
}

/**
 * A metric's value, whatever its size.
 * @param {number | null | undefined} value
 */
export function short(value) {
  if (value === null || value === undefined) {
    return "\u2013";
  }
  const size = Math.abs(value);
  return minus(
    size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(1) : String(Number(value.toPrecision(3))),
  );
}

/** @param {string} text */
const minus = (text) => text.replace(/^-(0\.?0*)$/, "$1").replace("-", "\u2212");
