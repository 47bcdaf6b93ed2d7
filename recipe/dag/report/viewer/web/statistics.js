// Means, deviations, intervals, histograms, trends. Pure.

/**
 * @param {number[]} values
 * @returns {number | null}
 */
export const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

/**
 * How far the first values are above the others: the share of pairs in which the first is larger, less the share in
 * which it is smaller (Cliff's delta). 1 or -1 if a threshold separates them; null if a side is empty.
 * @param {number[]} first
 * @param {number[]} second
 */
export function dominance(first, second) {
  const signs = first.flatMap((a) => second.map((b) => (Math.abs(a - b) < 1e-9 ? 0 : Math.sign(a - b))));
  return mean(signs);
}

/**
 * Wilson's 95 % interval of a share.
 * @param {number} share
 * @param {number} n
 * @returns {[number, number]}
 */
export function wilson(share, n) {
  const z = 1.96;
  const scale = 1 + z ** 2 / n;
  const middle = (share + z ** 2 / (2 * n)) / scale;
  const half = (z / scale) * Math.sqrt((share * (1 - share)) / n + z ** 2 / (4 * n ** 2));
  return [middle - half, middle + half];
}

/**
 * @param {number[]} values
 * @param {number} bins
 * @returns {{low: number, high: number, counts: number[]}}
 */
export function histogram(values, bins) {
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const counts = new Array(bins).fill(0);
  for (const value of values) {
    counts[high === low ? 0 : Math.min(bins - 1, Math.floor(((value - low) / (high - low)) * bins))] += 1;
  }
  return { low, high, counts };
}

/**
 * The slope of a line through the values over its standard error; null for fewer than 8 values.
 * @param {(number | null)[]} values
 */
export function trend(values) {
  const points = values.flatMap((value, at) => (value === null ? [] : [[at, value]]));
  if (points.length < 8) {
    return null;
  }
  const [x, y] = [0, 1].map((axis) => mean(points.map((point) => point[axis])) ?? 0);
  const xx = points.reduce((sum, point) => sum + (point[0] - x) ** 2, 0);
  const slope = points.reduce((sum, point) => sum + (point[0] - x) * (point[1] - y), 0) / xx;
  const rest = points.reduce((sum, point) => sum + (point[1] - y - slope * (point[0] - x)) ** 2, 0);
  const error = Math.sqrt(rest / (points.length - 2) / xx);
  return slope === 0 ? 0 : slope / Math.max(error, 1e-12);
}
