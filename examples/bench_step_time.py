"""Step time of workflows and of verl's own trainer with the same model, prompts, lengths, batch and engine.

    python examples/bench_step_time.py --model MODEL [--arms stock,tuned,ours,three] [--steps 6] [key=value ...]

Needs a CUDA host. Arms run one after the other; slashes separate parts that run side by side on one GPU each
(`--arms stock/tuned,ours,three`). The arms:

- stock: verl's trainer with its defaults for a machine without flash-attn: padded rows, sdpa, logits
- tuned: verl's trainer with this project's packed attention and verl's fused head
- kernels: the same with Liger's kernels, weights gathered once a pass and gradients reduced once a step, as in ours
- ours: a workflow with one agent
- three: a workflow with three agents that share weights, each with a third of the episodes

Trailing overrides (verl's keys) apply to all arms. The first steps of each arm compile and are left out (`--warm_up`,
2); the results are ratios of the medians of the other steps. `--fill` lengthens each problem to about `--prompt`
tokens. `--tokens` is the size of a micro-batch; stock, which keeps logits, uses `--stock_tokens`, as many as fit.
Writes OUT/step_time.json and prints it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE_TOKENS = 64
"""Tokens that a chat template adds to a problem, at most."""
RATIOS = (("ours", "stock"), ("ours", "tuned"), ("ours", "kernels"), ("three", "ours"))
ATTENTION = "packed_attention"
"""Module in OUT that registers this project's attention in verl's workers."""
PADDED = (
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
)
PACKED = (
    "actor_rollout_ref.model.use_remove_padding=True",
    "+actor_rollout_ref.model.override_config.attn_implementation=varlen",
    f"actor_rollout_ref.model.external_lib={ATTENTION}",
    "actor_rollout_ref.model.use_fused_kernels=True",
    "actor_rollout_ref.model.fused_kernel_options.impl_backend=triton",
)
KERNELS = (
    *PACKED,
    "actor_rollout_ref.model.use_liger=True",
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=False",
    "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation=True",
)
AGENT = "{name: solver%d, policy: main, sampling: {temperature: 1.0, max_tokens: %d}}"
NODE = "  - {id: solve%d, agent: solver%d}\n"
WORKFLOW = """\
dag_id: step_time
agents: [%(agents)s]
policies: {main: {model: {path: "%(model)s"}}}
algorithm: {estimator: grpo, group_by: [uid]}
nodes:
%(nodes)s  - id: reward
    reward: %(reward)s:workflow_reward
    after: [%(ids)s]
"""
REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return float(len(set(solution_str)) % 7) / 7


def workflow_reward(episode):
    scores = {call.agent: compute_score("", call.text, "") for call in episode.calls}
    episode.outcome = sum(scores.values()) / len(scores)
    return scores
"""


def prepare(out: Path, rows: int, *, model: str | None = None, tokens: int = 0) -> None:
    """Write problems and rewards. With a `model`, problems are lengthened to about `tokens` of its tokens."""
    import pandas as pd

    out.mkdir(parents=True, exist_ok=True)
    problems = [f"{17 + i % 83} plus {11 + i % 89} is" for i in range(rows)]
    if model is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        size = len(tokenizer.encode(problems[0]))
        problems = [" ".join([problem] * max(1, tokens // (size + 1))) for problem in problems]
    frame = pd.DataFrame(
        {
            "data_source": "toy",
            "prompt": [[{"role": "user", "content": text}] for text in problems],
            "ability": "math",
            "reward_model": [{"style": "rule", "ground_truth": "0"}] * rows,
            "extra_info": [{"index": i} for i in range(rows)],
        }
    )
    frame.to_parquet(out / "train.parquet")
    (out / "reward.py").write_text(REWARD)
    (out / f"{ATTENTION}.py").write_text("from recipe.dag.policy import varlen\n\nvarlen.register()\n")


def shared_overrides(out: Path, args: argparse.Namespace, tokens: int) -> list[str]:
    tokens = max(tokens, args.prompt + args.response)
    return [
        f"data.train_files={out}/train.parquet",
        f"data.val_files={out}/train.parquet",
        f"data.train_batch_size={args.batch}",
        f"data.max_prompt_length={args.prompt}",
        f"data.max_response_length={args.response}",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}",
        f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={tokens}",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={args.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[console]",
        *args.overrides,
    ]


def run(command: list[str], log: Path, gpu: str | None = None) -> str:
    """Run `command` on GPU number `gpu` (None: on all visible ones) and return its log."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(log.parent), os.environ.get("PYTHONPATH", "")])}
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    with log.open("w") as stream:
        code = subprocess.run(command, cwd=ROOT, env=env, stdout=stream, stderr=subprocess.STDOUT).returncode
    text = log.read_text(errors="replace")
    if code:
        sys.exit(f"error: {' '.join(command[:4])} ended with {code}; the end of {log}:\n{text[-3000:]}")
    return text


def verl(name: str, model: tuple[str, ...], out: Path, args: argparse.Namespace) -> list[float]:
    """Return the seconds of each step of verl's trainer."""
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={args.model}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.batch}",
        f"reward.custom_reward_function.path={out}/reward.py",
        "reward.custom_reward_function.name=compute_score",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "reward.num_workers=2",
        f"actor_rollout_ref.rollout.n={args.n}",
        *model,
        *shared_overrides(out, args, args.stock_tokens if model is PADDED else args.tokens),
    ]
    log = run(command, out / f"{name}.log", args.gpu)
    return [float(seconds) for seconds in re.findall(r"timing_s/step:(?:np\.float64\()?([0-9.]+)", log)]


