// A long list of rows of equal height, of which those in sight are in the document.

import { html, useEffect, useRef, useState } from "./html.js";

const BEYOND = 8;

/**
 * @template T
 * @param {{items: T[], height: number, row: (item: T, at: number) => any, head?: any, label: string}} props  height: of
 *   a row, in pixels
 */
export function Windowed({ items, height, row, head, label }) {
  const place = useRef(/** @type {HTMLDivElement | null} */ (null));
  const [range, setRange] = useState([0, 60]);
  useEffect(() => {
    const element = place.current;
    if (element === null) {
      return undefined;
    }
    const update = () => {
      const first = Math.max(0, Math.floor(element.scrollTop / height) - BEYOND);
      const last = Math.ceil((element.scrollTop + element.clientHeight) / height) + BEYOND;
      setRange((before) => (before[0] === first && before[1] === last ? before : [first, last]));
    };
    update();
    element.addEventListener("scroll", update, { passive: true });
    const observer = new ResizeObserver(update);
    observer.observe(element);
    return () => {
      element.removeEventListener("scroll", update);
      observer.disconnect();
    };
  }, [height, items.length]);
  const [first, last] = range;
  return html`<div class="windowed" ref=${place} tabindex="0" role="region" aria-label=${label}>
    ${head}
    <div style=${{ height: `${first * height}px` }}></div>
    ${items.slice(first, last).map((item, at) => row(item, first + at))}
    <div style=${{ height: `${Math.max(0, items.length - last) * height}px` }}></div>
  </div>`;
}
