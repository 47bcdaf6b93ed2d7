"""Compare the laptop's runs with and without the coach's scores: three seeds each, equal models, data and steps.

    python examples/compare_coach.py [--recipe dsbench] [--seeds 0 1 2] [--weights 1 0] [--output FOLDER]

Invariant: a run is the recipe's `run_tiny_cpu.sh` unchanged but for its seed and COACH_WEIGHT; a figure comes from the
runs' metrics.jsonl alone. Finished runs are not repeated, interrupted ones resumed. Writes table.md and curves.png.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipe.dag.core.errors import UserError
from recipe.dag.report.curve import COLOURS
from recipe.dag.train.data_script import run

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("mathchat", "dsbench")
TRAINING, VALIDATION = "episode/accuracy", "val/accuracy"

Curve = dict[int, float]
"""Step -> value."""
Runs = Mapping[str, Sequence[Mapping[str, Curve]]]
"""Weight -> for each seed, the curves by metric."""


def folder_of(seed: int, weight: str, recipe: str = "mathchat") -> Path:
    """Return the folder that the recipe's script writes."""
    name = f"{recipe}_tiny" + (f"_seed{seed}" if seed else "") + (f"_coach{weight}" if weight != "1" else "")
    return ROOT / "outputs" / name


def curves(folder: Path) -> dict[str, Curve]:
    """Return accuracy in training and on unseen problems by step. Raises UserError without metrics.jsonl."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise UserError(f"{file} does not exist; run the recipe's run_tiny_cpu.sh, or leave --only-report out")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    by_metric = {key: {line["step"]: line[key] for line in lines if key in line} for key in (TRAINING, VALIDATION)}
    if not by_metric[VALIDATION]:
        raise UserError(f"{file} has no {VALIDATION} yet; leave --only-report out to finish the run")
    return by_metric


def is_finished(folder: Path, recipe: str) -> bool:
    """Return whether the run has reached the last step of the recipe's profile."""
    file = folder / "metrics.jsonl"
    profile = yaml.safe_load((ROOT / "recipe" / recipe / "config" / "tiny_cpu.yaml").read_text())
    lines = file.read_text().splitlines() if file.is_file() else []
    return bool(lines) and json.loads(lines[-1])["step"] >= profile["trainer"]["total_training_steps"]


def train(seed: int, weight: str, recipe: str = "mathchat") -> None:
    """Run the script unless its run is finished; it resumes one that was interrupted. Raises UserError if it fails."""
    if is_finished(folder_of(seed, weight, recipe), recipe):
        return
    script = ROOT / "recipe" / recipe / "run_tiny_cpu.sh"
    done = subprocess.run(["bash", str(script), str(seed)], env={**os.environ, "COACH_WEIGHT": weight})
    if done.returncode:
        raise UserError(f"seed {seed}, COACH_WEIGHT={weight}: {script.name} ended with {done.returncode}; see above")


def table(runs: Runs, seeds: Sequence[int]) -> str:
    """Return the accuracy on unseen problems of each run by step, as Markdown. Raises UserError for runs that were
    validated at different steps."""
    validated = {tuple(sorted(of_seed[VALIDATION])) for of_seeds in runs.values() for of_seed in of_seeds}
    if len(validated) > 1:
        raise UserError("some runs are not finished, or validated at other steps; leave --only-report out")
    (steps,) = validated
    lines = [
        f"| coach's weight | seed | step {' | '.join(map(str, steps))} |",
        f"|---|---|{'---|' * len(steps)}",
    ]
    for weight, curves_of_seeds in runs.items():
        for seed, of_seed in zip(seeds, curves_of_seeds, strict=True):
            cells = [f"{of_seed[VALIDATION][step]:.3f}" for step in steps]
            lines.append(f"| {weight} | {seed} | {' | '.join(cells)} |")
    for weight, curves_of_seeds in runs.items():
        rise = fmean(c[VALIDATION][max(c[VALIDATION])] - c[VALIDATION][min(c[VALIDATION])] for c in curves_of_seeds)
        lines.append(f"\nmean rise with the coach's weight {weight}: {rise:+.3f}")
    return "\n".join(lines) + "\n"


def draw(runs: Runs, png: Path) -> None:
    """Draw the mean over the seeds, and their range, in training and on unseen problems."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    both = figure.subplots(1, 2, sharey=True)
    for colour, (weight, curves_of_seeds) in zip(COLOURS, runs.items(), strict=False):
        label = "without the coach's scores" if float(weight) == 0 else "with the coach's scores"
        for axes, key in zip(both, (TRAINING, VALIDATION), strict=True):
            steps = sorted(set.intersection(*(set(c[key]) for c in curves_of_seeds)))
            values = [[c[key][step] for c in curves_of_seeds] for step in steps]
            marker = "o" if key == VALIDATION else None
            axes.plot(steps, [fmean(column) for column in values], color=colour, marker=marker, label=label)
            lows, highs = [min(column) for column in values], [max(column) for column in values]
            axes.fill_between(steps, lows, highs, color=colour, alpha=0.15)
    for axes, title in zip(both, ("training (sampled)", "unseen problems"), strict=True):
        axes.set(title=title, xlabel="step", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    seeds = max(map(len, runs.values()))
    figure.suptitle(f"Mean of {seeds} seeds, bands from their minimum to their maximum" if seeds > 1 else "One seed")
    both[0].set_ylabel("accuracy")
    both[1].legend(loc="lower right", frameon=False)
    figure.savefig(png, dpi=130)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--weights", nargs="+", default=["1", "0"], help="of the coach's scores")
    parser.add_argument("--output", type=Path, help="by default outputs/RECIPE_compare")
    parser.add_argument("--only-report", action="store_true", help="train nothing: report the runs that exist")
    options = parser.parse_args(argv)
    pairs = [(seed, weight) for seed in options.seeds for weight in options.weights]
    for seed, weight in pairs if not options.only_report else []:
        train(seed, weight, options.recipe)
    folders = {
        weight: [folder_of(seed, weight, options.recipe) for seed in options.seeds] for weight in options.weights
    }
    runs = {weight: [curves(folder) for folder in of_weight] for weight, of_weight in folders.items()}
    output = options.output or ROOT / "outputs" / f"{options.recipe}_compare"
    output.mkdir(parents=True, exist_ok=True)
    text = table(runs, options.seeds)
    (output / "table.md").write_text(text)
    draw(runs, output / "curves.png")
    print(f"{text}-> {output}/table.md, curves.png")


if __name__ == "__main__":
    sys.exit(run(main))
