// Colours of agents, of signed numbers and of shares. Pure.

const HUES = [212, 150, 35, 285, 0, 185, 60, 330];

/**
 * The colour of an agent, by its place in the workflow.
 * @param {string[]} agents
 * @param {string | null} agent
 */
export function agentColor(agents, agent) {
  const place = agent === null ? -1 : agents.indexOf(agent);
  return place < 0 ? "var(--faint)" : placeColor(place);
}

/**
 * The colour of a run, or of an agent, by its place.
 * @param {number} place
 */
export function placeColor(place) {
  const hue = HUES[place % HUES.length];
  return `light-dark(hsl(${hue} 60% 36%), hsl(${hue} 60% 72%))`;
}

/**
 * Green for positive and red for negative numbers, the stronger the larger; `most` is the largest on the screen.
 * @param {number | null | undefined} value
 * @param {number} most
 */
export function signColor(value, most) {
  if (value === null || value === undefined || most === 0) {
    return "transparent";
  }
  const strength = Math.min(1, Math.abs(value) / most);
  return `color-mix(in oklab, var(${value > 0 ? "--good" : "--bad"}) ${(80 * strength).toFixed(0)}%, transparent)`;
}

/**
 * From red over yellow to green.
 * @param {number | null} share
 */
export function shareColor(share) {
  const hue = ((share ?? 0) * 120).toFixed(0);
  return share === null ? "var(--panel)" : `light-dark(hsl(${hue} 60% 78%), hsl(${hue} 50% 28%))`;
}

/**
 * One hue, the stronger the larger.
 * @param {number} share  from 0 to 1
 */
export function scaleColor(share) {
  return `color-mix(in oklab, var(--accent) ${(75 * Math.min(1, Math.max(0, share))).toFixed(0)}%, transparent)`;
}
