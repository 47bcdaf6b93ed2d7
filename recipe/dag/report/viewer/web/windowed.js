// A long list of rows of equal height, of which those in sight are in the document.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./html.js";

/** Rows that are added at a time, and kept on both sides of those in sight. */
const BEYOND = 8;

/**
 * @template T
 * @param {{items: T[], height: number, row: (item: T, at: number) => any, keyOf: (item: T) => unknown, head?: any,
 *   label: string, chosen?: unknown}} props  height: of a row, in pixels; chosen: key of a row to bring in sight
 */
export function Windowed({ items, height, row, keyOf, head, label, chosen }) {
  const place = useRef(/** @type {HTMLDivElement | null} */ (null));
  const [range, setRange] = useState([0, 60]);
  const top = useRef(/** @type {{key: unknown, at: number}} */ ({ key: undefined, at: 0 }));
  const update = () => {
    const element = place.current;
    if (element === null) {
      return; // an observer may report after the list has gone
    }
    const at = Math.floor(element.scrollTop / height);
    top.current = { key: items[at] && keyOf(items[at]), at };
    const end = (element.scrollTop + element.clientHeight) / height;
    const first = Math.max(0, (Math.floor(at / BEYOND) - 1) * BEYOND);
    const last = (Math.ceil(end / BEYOND) + 1) * BEYOND;
    setRange((before) => (before[0] === first && before[1] === last ? before : [first, last]));
  };
  useEffect(() => {
    const element = /** @type {HTMLDivElement} */ (place.current);
    element.addEventListener("scroll", update, { passive: true });
    const observer = new ResizeObserver(update);
    observer.observe(element);
    return () => {
      element.removeEventListener("scroll", update);
      observer.disconnect();
    };
  }, [height, items]);
  useLayoutEffect(() => {
    // rows that come or go above those that are read leave them where they are
    const element = /** @type {HTMLDivElement} */ (place.current);
    const { key, at } = top.current;
    const now = element.scrollTop > 0 ? items.findIndex((item) => keyOf(item) === key) : -1;
    if (now >= 0) {
      element.scrollTop += (now - at) * height;
    }
    update();
  }, [height, items]);
  useLayoutEffect(() => {
    const element = /** @type {HTMLDivElement} */ (place.current);
    const at = items.findIndex((item) => keyOf(item) === chosen) * height;
    if (at >= 0 && (at < element.scrollTop || at + 2 * height > element.scrollTop + element.clientHeight)) {
      element.scrollTop = at - element.clientHeight / 2;
    }
  }, [chosen]);
  const [first, last] = range;
  // Preact leaves an element alone that is the one of before
  const drawn = useMemo(() => new Map(), [row]);
  const draw = (/** @type {T} */ item, /** @type {number} */ at) => {
    const element = drawn.get(item) ?? row(item, at);
    drawn.set(item, element);
    return element;
  };
  return html`<div class="windowed" ref=${place} tabindex="0" role="region" aria-label=${label}>
    ${head}
    <div style=${{ height: `${first * height}px` }}></div>
    ${items.slice(first, last).map((item, at) => draw(item, first + at))}
    <div style=${{ height: `${Math.max(0, items.length - last) * height}px` }}></div>
  </div>`;
}
