"""Step time and tokens per second of ReTool-MA on 1, 2, 4 and 8 GPUs of one host, and how well they scale.

    python examples/bench_scaling.py --model MODEL [--gpus 1,2,4] [--arms weak,strong@4,lora] [key=value ...]

Each arm is recipe/retool_ma/run_qwen2_5-3b.sh in a process of its own that sees only its GPUs. An arm is KIND@GPUS, or
KIND for every number of `--gpus`. The kinds:

- weak: one policy for the three roles, and as many episodes for each GPU as the script has in all
- strong: the same policy, and the script's episodes however many GPUs (on one GPU: weak)
- together: three policies that take turns on all GPUs, with the episodes of weak
- apart: three policies with GPUs of their own; on two GPUs, planner and executor share one
- lora: an adapter for each role on one frozen model, with the episodes of weak

Arms run one after the other, or with `--side_by_side` as many at once as the GPUs allow. An arm ends after `--limit`
seconds, and the steps that it has finished count. The first `--warm_up` steps compile and are left out; results are
means over the other steps. Tokens are those that the policies computed; the efficiency is the tokens per second of each
GPU over those of the same policies on the fewest GPUs (of `apart`: together). Trailing overrides apply to all arms.

Each arm's line is printed and OUT/scaling.json written as soon as the arm ends; arms that this file has from an earlier
call stay in it. Output and log of an arm are OUT/ARM and OUT/ARM.log. The model may be that of examples/random_model.py
(--shape 3b --mean_tokens 300), since the data are short problems that are made here. With a tiny model, the override
`platform=cpu` and CONFIG=tiny_cpu in the environment, the command runs without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "recipe" / "retool_ma" / "run_qwen2_5-3b.sh"
CPU = "platform=cpu"
ROLES = ("planner", "executor", "verifier")
WORKFLOWS = {
    "weak": "workflow_retool_ma.yaml",
    "strong": "workflow_retool_ma.yaml",
    "together": "workflow_retool_ma_separate.yaml",
    "apart": "workflow_retool_ma_separate.yaml",
    "lora": "workflow_retool_ma_lora.yaml",
}
BASES = {"strong": "weak", "apart": "together"}
"""Kind -> the kind with the same policies whose arm on the fewest GPUs it is compared with, if not its own."""
TIMINGS = ("rollout", "train", "gap", "sync")


@dataclass(frozen=True, slots=True)
class Arm:
    kind: str
    gpus: int

    def __str__(self) -> str:
        return f"{self.kind}@{self.gpus}"

    @property
    def policy_gpus(self) -> dict[str, int]:
        """Return the GPUs of the policies that have some of their own."""
        if self.kind != "apart":
            return {}
        if self.gpus == 2:
            return {"verifier": 1}  # it reads what the others wrote, so half of all tokens are its
        each, rest = divmod(self.gpus, len(ROLES))
        return {role: each + (index >= len(ROLES) - rest) for index, role in enumerate(ROLES)}

    def prompts(self, of_one: int) -> int:
        """Return the prompts of a step, where a step on one GPU has `of_one`."""
        return of_one * (1 if self.kind == "strong" else self.gpus)


def arms_of(text: str, counts: list[int]) -> list[Arm]:
    """Return the arms that `--arms` names, for a kind without a number those on `counts` GPUs. Raises ValueError."""
    arms = []
    for word in text.split(","):
        kind, _, number = word.partition("@")
        if kind not in WORKFLOWS:
            raise ValueError(f"unknown arm {word}; choose from {', '.join(WORKFLOWS)}")
        if number and not (number.isdecimal() and int(number)):
            raise ValueError(f"{word}: after the @ comes a number of GPUs")
        for gpus in [int(number)] if number else counts:
            if kind == "apart" and gpus == 1:
                if number:
                    raise ValueError(f"{word}: policies with GPUs of their own need two or more")
                continue
            arms.append(Arm("weak" if kind == "strong" and gpus == 1 else kind, gpus))
    return list(dict.fromkeys(arms))


def visible_gpus(overrides: list[str]) -> list[str]:
    """Return the indices of the GPUs that arms may use; on the CPU as many as an arm may ask for."""
    if CPU in overrides:
        return [str(index) for index in range(8)]
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [index for index in visible.split(",") if index]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def command_of(arm: Arm, out: Path, args: argparse.Namespace) -> list[str]:
    return [
        "bash",
        str(SCRIPT),
        f"data.train_files={out}/data/train.parquet",
        f"data.val_files={out}/data/test.parquet",
        f"output_dir={out}/{arm}",
        f"data.train_batch_size={arm.prompts(args.prompts)}",
        f"trainer.total_training_steps={args.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.logger=[console]",
        *(f"workflow.policies.{role}.gpus={count}" for role, count in arm.policy_gpus.items()),
        *args.overrides,
    ]


def run(arm: Arm, gpus: list[str], out: Path, args: argparse.Namespace) -> dict[str, object]:
    """Run an arm on `gpus` and return its results, with `ended`: how its process did."""
    log, metrics = out / f"{arm}.log", out / str(arm) / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    env = {**os.environ, "MODEL_PATH": args.model, "WORKFLOW": f"workflows/{WORKFLOWS[arm.kind]}"}
    env |= {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    with log.open("w") as stream:
        process = subprocess.Popen(command_of(arm, out, args), env=env, stdout=stream, stderr=stream)
        try:
            code = process.wait(args.limit)
            ended = "completed" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"limit of {args.limit} s"
            process.terminate()  # the script has become the run, which ends in order
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return {"ended": ended, "gpus": arm.gpus} | summary(steps, arm.gpus, args.warm_up)


def summary(steps: list[dict[str, float]], gpus: int, warm_up: int) -> dict[str, object]:
    """Return the results of an arm with these metrics of each step: seconds, tokens per second, GiB."""
    result: dict[str, object] = {"steps_s": [round(step["timing/step"], 2) for step in steps]}
    if steps:
        result["start_s"] = steps[0]["timing/startup"]
    measured = steps[warm_up:]
    if not measured:
        return result
    seconds = fmean(step["timing/step"] for step in measured)
    tokens = fmean(step["rows/tokens_computed"] for step in measured)

    def values_of(ending: str) -> list[float]:
        return [value for step in steps for key, value in step.items() if key.endswith(ending)]

    return result | {
        "step_s": seconds,
        **{f"{part}_s": fmean(step[f"timing/{part}"] for step in measured) for part in TIMINGS},
        "episodes": measured[0]["episode/count"],
        "tokens": tokens,
        "tokens_per_s_per_gpu": tokens / seconds / gpus,
        "update_tokens_per_s": {
            key.split("/")[1]: fmean(step[key] for step in measured)
            for key in measured[0]
            if key.endswith("/update_tokens_per_s")
        },
        "peak_gib": max(values_of("/max_memory_allocated_gb"), default=None),
        "pearson": min(values_of("/logprob_pearson"), default=None),
    }


def add_efficiency(results: dict[str, dict]) -> None:
    """Write the efficiency of each arm that has a base among `results` (name -> result)."""
    measured = {name: result for name, result in results.items() if "tokens_per_s_per_gpu" in result}
    for name, result in measured.items():
        kind = name.partition("@")[0]
        family = [other for other in measured if other.partition("@")[0] == BASES.get(kind, kind)]
        if family:
            base = min(family, key=lambda other: measured[other]["gpus"])
            result["base"] = base
            result["efficiency"] = result["tokens_per_s_per_gpu"] / measured[base]["tokens_per_s_per_gpu"]


def line_of(name: str, result: dict) -> str:
    parts = [result["ended"], f"steps {', '.join(f'{seconds:.1f}' for seconds in result['steps_s']) or 'none'} s"]
    if "start_s" in result:
        parts.append(f"ready after {result['start_s']:.0f} s")
    if "step_s" in result:
        parts.append(f"{result['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU")
        if result.get("base", name) != name:
            times = result["efficiency"] * result["gpus"] / int(result["base"].partition("@")[2])
            parts.append(f"efficiency {result['efficiency']:.2f} ({times:.2f} times {result['base']})")
        parts.append(" ".join(f"{part} {result[f'{part}_s']:.2f}" for part in TIMINGS))
        if result["peak_gib"] is not None:
            parts.append(f"peak {result['peak_gib']:.1f} GiB")
        if result["pearson"] is not None:
            parts.append(f"lowest correlation of log-probs {result['pearson']:.4f}")
    return f"{name}: {' | '.join(parts)}"


def measure(arms: list[Arm], gpus: list[str], out: Path, args: argparse.Namespace) -> dict[str, dict]:
    """Run the arms on `gpus`; print and write each result when there is one. Return those of all arms in the file."""
    file = out / "scaling.json"
    results: dict[str, dict] = json.loads(file.read_text())["arms"] if file.exists() else {}
    free, changed = list(gpus), threading.Condition()

    def measure_arm(arm: Arm) -> None:
        with changed:
            changed.wait_for(lambda: len(free) >= arm.gpus)
            taken = [free.pop(0) for _ in range(arm.gpus)]
        try:
            result = run(arm, taken, out, args)
        finally:
            with changed:
                free.extend(taken)
                free.sort(key=gpus.index)
                changed.notify_all()
        with changed:
            results[str(arm)] = result
            add_efficiency(results)
            report = {"arms": results, "arguments": {key: str(value) for key, value in vars(args).items()}}
            file.write_text(json.dumps(report, indent=1))
            print(line_of(str(arm), result), flush=True)

    with ThreadPoolExecutor(len(arms) if args.side_by_side else 1) as pool:
        list(pool.map(measure_arm, arms))  # list() raises an exception of an arm
    return results


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--arms", default=",".join(WORKFLOWS), help="KIND or KIND@GPUS, separated by commas")
    parser.add_argument("--gpus", help="numbers of GPUs for kinds without one (1, 2, 4 and 8, as far as visible)")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm_up", type=int, default=1, help="first steps, which are left out")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step on one GPU")
    parser.add_argument("--limit", type=int, default=900, help="seconds after which an arm is ended")
    parser.add_argument("--side_by_side", action="store_true", help="run arms at once that fit on different GPUs")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_scaling"))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args(argv)
    if args.steps <= args.warm_up:
        parser.error(f"--steps {args.steps}: no step is left after --warm_up {args.warm_up}")
    visible = visible_gpus(args.overrides)
    counts = [int(count) for count in args.gpus.split(",")] if args.gpus else [1, 2, 4, 8]
    try:
        arms = arms_of(args.arms, [count for count in counts if args.gpus or count <= len(visible)])
    except ValueError as error:
        parser.error(f"--arms: {error}")
    if large := [arm for arm in arms if arm.gpus > len(visible)]:
        parser.error(f"{large[0]} needs {large[0].gpus} GPUs, and {len(visible)} are visible")
    if not arms:
        parser.error("no GPU is visible")
    out = args.out.absolute()
    size = max(arm.prompts(args.prompts) for arm in arms) * args.steps
    data = [sys.executable, str(ROOT / "recipe" / "tiny" / "arithmetic.py"), "--local_dir", str(out / "data")]
    subprocess.run([*data, "--train_size", str(size), "--test_size", "8"], check=True)
    args.model = str(Path(args.model).absolute()) if Path(args.model).exists() else args.model
    results = measure(arms, visible, out, args)
    print(f"{out}/scaling.json")
    if any("step_s" not in results[str(arm)] for arm in arms):
        sys.exit(1)


if __name__ == "__main__":
    main()
