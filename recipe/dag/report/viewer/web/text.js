// Texts of models, tools and data, made safe to look at. Pure.

/** Control characters, marks of direction, and characters of no width. */
const HIDDEN = [
  "\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f",
  "\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069",
  "\\u200b\\u2028\\u2029\\u2060\\ufeff",
].join("");
/** Halves of characters, from bytes that were not UTF-8. */
const HALVES = "[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]";
const CONTROL = new RegExp(`[${HIDDEN}]|${HALVES}`, "g");

/**
 * Return a text in which nothing is hidden: control characters, direction marks and halves of characters become signs.
 * @param {string} text
 */
export function visible(text) {
  return text.replace(CONTROL, (character) => {
    const code = character.charCodeAt(0);
    if (code < 0x20) {
      return String.fromCharCode(0x2400 + code);
    }
    return code === 0x7f ? "\u2421" : `\u27e8${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

/**
 * Return the first line that is not blank, cut.
 * @param {string} text
 * @param {number} length
 */
export function excerpt(text, length) {
  const start = text
    .slice(0, 8 * length)
    .trimStart()
    .replace(/\s+/g, " ");
  return visible(start.length > length ? `${start.slice(0, length - 1)}\u2026` : start);
}

/**
 * Return the length of the longest common beginning of the texts.
 * @param {string[]} texts
 */
export function commonPrefix(texts) {
  if (texts.length === 0) {
    return 0;
  }
  let length = texts[0].length;
  for (const text of texts) {
    let i = 0;
    while (i < length && i < text.length && text.charCodeAt(i) === texts[0].charCodeAt(i)) {
      i += 1;
    }
    length = i;
  }
  return length;
}

/**
 * Return where the first word begins in which texts differ; 0 if they are equal.
 * @param {string[]} texts
 */
export function firstDifference(texts) {
  const length = commonPrefix(texts);
  const same = texts.every((text) => text.length === length);
  return same ? 0 : texts[0].slice(0, length).search(/\S*$/);
}
