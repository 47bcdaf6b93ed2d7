"""Tokens per second and memory of the trainer's engines on the same rows, for log-probs (with entropies) and updates.

    python examples/bench_training.py MODEL [--arms packed,adamw8bit+no_recompute@8192] [--rows 48] [--shortest 300] ...

Runs on a CUDA device, or on the CPU with a small model. Each arm runs in a separate process, with a run's policy worker
and nothing offloaded. `+` joins arms, and `@` gives an arm its own tokens of a micro-batch. The arms:

- packed: packed rows, no logits, and the kernels, gathered weights and recompute that a run chooses (the default)
- no_recompute, mlp_recompute, recompute: the same, but no layer recomputes activations, each those of its MLP, or all
- adamw8bit: the same with torchao's 8-bit Adam
- adapters: three adapters of rank 16 on the model, which is frozen; each has a third of the rows
- plain: the same with transformers' modules, weights gathered for each layer, and all layers recomputed
- logits: packed rows, log-probs computed from logits in chunks
- padded: verl's engine without flash-attn (padded rows, sdpa, logits)

The first pass of each kind compiles and is left out; results are means over the other passes (`--passes`) and count all
tokens, including prompts. Half of a row is a prompt. The share of the card's peak counts the FLOPs that are needed.
The memory is that allocated by torch; `estimate` is the prediction of `verl-dag plan`. Writes OUT/training.json and
prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from recipe.dag.workflow.schema import Workflow

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # if this project is not installed, `recipe` may be another package
MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
WHOLE = (f"{MODEL}.enable_gradient_checkpointing=true", f"{MODEL}.recompute_mlp_only=0")
ARMS = {
    "packed": (),
    "no_recompute": (f"{MODEL}.enable_gradient_checkpointing=false",),
    "mlp_recompute": (f"{MODEL}.enable_gradient_checkpointing=true", f"{MODEL}.recompute_mlp_only=1000"),
    "recompute": WHOLE,
    "adapters": (),
    "adamw8bit": (f"{ACTOR}.optim.optimizer=AdamW8bit", f"{ACTOR}.optim.optimizer_impl=torchao.optim"),
    "plain": (
        *WHOLE,
        f"{MODEL}.use_liger=false",
        f"{ACTOR}.fsdp_config.reshard_after_forward=true",
        f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation=false",
    ),
    "logits": (f"{MODEL}.use_fused_kernels=false",),
    "padded": (f"{MODEL}.use_remove_padding=false",),
}
"""Name -> overrides."""
WORKFLOW = """\
dag_id: bench
agents: [{name: solver, policy: main}]
policies: {main: {model: {path: "%s"}}}
algorithm: {old_log_probs: trainer}
nodes:
  - {id: solve, agent: solver}
  - {id: reward, reward: score.py:score, after: solve}
"""
ADAPTERS = """\
dag_id: bench_adapters
agents: [{name: one, policy: one}, {name: two, policy: two}, {name: three, policy: three}]
policies:
  base: {model: {path: "%s"}, frozen: true}
  one: {lora: {base: base, rank: 16}, lr: 1.0e-5}
  two: {lora: {base: base, rank: 16}, lr: 1.0e-5}
  three: {lora: {base: base, rank: 16}, lr: 1.0e-5}
algorithm: {old_log_probs: trainer}
nodes:
  - {id: first, agent: one}
  - {id: second, agent: two, after: first}
  - {id: third, agent: three, after: second}
  - {id: reward, reward: score.py:score, after: third}
