"""NashConv by step of the runs of run_tiny_cpu.sh: one table and one figure.

    python recipe/kuhn/curves.py [--runs outputs] [--output outputs/kuhn]

Reads RUNS/kuhn_ARM[_seedS]/metrics.jsonl, writes exploitability.md and exploitability.png, and prints the table. A line
is the mean of an arm's seeds; the figure shows each seed, too.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ARMS = ("plain", "entropy", "past")
MEASURES = {"user/nash_conv": "last policy", "user/nash_conv_average": "averaged policy"}
STEPS = (0, 10, 20, 30, 50, 100, 150, 200)
"""Those of the table."""

Curve = dict[int, float]
"""Step -> value."""


def read(runs: Path) -> dict[tuple[str, str], list[Curve]]:
    """Return (arm, measure) -> the curve of each seed."""
    curves: defaultdict[tuple[str, str], list[Curve]] = defaultdict(list)
    for arm in ARMS:
        for path in sorted(runs.glob(f"kuhn_{arm}*/metrics.jsonl")):
            if re.fullmatch(rf"kuhn_{arm}(_seed\d+)?", path.parent.name):
                lines = [json.loads(line) for line in path.read_text().splitlines()]
                for measure in MEASURES:
                    curve = {line["step"]: line[measure] for line in lines if measure in line}
                    curves[arm, measure].append(curve)
    return {key: found for key, found in curves.items() if all(found)}


def table(curves: dict[tuple[str, str], list[Curve]]) -> str:
    header = "| arm | policy | seeds | " + " | ".join(f"step {step}" for step in STEPS) + " | lowest |"
    lines = [header, "|---" * (len(STEPS) + 4) + "|"]
    for (arm, measure), seeds in curves.items():
        mean = mean_curve(seeds)
        cells = [f"{mean[step]:.2f}" if step in mean else "" for step in STEPS]
        lowest = min(mean, key=lambda step: mean[step])
        cells.append(f"{mean[lowest]:.2f} in step {lowest}")
        lines.append(f"| {arm} | {MEASURES[measure]} | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def mean_curve(seeds: Sequence[Curve]) -> Curve:
    """Return the mean over seeds of the steps that all of them have."""
    common = set.intersection(*(set(curve) for curve in seeds))
    return {step: fmean(curve[step] for curve in seeds) for step in sorted(common)}


def draw(curves: dict[tuple[str, str], list[Curve]], path: Path) -> None:
    figure, axes = pyplot.subplots(1, len(MEASURES), figsize=(10, 4), layout="constrained", sharey=True)
    for axis, (measure, title) in zip(axes, MEASURES.items(), strict=True):
        for number, arm in enumerate(ARMS):
            for curve in curves.get((arm, measure), []):
                axis.plot(list(curve), list(curve.values()), color=f"C{number}", alpha=0.25, linewidth=0.8)
            if (arm, measure) in curves:
                mean = mean_curve(curves[arm, measure])
                axis.plot(list(mean), list(mean.values()), color=f"C{number}", label=arm)
        axis.set(title=f"NashConv of the {title}", xlabel="step", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("outputs"))
    parser.add_argument("--output", type=Path, default=Path("outputs/kuhn"))
    options = parser.parse_args(argv)
    curves = read(options.runs)
    if not curves:
        message = f"{options.runs}: no run of Kuhn poker; start one: bash recipe/kuhn/run_tiny_cpu.sh"
        print(f"error: {message}", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    text = table(curves)
    (options.output / "exploitability.md").write_text(text)
    draw(curves, options.output / "exploitability.png")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
