"""Plot of the learning curve: `python -m recipe.dag.report.curve metrics.jsonl curve.png`.

Invariant: every point is a value in metrics.jsonl at its own step; a step without a value has no point. matplotlib is
imported when a curve is drawn, so that a run without it lacks its curve alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.dag.core.errors import UserError
from recipe.dag.report.journal import read_records, run_name
from recipe.dag.report.jsonfile import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
"""The palette of Okabe and Ito, which colour-blind readers can distinguish."""
SMOOTH_FROM = 30
"""Number of points from which a moving average is drawn over the raw line."""

Points = list[tuple[int, float]]


def why_not_drawn(metrics_jsonl: Path, png: Path) -> str:
    """Do the same as `draw_curve`; return why it failed, or "". A run must not end for a picture of its metrics."""
    try:
        draw_curve(metrics_jsonl, png)
    except ImportError as error:
        command = f"python -m recipe.dag.report.curve {metrics_jsonl} {png}"
        return f"{error}; run `pip install matplotlib`, and then `{command}`"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def draw_curve(metrics_jsonl: str | Path, png: str | Path) -> None:
    """Plot accuracy in training and validation (top) and mean reward per agent (bottom); empty axes are labelled. For
    supervised fine-tuning, plot the loss in training and validation.

    Replaces `png` atomically. Raises UserError if `metrics_jsonl` cannot be read.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    lines = list(read_records(Path(metrics_jsonl), "pass the metrics.jsonl of a run"))
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"Learning curve of {run_name(Path(metrics_jsonl))}")
    if any("train/loss" in line for line in lines):
        every_axes = [_losses(figure, lines)]
    else:
        every_axes = _accuracy_and_rewards(figure, lines)
    every_axes[-1].set_xlabel("step")
    every_axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in every_axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.has_data():
            axes.legend(loc="best", frameon=False)
        else:
            axes.text(0.5, 0.5, "nothing measured yet", transform=axes.transAxes, ha="center", va="center")
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    replace_file(png, [picture.getvalue()])


def _losses(figure: Figure, lines: Sequence[dict]) -> Axes:
    """Plot the loss of supervised fine-tuning."""
    axes = figure.subplots()
    _line(axes, _points(lines, "train/loss"), "training", COLOURS[0])
    _validation(axes, _points(lines, "val/loss"))
    axes.set_ylabel("loss per trained token (nats)")
    axes.set_ylim(bottom=0)
    return axes


def _accuracy_and_rewards(figure: Figure, lines: Sequence[dict]) -> list[Axes]:
    """Plot the accuracy and, below it, the agents' rewards."""
    training, validation = _points(lines, "episode/accuracy"), _points(lines, "val/accuracy")
    keys = dict.fromkeys(key for line in lines for key in line)
    rewards = {
        key.removeprefix("agent/").removesuffix("/reward/mean"): _points(lines, key)
        for key in keys
        if key.startswith("agent/") and key.endswith("/reward/mean")
    }
    upper, lower = figure.subplots(2, 1, sharex=True)
    _line(upper, training, "training", COLOURS[0])
    _validation(upper, validation)
    upper.set_ylabel("accuracy")
    upper.set_ylim(-0.02, 1.02)
    for number, (agent, points) in enumerate(rewards.items()):
        _line(lower, points, agent, COLOURS[number % len(COLOURS)])
    lower.set_ylabel("mean reward per call")
    return [upper, lower]


def _validation(axes: Axes, points: Points) -> None:
    if points:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=COLOURS[1], marker="o", markersize=6, linewidth=1.5, label="validation")


def _line(axes: Axes, points: Points, label: str, colour: str) -> None:
    if not points:
        return
    steps, values = zip(*points, strict=True)
    if len(points) < SMOOTH_FROM:
        axes.plot(steps, values, color=colour, linewidth=1.5, marker=".", label=label)
        return
    window = max(5, len(points) // 20)
    axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
    axes.plot(steps, _moving_average(values, window), color=colour, linewidth=2, label=f"{label} (mean of {window})")


def _moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and up to `window - 1` values before it."""
    parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def _points(lines: Sequence[dict], key: str) -> Points:
    """Return (step, value), sorted by step; for a step that occurs twice, the last value."""
    return sorted({line["step"]: line[key] for line in lines if line.get(key) is not None}.items())


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m recipe.dag.report.curve METRICS_JSONL PNG", file=sys.stderr)
        return 2
    try:
        draw_curve(*arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
