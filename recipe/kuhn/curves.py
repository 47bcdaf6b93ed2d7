"""NashConv by step of the runs of run_tiny_cpu.sh: one table and one figure.

    python recipe/kuhn/curves.py [--runs outputs] [--output outputs/kuhn]

Reads RUNS/kuhn_ARM[_seedS]/metrics.jsonl, writes exploitability.md and exploitability.png, and prints the table. The
figure has a thin line for each seed, and the mean of an arm's seeds.
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

RUN = re.compile(r"kuhn_(plain|entropy_[\d.]+|past)(_seed\d+)?")
"""Name of a run: its arm and its seed."""
MEASURES = {"user/nash_conv": "last policy", "user/nash_conv_average": "averaged policy"}
Curve = dict[int, float]
"""Step -> value."""


def read(runs: Path) -> dict[tuple[str, str], list[Curve]]:
    """Return (arm, measure) -> the curve of each seed."""
    curves: defaultdict[tuple[str, str], list[Curve]] = defaultdict(list)
    for path in sorted(runs.glob("kuhn_*/metrics.jsonl")):
        if (run := RUN.fullmatch(path.parent.name)) is not None:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for measure in MEASURES:
                curves[run[1], measure].append({line["step"]: line[measure] for line in lines if measure in line})
    order = sorted(curves, key=lambda key: (key[0] != "plain", key[0], list(MEASURES).index(key[1])))
    return {key: curves[key] for key in order if all(curves[key])}


def table(curves: dict[tuple[str, str], list[Curve]]) -> str:
    """Return a line per arm and measure, with a number for each seed."""
    lines = ["| arm | policy | at the start | lowest (step) | at the end (step) |", "|---|---|---|---|---|"]
    for (arm, measure), seeds in curves.items():
        columns: list[list[str]] = [[], [], []]
        for curve in seeds:
            lowest, end = min(curve, key=lambda step: curve[step]), max(curve)
            cells = (f"{curve[min(curve)]:.2f}", f"{curve[lowest]:.2f} ({lowest})", f"{curve[end]:.2f} ({end})")
            for column, cell in zip(columns, cells, strict=True):
                column.append(cell)
        lines.append(f"| {arm} | {MEASURES[measure]} | {' | '.join(map(', '.join, columns))} |")
    return "\n".join(lines) + "\n"


def mean_curve(seeds: Sequence[Curve]) -> Curve:
    """Return the mean over seeds of the steps that all of them have."""
    common = set.intersection(*(set(curve) for curve in seeds))
    return {step: fmean(curve[step] for curve in seeds) for step in sorted(common)}


def draw(curves: dict[tuple[str, str], list[Curve]], path: Path) -> None:
    figure, axes = pyplot.subplots(1, len(MEASURES), figsize=(10, 4), layout="constrained", sharey=True)
    for axis, (measure, title) in zip(axes, MEASURES.items(), strict=True):
        for number, arm in enumerate(dict.fromkeys(arm for arm, _ in curves)):
            for curve in curves.get((arm, measure), []):
                axis.plot(list(curve), list(curve.values()), color=f"C{number}", alpha=0.5, linewidth=0.8)
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