"""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--arms", default="packed,plain,logits,padded@8192", help=f"from {', '.join(ARMS)}")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--shortest", type=int, default=300, help="tokens of the shortest row")
    parser.add_argument("--longest", type=int, default=2000, help="tokens of the longest row")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_training"))
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # set for the process of one arm
    args = parser.parse_args(argv)
    if unknown := [name for arm in args.arms.split(",") for name in split(arm)[0] if name not in ARMS]:
        parser.error(f"--arms: unknown arm {unknown[0]}; choose from {', '.join(ARMS)}")
    if args.passes < 2:
        parser.error("--passes: 2 or more, since the first one is left out")
    return args


def split(arm: str) -> tuple[list[str], int | None]:
    """Return the names that an arm joins, and its tokens of a micro-batch; None without."""
    names, _, tokens = arm.partition("@")
    return names.split("+"), int(tokens) if tokens else None


def make_policies(workflow: Workflow, configure: Callable[[str], DictConfig], platform: str) -> list[Any]:
    """Return the parts of PolicyRuntimes that the kernels use: of a policy, or of the adapters on its model."""
    from recipe.dag.policy.adapter import AdapterWorkers
    from recipe.dag.policy.adapter_config import host_config, trained_adapters
    from recipe.dag.policy.adapter_worker import AdapterWorker
    from recipe.dag.policy.worker import PolicyWorker
    from recipe.dag.workflow.adapter_shape import shape_of

    base, *adapters = workflow.policies
    configs = {name: configure(name) for name in workflow.policies}
    if not adapters:
        worker = PolicyWorker(configs[base].actor_rollout_ref, role="actor")
    else:
        specs = {name: workflow.policies[name] for name in adapters}
        shapes = {name: shape_of(spec.lora) for name, spec in specs.items() if spec.lora is not None}
        trained = [
            each for name in adapters for each in trained_adapters(name, specs[name], shapes[name], configs[name], None)
        ]
        config = host_config(configs, base, trained, shapes, platform=platform)
        worker = AdapterWorker(config.actor_rollout_ref, "actor", adapters=tuple(trained))
    worker.init_model()
    workers = SimpleNamespace(
        compute_log_prob=worker.compute_log_prob,
        update_actor=worker.update_actor,
        execute_func_rank_zero=lambda function, *arguments: function(*arguments),
        world_size=1,
    )
    pad = SimpleNamespace(pad_token_id=0)
    return [
        SimpleNamespace(
            config=configs[name],
            data_parallel_size=1,
            workers=AdapterWorkers(workers, name, configs[name].critic) if adapters else workers,
            tokenizer=pad,
        )
        for name in adapters or [base]
    ]


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Measure one arm in this process."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    import torch

    from recipe.dag.platform.environment import prepare_environment
    from recipe.dag.settings.compose import compose_config

    gpu = torch.cuda.is_available()
    platform = "cuda" if gpu else "cpu"
    prepare_environment(platform)
    import torch.distributed as dist

    from recipe.dag.loading.workflow_file import load_workflow
    from recipe.dag.policy.config import policy_config
    from recipe.dag.settings import defaults
    from recipe.dag.train import kernels, throughput
    from recipe.dag.types.row import Row, RowCall
    from recipe.dag.workflow.machine import this_machine
    from recipe.dag.workflow.model_size import size_of

    out = args.out.absolute()
    dist.init_process_group(
        "nccl" if gpu else "gloo", init_method=f"file://{out}/store_{args.arm}", rank=0, world_size=1
    )
    names, own_tokens = split(args.arm)
    tokens = own_tokens or args.tokens
    file = out / ("adapters.yaml" if "adapters" in names else "workflow.yaml")
    workflow = load_workflow(file)
    run = compose_config(
        "dag",
        [
            f"workflow={file}",
            "data.train_files=none",
            f"data.max_prompt_length={args.longest}",
            f"data.max_response_length={args.longest}",
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={max(tokens, args.longest)}",
            "trainer.n_gpus_per_node=1",
            "actor_rollout_ref.actor.fsdp_config.param_offload=false",
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=false",
            *(override for name in names for override in ARMS[name]),
        ],
    )
    decision = defaults.decide(run, workflow, this_machine()) if gpu else defaults.on_cpu(run)
    defaults.apply(run, decision)
    configure = partial(policy_config, run, workflow, model_path=args.model, updates=10, platform=platform)
    policies = make_policies(workflow, configure, platform)
    rng = random.Random(1)
    lengths = [rng.randint(args.shortest, args.longest) for _ in range(args.rows)]
    vocabulary = range(3, size_of(args.model).vocabulary)
    rows = []
    for index, length in enumerate(lengths):
        ids, prompt_length = rng.choices(vocabulary, k=length), length // 2
        place = {"agent": "solver", "role": "solver", "node": "solve", "branch": "", "parts": {}}
        call = RowCall(end=length - prompt_length, reward=1.0, turn=0, round=0, position=0, step=0, **place)
        rows.append(
            Row(
                uid=f"u{index}",
                episode=0,
                trunk=0,
                policy="main",
                weight_version=0,
                prompt_ids=ids[:prompt_length],
                response_ids=ids[prompt_length:],
                response_mask=[1] * (length - prompt_length),
                rollout_log_probs=[-9.0] * (length - prompt_length),
                calls=(call,),
            )
        )
    passes = []
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    for number in range(args.passes):
        for first, policy in enumerate(policies):
            batch = kernels.PolicyBatch(rows[first :: len(policies)])
            kernels.prepare(policy, batch, workflow.algorithm)
            kernels.old_log_probs(policy, batch)
            batch.columns["advantages"] = [torch.ones(len(row.response_ids)) for row in batch.rows]
            kernels.update_actor(policy, batch, workflow.algorithm, seed=0)
            passes += batch.passes if number else []
    flops = throughput.find_flops(policies[0])
    if flops is not None:
        flops = replace(flops, adapter=len(policies) > 1)
    metrics = throughput.throughput_metrics(passes, flops)
    if gpu:
        metrics["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    if decision.memory:
        updates = [phase for phase in decision.memory[0].phases if phase.name != "rollout"]
        metrics["estimate_gb"] = max(phase.used - phase.processes for phase in updates) / 1e9
    dist.destroy_process_group()
    return metrics | {"tokens": tokens}


def report(model: str, results: dict[str, dict[str, float]]) -> None:
    arm = Column("arm", no_wrap=True, min_width=max(map(len, results), default=0))
    table = Table(arm, "tokens", "log-probs, tok/s", "update, tok/s", "share of peak", "peak, GB", "estimate, GB")
    for name, result in results.items():
        peak = (f"{result[key]:.1f}" if key in result else "-" for key in ("peak_gb", "estimate_gb"))
        share = f"{result['mfu']:.2f}" if "mfu" in result else "-"
        speeds = (f"{result[f'{kind}_tokens_per_s']:,.0f}" for kind in ("log_prob", "update"))
        table.add_row(name, f"{result['tokens']:,}", *speeds, share, *peak)
    Console().print(table)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.arm:
        (args.out / f"{args.arm}.json").write_text(json.dumps(measure(args)))
        return
    (args.out / "workflow.yaml").write_text(WORKFLOW % args.model)
    (args.out / "adapters.yaml").write_text(ADAPTERS % args.model)
    (args.out / "score.py").write_text("def score(episode):\n    return {}\n")
    results = {}
    for arm in args.arms.split(","):
        (args.out / f"store_{arm}").unlink(missing_ok=True)
        command = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv), "--arm", arm]
        with (args.out / f"{arm}.log").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=log).returncode
        if code:
            print(f"{arm}: failed, see {args.out / arm}.log", flush=True)
            continue
        results[arm] = json.loads((args.out / f"{arm}.json").read_text())
    (args.out / "training.json").write_text(json.dumps({"model": args.model, "arms": results}, indent=1))
    report(args.model, results)
    if len(results) < len(args.arms.split(",")):
        sys.exit(1)


if __name__ == "__main__":
    main()
