"""Compare four estimators on the tiny ReTool-MA with equal data, initial weights and tokens.

    python examples/compare_estimators.py [--seeds 0 1 2] [--steps 30] [--jobs 1] [--output outputs/estimators]

Each run uses `recipe.dag.app.main` and workflows/workflow_retool_ma.yaml with another `algorithm` (written to
OUTPUT/ESTIMATOR.yaml). Runs with the same seed start from the same model. Writes table.md and figure.png. The same
command resumes killed runs and skips finished ones. A run takes three to five minutes on two cores, all take an hour.

Tokens are those sampled in training. Runs have equally many steps and episodes, but answers differ in length; curves
and table end at the tokens of the run with the fewest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from statistics import fmean

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recipe.dag.report.curve import COLOURS

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / "workflows" / "workflow_retool_ma.yaml"
ALGORITHMS: dict[str, dict] = {
    "grpo_pooled": {"estimator": "grpo", "group_by": ["uid"]},
    "grpo": {"estimator": "grpo"},
    "gae_chain": {"estimator": "gae_chain"},
    "reinforce_pp": {"estimator": "reinforce_pp"},
}
"""grpo_pooled: one group per problem, with all agents. grpo: one group per problem and agent."""
CRITIC = {"lr": 1.0e-3}
ACCURACY, VALIDATION, SAMPLED = "episode/accuracy", "val/accuracy", "tokens/sampled"

Curve = list[tuple[float, float]]
"""(tokens sampled so far, value) pairs."""


def workflow_with(name: str) -> dict:
    """Return the shipped workflow with another algorithm.

    For gae_chain, the node that pays all agents for a solved problem is left out: the chain already propagates the
    verifier's reward to earlier calls.
    """
    workflow = yaml.safe_load(WORKFLOW.read_text())
    workflow["algorithm"] = ALGORITHMS[name]
    if name == "gae_chain":
        workflow["policies"]["main"]["critic"] = CRITIC
        workflow["nodes"] = [node for node in workflow["nodes"] if node["id"] != "team"]
    return workflow


def build(seed: int, output: Path, steps: int | None) -> None:
    """Make the data and the initial model of a seed, unless they exist."""
    data = ["--local_dir", str(output / "data"), "--train_size", "2048", "--test_size", "64", "--seed", str(seed)]
    run([str(ROOT / "recipe" / "tiny" / "arithmetic.py"), *data], output / "data.log")
    model = ["--workflow", str(WORKFLOW), "--teacher", "recipe/retool_ma/teacher.py:Teacher", "--seed", str(seed)]
    model += ["--output", str(output / "model")] + ([] if steps is None else ["--steps", str(steps)])
    run(["-m", "recipe.tiny.build", *model], output / "model.log")


def train(name: str, seed: int, output: Path, steps: int, overrides: list[str]) -> Path:
    """Train and return the run's metrics.jsonl."""
    workflow, shared, folder = output / f"{name}.yaml", output / f"seed{seed}", output / f"{name}_seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    arguments = ["--config-path", str(ROOT / "recipe" / "retool_ma" / "config"), "--config-name", "tiny_cpu"]
    arguments += [f"workflow={workflow}", f"seed={seed}", f"output_dir={folder}", f"model_path={shared / 'model'}"]
    data = shared / "data"
    arguments += [f"data.train_files={data / 'train.parquet'}", f"data.val_files={data / 'test.parquet'}"]
    arguments += [f"trainer.experiment_name={folder.name}", f"trainer.total_training_steps={steps}"]
    run(["-m", "recipe.dag.main", *arguments, "trainer.logger=[console]", *overrides], folder / "run.log")
    print(f"{name}, seed {seed}: done", flush=True)
    return folder / "metrics.jsonl"