def workflow(name: str, agents: int, out: Path, args: argparse.Namespace) -> list[float]:
    """Return the seconds of each step of a workflow whose parallel agents share the episodes of one."""
    file = out / f"workflow_{name}.yaml"
    values = {
        "agents": ", ".join(AGENT % (index, args.response) for index in range(agents)),
        "nodes": "".join(NODE % (index, index) for index in range(agents)),
        "ids": ", ".join(f"solve{index}" for index in range(agents)),
        "model": args.model,
        "reward": out / "reward.py",
    }
    file.write_text(WORKFLOW % values)
    command = [
        sys.executable,
        "-m",
        "recipe.dag.main",
        f"workflow={file}",
        f"output_dir={out}/{name}",
        "trainer.resume_mode=disable",
        "rollout.progress=false",
        f"actor_rollout_ref.rollout.n={args.n // agents}",
        *shared_overrides(out, args, args.tokens),
    ]
    run(command, out / f"{name}.log", args.gpu)
    return [json.loads(line)["timing/step"] for line in (out / name / "metrics.jsonl").read_text().splitlines()]


ARMS = {
    "stock": partial(verl, "stock", PADDED),
    "tuned": partial(verl, "tuned", PACKED),
    "kernels": partial(verl, "kernels", KERNELS),
    "ours": partial(workflow, "ours", 1),
    "three": partial(workflow, "three", 3),
}


def parser(description: str, out: str, steps: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every comparison of step times."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--warm_up", type=int, default=2, help="first steps, which are left out")
    parser.add_argument("--batch", type=int, default=32, help="prompts per step")
    parser.add_argument("--n", type=int, default=4, help="episodes per prompt")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("overrides", nargs="*")
    return parser


def medians_of(times: dict[str, list[float]], out: Path, warm_up: int) -> dict[str, float]:
    """Return each arm's median of seconds, without the first `warm_up` steps; exit if an arm has no other step."""
    for name, values in times.items():
        if len(values) <= warm_up:
            sys.exit(f"error: {name} reported {len(values)} steps, see {out}/{name}.log; raise --steps")
    return {name: statistics.median(values[warm_up:]) for name, values in times.items()}


def write_report(file: Path, args: argparse.Namespace, **results: object) -> None:
    """Write and print the results and the arguments."""
    report = json.dumps(results | {"arguments": {key: str(value) for key, value in vars(args).items()}}, indent=1)
    file.write_text(report)
    print(report)


def step_options() -> argparse.ArgumentParser:
    options = parser((__doc__ or "").partition("\n")[0], "outputs/bench_step_time", steps=6)
    options.add_argument("--arms", default="stock,ours", help=f"from {', '.join(ARMS)}; a slash separates GPUs")
    options.set_defaults(gpu=None)
    options.add_argument("--tokens", type=int, default=16384, help="tokens of a micro-batch")
    options.add_argument("--stock_tokens", type=int, default=8192, help="the same for stock, which keeps logits")
    options.add_argument("--fill", action="store_true", help="problems of about --prompt tokens")
    return options


def measure(parts: list[list[str]], out: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each step of each arm."""
    gpus: list[str | None] = [None]
    if len(parts) > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = [*visible.split(",")] if visible else [str(index) for index in range(len(parts))]
        if len(gpus) < len(parts):
            sys.exit(f"error: --arms has {len(parts)} parts, and {len(gpus)} GPUs are visible")
    times: dict[str, list[float]] = {}

    def measure_part(part: list[str], gpu: str | None) -> None:
        part_args = argparse.Namespace(**{**vars(args), "gpu": gpu})
        for name in part:
            times[name] = ARMS[name](out, part_args)
            print(f"{name}: {', '.join(f'{seconds:.1f}' for seconds in times[name])} s", flush=True)

    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(measure_part, parts, gpus))  # list() raises an exception of a part
    return times


def main() -> None:
    options = step_options()
    args = options.parse_args()
    parts = [part.split(",") for part in args.arms.split("/")]
    arms = [name for part in parts for name in part]
    if unknown := [name for name in arms if name not in ARMS]:
        options.error(f"--arms: unknown arm {unknown[0]}; choose from {', '.join(ARMS)}")
    if "three" in arms and args.n % 3:
        options.error(f"--n {args.n}: three agents share the episodes of a prompt; pass a multiple of 3")
    out = args.out.absolute()
    problem_tokens = args.prompt - TEMPLATE_TOKENS
    prepare(out, args.batch * args.steps, model=args.model if args.fill else None, tokens=problem_tokens)
    times = measure(parts, out, args)
    medians = medians_of(times, out, args.warm_up)
    ratios = {f"{arm}/{base}": medians[arm] / medians[base] for arm, base in RATIOS if {arm, base} <= set(arms)}
    write_report(out / "step_time.json", args, ratios=ratios, median_s=medians, steps_s=times)


if __name__ == "__main__":
    main()
