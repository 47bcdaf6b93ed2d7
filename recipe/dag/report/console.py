"""The line that a run prints per step.

Invariant: a step's line shows only values that are in its metrics.
"""

from __future__ import annotations

from collections.abc import Mapping

from recipe.dag.core.counted import counted

PHASES = ("rollout", "train", "sync", "validation")
"""Parts of the step's time that are shown, in this order; metrics.jsonl also has the nodes that make up `train`."""


def step_line(step: int, total: int, metrics: Mapping[str, float], *, fault: str = "", val_fault: str = "") -> str:
    """Return one line, such as `step  12/200 | acc 0.438 | reward planner +0.31 | 123k tokens | 61 s: rollout 12`.

    Times are `timing/<phase>` in seconds; `timing/step` is the total. If episodes were lost, the accuracy over all
    episodes is added: `acc 0.743 (all 0.409)`. On GPUs, `mfu 38%, 61.8 GiB` is the model FLOPs utilization of each
    policy's update, and the peak memory. `fault`, `val_fault`: the most frequent fault of the step's episodes, and of
    its validation.
    """
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    parts.append(" ".join([*_accuracy(metrics, "acc", "episode/accuracy"), *_accuracy(metrics, "val", "val/accuracy")]))
    rewards = [
        f"{key.removeprefix('agent/').removesuffix('/reward/mean')} {value:+.2f}"
        for key, value in metrics.items()
        if key.startswith("agent/") and key.endswith("/reward/mean")
    ]
    parts.append(" ".join(["reward", *rewards]) if rewards else "")
    parts.append(f"{short_count(metrics['tokens/sampled'])} tokens" if "tokens/sampled" in metrics else "")
    parts.append(_times(metrics))
    parts.append(_devices(metrics))
    parts.append("NO ROW TRAINED" if metrics.get("train/rows") == 0 else "")
    parts += [_faults(metrics, fault), _faults(metrics, val_fault, "val/")]
    return " | ".join(part for part in parts if part)


def _accuracy(metrics: Mapping[str, float], word: str, key: str) -> list[str]:
    if key not in metrics:
        return []
    of_all = metrics.get(f"{key}_all", metrics[key])
    suffix = f" (all {of_all:.3f})" if of_all != metrics[key] else ""
    return [f"{word} {metrics[key]:.3f}{suffix}"]


def _faults(metrics: Mapping[str, float], fault: str, prefix: str = "") -> str:
    faults, masked = metrics.get(f"{prefix}faults/total", 0), metrics.get(f"{prefix}episode/masked", 0)
    if not faults and not masked:
        return ""
    counts = f"{prefix.replace('/', ' ')}{counted(int(faults), 'fault')}, {masked:.1%} masked"
    return f"{counts}: {fault}" if fault else counts


def _times(metrics: Mapping[str, float]) -> str:
    named = [f"{phase} {_seconds(metrics[f'timing/{phase}'])}" for phase in PHASES if f"timing/{phase}" in metrics]
    whole = [f"{_seconds(metrics['timing/step'])} s"] if "timing/step" in metrics else []
    return ": ".join([*whole, " ".join(named)] if named else whole)


def _devices(metrics: Mapping[str, float]) -> str:
    """Return `mfu 38%, 61.8 GiB`: utilization in each policy's update, and the peak memory over policies."""
    shares = [f"{value:.0%}" for key, value in metrics.items() if key.startswith("perf/") and key.endswith("/mfu")]
    peaks = [value for key, value in metrics.items() if key.endswith("/max_memory_allocated_gb")]
    parts = [f"mfu {' '.join(shares)}"] if shares else []
    return ", ".join([*parts, f"{max(peaks):.1f} GiB"] if peaks else parts)


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def short_count(count: float) -> str:
    """Return a count in three or four characters and a unit: 1.2k, 15.1M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.{0 if count >= 100 * limit else 1}f}{unit}"
    return f"{count:.0f}"
