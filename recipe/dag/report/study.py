"""The report of a study: arms x seeds of training runs at equal sampled tokens, as a table and a figure.

Invariant: every number comes from the runs' metrics.jsonl and results.json. Arms are compared on the same seeds and the
same problems; a seed is one observation, and a problem within it another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from io import BytesIO
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from recipe.dag.core.errors import UserError
from recipe.dag.core.printable import printable
from recipe.dag.report.curve import COLOURS
from recipe.dag.report.jsonfile import replace_file
from recipe.dag.report.pass_table import LEVEL, Interval
from recipe.dag.report.run_folder import Run, read_run

ACCURACY = "val/accuracy"
AFTER_UPDATE = ("val/", "user/")
"""Beginnings of the names of metrics that measure the weights after a step's update; others measure its episodes."""
DRAWS = 10_000

Curve = list[tuple[float, float]]
"""(tokens sampled so far, value) pairs; steps in place of tokens if the runs count none."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to."""

    curves: dict[str, Curve]
    scores: dict[str, float]
    """Final value of the table's metric by problem; a metric that is not the accuracy has one, under ""."""
    tokens: int
    """Sampled in training."""
    answer_tokens: float | None
    """Sampled per answer in the last validation."""
    hours: float
    gpus: int

    @property
    def score(self) -> float:
        return fmean(self.scores.values())


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of a study, by arm and in the order of its seeds."""

    title: str
    metrics: Sequence[str]
    seeds: Sequence[int]
    results: Mapping[str, Sequence[Result]]

    @property
    def budget(self) -> float:
        """The end of the shortest curve: at the same tokens, all arms have been measured."""
        ends = [run.curves[self.metrics[-1]][-1][0] for runs in self.results.values() for run in runs if run.curves]
        return min(ends)


def read_result(folder: Path, metrics: Sequence[str]) -> Result:
    """Read a run. Raises UserError if it lacks one of the metrics."""
    run = read_run(folder)
    curves = {pattern: _curve(run.metrics, pattern) for pattern in metrics}
    if absent := [pattern for pattern, curve in curves.items() if not curve]:
        raise UserError(f"{folder / 'metrics.jsonl'}: has no {absent[0]}; correct `metrics` of the study")
    if metrics[-1].startswith("val/") and not any(fnmatch(key, metrics[-1]) for key in run.metrics[-1]):
        raise UserError(
            f"{folder}: was not validated after its last step, because a signal ended it or trainer.test_freq is off; "
            "remove its last global_step_N and its finished.json, and run the study again"
        )
    scores = {"": curves[metrics[-1]][-1][1]}
    if metrics[-1] == ACCURACY:
        scores = {
            name: fmean(float(item["metrics"]["is_correct"]) for item in items)
            for name, items in read_answers(folder).items()
        }
    times = ("timing/startup", "timing/step")
    seconds = sum(line.get(key) or 0.0 for line in run.metrics for key in times)
    seconds += sum(line.get("timing/validation") or 0.0 for line in run.metrics if line["step"] == 0)
    last = next((line for line in reversed(run.metrics) if line.get("val/episode/count")), {})
    return Result(
        curves,
        scores,
        tokens=int(sum(line.get("tokens/sampled") or 0 for line in run.metrics)),
        answer_tokens=last["val/tokens/sampled"] / last["val/episode/count"] if last else None,
        hours=seconds / 3600,
        gpus=_gpus(run),
    )


def read_answers(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the graded episodes of a run's last validation by problem, as results.json has them."""
    problems: dict[str, list[dict[str, Any]]] = {}
    number = last = -1
    for item in json.loads((folder / "results.json").read_bytes()):
        index = item.get("sample_index", 0)
        number, last = number + (index <= last or number < 0), index
        if item.get("metrics", {}).get("is_correct") is not None:
            problems.setdefault(f"{number}: {item['prompt']}", []).append(item)
    return problems


def _gpus(run: Run) -> int:
    if run.launch.get("platform") != "cuda":
        return 0
    trainer = run.config["trainer"]
    return int(trainer["nnodes"]) * int(trainer["n_gpus_per_node"])


def _curve(lines: Sequence[Mapping[str, Any]], pattern: str) -> Curve:
    """Return the mean of the metrics that match, by the tokens sampled before they were measured."""
    counted = any("tokens/sampled" in line for line in lines)
    before, curve = 0.0, []
    for line in lines:
        after = before + (line.get("tokens/sampled") or 0) if counted else line["step"]
        values = [value for key, value in line.items() if fnmatch(key, pattern) and value is not None]
        if values:
            curve.append((after if pattern.startswith(AFTER_UPDATE) or not counted else before, fmean(values)))
        before = after
    return curve


def at(curve: Curve, tokens: float) -> float:
    """Return the value at `tokens`, on the line between the measurements around it."""
    return float(np.interp(tokens, [x for x, _ in curve], [value for _, value in curve]))


