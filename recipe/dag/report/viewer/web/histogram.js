// How often values occur.

import { html } from "./html.js";
import { counted, short } from "./format.js";
import { histogram } from "./statistics.js";

/** @param {{values: number[], label: string, bins?: number}} props */
export function Histogram({ values, label, bins = 24 }) {
  if (values.length === 0) {
    return null;
  }
  const { low, high, counts } = histogram(values, bins);
  const most = Math.max(...counts);
  return html`<figure class="histogram"><svg viewBox=${`0 0 ${bins} 10`} preserveAspectRatio="none" role="img"
      aria-label=${`${label}: ${counted(values.length, "value")} from ${short(low)} to ${short(high)}`}>
    ${counts.map((n, at) => n > 0 && html`<rect key=${at} x=${at + 0.05} width="0.9" y=${10 - (10 * n) / most}
      height=${(10 * n) / most} />`)}
  </svg><figcaption><span>${short(low)}</span><span>${label}</span><span>${short(high)}</span></figcaption></figure>`;
}
