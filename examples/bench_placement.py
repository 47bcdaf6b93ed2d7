"""Step time of two policies with critics and references, both on one GPU and on one GPU each.

    python examples/bench_placement.py --model MODEL [--out FOLDER] [--steps 5] [--placement one] [key=value ...]

Needs a host with two CUDA GPUs. Two agents, reasoner and actor, are chained as in MARFT; only the placement differs.
Trailing overrides (verl's keys) apply to both. The first `--warm_up` steps of each arm compile and are left out; the
result is the ratio of the medians of the other steps. Writes OUT/placement.json and prints it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench_step_time import medians_of, parser, prepare, run, write_report

REWARD = """\
def reward(episode):
    text = episode.calls[-1].text
    episode.outcome = float(len(set(text)) % 7) / 7
    return {"actor": episode.outcome, "reasoner": 0.0}
"""
WORKFLOW = """\
dag_id: two_policies
agents:
  - {name: reasoner, policy: reasoner, sampling: {temperature: 1.0, max_tokens: %(response)d}}
  - {name: actor, policy: actor, sampling: {temperature: 1.0, max_tokens: %(response)d}}
policies:
  reasoner: {model: {path: "%(model)s"}, critic: {}, reference: true%(gpus)s}
  actor: {model: {path: "%(model)s"}, critic: {}, reference: true%(gpus)s}
algorithm: {estimator: gae_chain, kl_loss_coef: 0.01}
nodes:
  - {id: reason, agent: reasoner}
  - {id: act, agent: actor, after: reason}
  - {id: score, reward: "%(reward)s:reward", after: act}
"""
PLACEMENTS = {"one": ("", 1), "two": (", gpus: 1", 2)}
"""Name -> (additional YAML of each policy, GPUs of the run)."""


def overrides(out: Path, args: argparse.Namespace, gpus: int) -> list[str]:
    return [
        f"data.train_files={out}/train.parquet",
        f"data.train_batch_size={args.batch}",
        f"data.max_prompt_length={args.prompt + args.response}",
        f"data.max_response_length={args.response}",
        f"actor_rollout_ref.rollout.n={args.n}",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
        f"trainer.n_gpus_per_node={gpus}",
        f"trainer.total_training_steps={args.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[console]",
        "trainer.resume_mode=disable",
        "rollout.progress=false",
        *args.overrides,
    ]


def measure(placement: str, out: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    """Return each step's timings, in seconds."""
    policy_yaml, gpus = PLACEMENTS[placement]
    workflow = out / f"workflow_{placement}.yaml"
    reward = out / "team_reward.py"
    reward.write_text(REWARD)
    workflow.write_text(
        WORKFLOW % {"model": args.model, "response": args.response, "gpus": policy_yaml, "reward": str(reward)}
    )
    command = [sys.executable, "-m", "recipe.dag.main", f"workflow={workflow}", f"output_dir={out}/{placement}"]
    run([*command, *overrides(out, args, gpus)], out / f"{placement}.log")
    lines = (out / placement / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k.startswith("timing/")} for line in lines]


def main() -> None:
    options = parser((__doc__ or "").partition("\n")[0], "outputs/bench_placement", steps=5)
    options.add_argument("--placement", action="append", choices=PLACEMENTS, help="only this one, without a ratio")
    args = options.parse_args()
    out = args.out.absolute()
    prepare(out, args.batch * args.steps)
    steps = {name: measure(name, out, args) for name in args.placement or PLACEMENTS}
    medians = medians_of(
        {name: [value["timing/step"] for value in values] for name, values in steps.items()}, out, args.warm_up
    )
    speedup = medians["one"] / medians["two"] if len(medians) == 2 else None
    write_report(out / "placement.json", args, speedup=speedup, median_s=medians, steps=steps)


if __name__ == "__main__":
    main()
