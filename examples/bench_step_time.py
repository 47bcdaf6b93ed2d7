"""Step time of a one-agent workflow against stock verl: same model, prompts, lengths, batch and engine, in one run.

    python examples/bench_step_time.py --model MODEL --out outputs/bench [--steps 6] [key=value ...]

On a CUDA host. Trailing overrides go to both (verl's keys). The first two steps of each arm compile and are left out;
the figure is the ratio of the medians of the rest. Writes OUT/step_time.json and prints it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 2
WORKFLOW = """\
dag_id: one_agent
agents: [{name: solver, policy: main, sampling: {temperature: 1.0, max_tokens: %(response)d}}]
policies: {main: {model: {path: "%(model)s"}}}
algorithm: {estimator: grpo, group_by: [uid]}
nodes:
  - {node_id: solve, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: solver}
  - node_id: reward
    node_type: COMPUTE
    node_role: REWARD
    dependencies: [solve]
    executable_ref: %(reward)s:workflow_reward
"""
REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return float(len(set(solution_str)) % 7) / 7


def workflow_reward(episode):
    episode.outcome = compute_score("", episode.calls[-1].text, "")
    return {"solver": episode.outcome}
"""


def prepare(out: Path, rows: int) -> None:
    import pandas as pd

    out.mkdir(parents=True, exist_ok=True)
    problems = [f"{17 + i % 83} plus {11 + i % 89} is" for i in range(rows)]
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


def shared_overrides(out: Path, args: argparse.Namespace) -> list[str]:
    tokens = args.prompt + args.response
    return [
        f"data.train_files={out}/train.parquet",
        f"data.val_files={out}/train.parquet",
        f"data.train_batch_size={args.batch}",
        f"data.max_prompt_length={args.prompt}",
        f"data.max_response_length={args.response}",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        f"actor_rollout_ref.rollout.n={args.n}",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={max(32768, tokens)}",
        f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={max(32768, tokens)}",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={args.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[console]",
        *args.overrides,
    ]


def run(command: list[str], log: Path) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with log.open("w") as stream:
        code = subprocess.run(command, cwd=ROOT, env=env, stdout=stream, stderr=subprocess.STDOUT).returncode
    text = log.read_text(errors="replace")
    if code:
        sys.exit(f"error: {' '.join(command[:4])} ended with {code}; the end of {log}:\n{text[-3000:]}")
    return text


def stock(out: Path, args: argparse.Namespace) -> list[float]:
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo"),
        f"actor_rollout_ref.model.path={args.model}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.batch}",
        f"reward.custom_reward_function.path={out}/reward.py",
        "reward.custom_reward_function.name=compute_score",
        *("actor_rollout_ref.rollout.agent.num_workers=2", "reward.num_workers=2"),
        *shared_overrides(out, args),
    ]
    return [float(x) for x in re.findall(r"timing_s/step:(?:np\.float64\()?([0-9.]+)", run(command, out / "stock.log"))]


def ours(out: Path, args: argparse.Namespace) -> list[float]:
    workflow = out / "workflow_one_agent.yaml"
    workflow.write_text(WORKFLOW % {"model": args.model, "response": args.response, "reward": out / "reward.py"})
    command = [
        *(sys.executable, "-m", "recipe.dag.main", f"workflow={workflow}", f"output_dir={out}/ours"),
        *("trainer.resume_mode=disable", "rollout.progress=false"),
        *shared_overrides(out, args),
    ]
    run(command, out / "ours.log")
    return [json.loads(line)["timing/step"] for line in (out / "ours" / "metrics.jsonl").read_text().splitlines()]


def parser(description: str, out: str, steps: int) -> argparse.ArgumentParser:
    """The options of every comparison of step times."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=32, help="prompts a step")
    parser.add_argument("--n", type=int, default=4, help="episodes a prompt")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("overrides", nargs="*")
    return parser


def medians_of(times: dict[str, list[float]], out: Path) -> dict[str, float]:
    """Per arm, of its steps' seconds without the first ones; exits where there are no others."""
    for name, values in times.items():
        if len(values) <= WARM_UP:
            sys.exit(f"error: {name} reported {len(values)} steps, see {out}/{name}.log; raise --steps")
    return {name: statistics.median(values[WARM_UP:]) for name, values in times.items()}


def write_report(file: Path, args: argparse.Namespace, **found: object) -> None:
    """Writes and prints what was found, and with which arguments."""
    report = json.dumps(found | {"arguments": {key: str(value) for key, value in vars(args).items()}}, indent=1)
    file.write_text(report)
    print(report)


def main() -> None:
    args = parser(__doc__.splitlines()[0], "outputs/bench_step_time", steps=6).parse_args()
    out = args.out.absolute()
    prepare(out, args.batch * args.steps)
    times = {"stock": stock(out, args), "ours": ours(out, args)}
    medians = medians_of(times, out)
    ratio = medians["ours"] / medians["stock"]
    write_report(out / "step_time.json", args, ratio=ratio, median_s=medians, steps_s=times)


if __name__ == "__main__":
    main()