def run(arguments: list[str], log: Path) -> None:
    """Run Python with its output in `log`. Raises SystemExit with the end of the log if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        process = subprocess.run([sys.executable, *arguments], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SystemExit(f"{' '.join(arguments[:2])} failed ({process.returncode}); the end of {log}:\n{tail}")


def curves(metrics_jsonl: Path) -> dict[str, Curve]:
    """Return accuracy in training and validation by the tokens sampled before the measurement, and under SAMPLED the
    step by the tokens after it."""
    lines = {line["step"]: line for line in map(json.loads, metrics_jsonl.read_text().splitlines())}
    steps = [step for step in sorted(lines) if step > 0]
    after = dict(zip([0, *steps], accumulate([0.0, *(lines[s][SAMPLED] for s in steps)]), strict=True))
    before = {step: after[earlier] for earlier, step in zip([0, *steps], steps, strict=False)}
    return {
        ACCURACY: [(before[step], lines[step][ACCURACY]) for step in steps],
        VALIDATION: [(after[step], line[VALIDATION]) for step, line in sorted(lines.items()) if VALIDATION in line],
        SAMPLED: [(after[step], step) for step in steps],
    }


def at(curve: Curve, tokens: float) -> float:
    """Return the last value measured within `tokens`."""
    return curve[bisect_right(curve, (tokens, float("inf"))) - 1][1]


def latest(curve: Curve, tokens: float) -> list[float]:
    """Return the last fifth of the values measured within `tokens`, at least one."""
    values = [value for measured_at, value in curve if measured_at <= tokens]
    return values[-max(1, len(values) // 5) :]


def draw(runs_of: dict[str, list[dict[str, Curve]]], budget: float) -> Figure:
    """Plot the mean of each estimator's seeds where all of them were measured within `budget`, with a band from their
    minimum to their maximum. A dot is a validation; between dots nothing was measured."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for colour, (name, runs) in zip(COLOURS, runs_of.items(), strict=False):
        for axis, key, marker in zip(axes, (ACCURACY, VALIDATION), ("", "o"), strict=True):
            measured = [points for points in zip(*(run[key] for run in runs), strict=False) if max(points)[0] <= budget]
            tokens = [fmean(at_tokens for at_tokens, _ in points) for points in measured]
            values = [[value for _, value in points] for points in measured]
            axis.plot(tokens, list(map(fmean, values)), color=colour, marker=marker, label=name)
            axis.fill_between(tokens, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.12)
    for axis, title in zip(axes, ("training (sampled)", "unseen problems (dots: validations)"), strict=True):
        axis.set(title=title, xlabel="tokens sampled in training", xlim=(0, budget), ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of problems solved")
    axes[1].legend(loc="lower right", frameon=False)
    seeds = max(map(len, runs_of.values()))
    bands = f"mean of {seeds} seeds, bands from their minimum to their maximum" if seeds > 1 else "one seed"
    figure.suptitle(f"Estimators on ReTool-MA's tiny run: {bands}")
    return figure


def report(runs_of: dict[str, list[dict[str, Curve]]], output: Path) -> str:
    """Write table.md and figure.png, given the curves of each estimator's seeds, and return the table."""
    budget = min(run[SAMPLED][-1][0] for runs in runs_of.values() for run in runs)
    draw(runs_of, budget).savefig(output / "figure.png", dpi=130)
    seeds = len(next(iter(runs_of.values())))
    lines = [
        f"Unseen problems solved, by tokens sampled in training (of {budget:,.0f}); mean of {seeds} seeds, then each",
        "",
        "| estimator | at first | half the tokens | all | each seed, all | in training, last fifth |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in runs_of.items():
        cells = [fmean(at(run[VALIDATION], part * budget) for run in runs) for part in (0, 0.5, 1)]
        last = [at(run[VALIDATION], budget) for run in runs]
        late = fmean(fmean(latest(run[ACCURACY], budget)) for run in runs)
        row = [*(f"{cell:.3f}" for cell in cells), " ".join(f"{value:.3f}" for value in last), f"{late:.3f}"]
        lines.append(f"| {name} | {' | '.join(row)} |")
    table = "\n".join(lines) + "\n"
    (output / "table.md").write_text(table)
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--estimators", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model-steps", type=int, help="steps of the model's warm start; by default the recipe's")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs; each needs two cores")
    parser.add_argument("--output", type=Path, default=Path("outputs/estimators"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of every run, after --")
    options = parser.parse_args(argv)
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    for name in options.estimators:
        (output / f"{name}.yaml").write_text(yaml.safe_dump(workflow_with(name), sort_keys=False))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.jobs)))
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda seed: build(seed, output / f"seed{seed}", options.model_steps), options.seeds))
        pairs = [(name, seed) for seed in options.seeds for name in options.estimators]
        files = pool.map(lambda pair: train(pair[0], pair[1], output, options.steps, options.overrides), pairs)
        metrics = dict(zip(pairs, files, strict=True))
    runs_of = {name: [curves(metrics[name, seed]) for seed in options.seeds] for name in options.estimators}
    print(report(runs_of, output))


if __name__ == "__main__":
    main()