def paired_interval(first: Sequence[Result], other: Sequence[Result]) -> Interval:
    """Return the mean of `other - first` over seeds and problems, and its bootstrap interval: seeds and problems are
    drawn with replacement, a problem that several seeds have at once for all of them. Raises UserError if no problem is
    common to both arms of a seed."""
    pairs = [
        {name: b.scores[name] - value for name, value in a.scores.items() if name in b.scores}
        for a, b in zip(first, other, strict=True)
    ]
    if not all(pairs):
        raise UserError("two arms of one seed have no validation problem in common, so they cannot be compared")
    names = sorted(set().union(*pairs))
    gains = np.array([[pair.get(name, 0.0) for name in names] for pair in pairs])  # [seed, problem]
    is_there = np.array([[name in pair for name in names] for pair in pairs], dtype=float)
    means = gains.sum(1) / is_there.sum(1)
    rng = np.random.default_rng(0)
    by_seed = rng.multinomial(len(pairs), [1 / len(pairs)] * len(pairs), DRAWS) / len(pairs)
    by_problem = rng.multinomial(len(names), [1 / len(names)] * len(names), DRAWS)
    drawn = by_problem @ is_there.T  # [draw, seed]
    of_seeds = np.where(drawn > 0, by_problem @ gains.T / np.maximum(drawn, 1), means)
    low, high = np.quantile((by_seed * of_seeds).sum(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(means.mean()), float(low), float(high))


def rows(figures: Figures) -> list[list[str]]:
    """Return the heading, then a line of cells per arm, without columns that are empty."""
    filled = [column for column in zip(*_cells(figures), strict=True) if any(column[1:])]
    return list(map(list, zip(*filled, strict=True)))


def _cells(figures: Figures) -> Iterator[list[str]]:
    (base, first), *_ = figures.results.items()
    on_gpus = any(run.gpus for runs in figures.results.values() for run in runs)
    yield [
        "arm",
        "start",
        "half way",
        "end",
        "each seed",
        f"minus {base}",
        f"{LEVEL:.0%} interval",
        "training tokens",
        "tokens per answer",
        f"{'GPU-hours' if on_gpus else 'hours'}, all seeds",
    ]
    for name, runs in figures.results.items():
        cells = [name]
        for part in (0.0, 0.5):
            curves = [run.curves[figures.metrics[-1]] for run in runs if run.curves]
            cells.append(f"{fmean(at(curve, part * figures.budget) for curve in curves):.3f}" if curves else "")
        gain = paired_interval(first, runs) if runs is not first else None
        pairs = sum(len(run.scores) for run in first)
        answers = [run.answer_tokens for run in runs if run.answer_tokens is not None]
        yield [
            *cells,
            f"{fmean(run.score for run in runs):.3f}",
            " ".join(f"{run.score:.3f}" for run in runs),
            f"{gain.value:+.3f}" if gain else "",
            f"{gain.low:+.3f} to {gain.high:+.3f}" if gain and pairs > 1 else "",
            f"{tokens:,.0f}" if (tokens := fmean(run.tokens for run in runs)) else "",
            f"{fmean(answers):.1f}" if answers else "",
            f"{hours:.2f}" if (hours := sum(run.hours * max(run.gpus, 1) for run in runs)) else "",
        ]


def markdown(figures: Figures) -> str:
    heading, *lines = rows(figures)
    table = [heading, ["---"] * len(heading), *lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in table)


def latex(figures: Figures) -> str:
    """Return the table for the package booktabs."""
    heading, *lines = ([cell.replace("%", r"\%").replace("_", r"\_") for cell in cells] for cells in rows(figures))
    body = [" & ".join(cells) + r" \\" for cells in lines]
    columns = "l" + "r" * (len(heading) - 1)
    parts = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", " & ".join(heading) + r" \\", r"\midrule", *body]
    return "\n".join([*parts, r"\bottomrule", r"\end{tabular}", ""])


def table(figures: Figures) -> Table:
    """Return the table for a terminal."""
    heading, *lines = rows(figures)
    shown = Table(title=printable(figures.title), box=None, pad_edge=False, header_style="dim")
    for title in heading:
        shown.add_column(printable(title), justify="left" if title == "arm" else "right")
    for cells in lines:
        shown.add_row(*map(printable, cells))
    return shown


def draw(figures: Figures) -> Figure:
    """Plot each metric over the sampled tokens: the mean of the seeds where the first one was measured, with a band
    from their minimum to their maximum. A seed's value between two measurements is on the line between them. An arm
    without a curve, such as a vote, is a point at the end."""
    figure = Figure(figsize=(5.5 * len(figures.metrics), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(figures.metrics), squeeze=False)[0]
    for colour, (name, runs) in zip(cycle(COLOURS), figures.results.items(), strict=False):
        for axes, metric in zip(panels, figures.metrics, strict=True):
            if not runs[0].curves:
                if metric == figures.metrics[-1]:
                    score = fmean(run.score for run in runs)
                    axes.plot([figures.budget], [score], color=colour, marker="D", ls="", label=name)
                continue
            end = min(run.curves[metric][-1][0] for run in runs)
            tokens = sorted({end, *(x for x, _ in runs[0].curves[metric] if x <= end)})
            values = np.array([[at(run.curves[metric], x) for run in runs] for x in tokens])
            marker = "o" if metric.startswith(AFTER_UPDATE) or len(tokens) == 1 else ""
            axes.plot(tokens, values.mean(1), color=colour, marker=marker, markersize=4, label=name)
            axes.fill_between(tokens, values.min(1), values.max(1), color=colour, alpha=0.12)
    counts_tokens = any(run.tokens for runs in figures.results.values() for run in runs)
    for axes, metric in zip(panels, figures.metrics, strict=True):
        axes.set(title=metric, xlabel="tokens sampled in training" if counts_tokens else "step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].legend(loc="best", frameon=False)
    seeds = len(figures.seeds)
    bands = f"mean of {seeds} seeds, bands from their minimum to their maximum" if seeds > 1 else "one seed"
    figure.suptitle(f"{figures.title}\n{bands}")
    return figure


def write_report(figures: Figures, output: Path) -> None:
    """Write table.md, table.tex and figure.png."""
    picture = BytesIO()
    draw(figures).savefig(picture, format="png", dpi=130)
    files = {"table.md": markdown(figures).encode(), "table.tex": latex(figures).encode()}
    for name, content in {**files, "figure.png": picture.getvalue()}.items():
        replace_file(output / name, [content])
