"""Seconds in which one SGLang server answers a step's requests, with whole weights and with an adapter per agent.

    python examples/bench_adapter_serving.py MODEL [--arms whole,csgmv,csgmv+delay] [--episodes 256] [key=value ...]

Needs a CUDA host with SGLang. An episode is three calls one after the other, with the lengths of ReTool-MA's planner,
executor and verifier in a run of Qwen2.5-3B; all episodes start together. Texts are random tokens. The arms:

- whole: no adapters
- one: one adapter for all calls
- dense: an adapter per agent, with this project's products
- csgmv, csgmv64, csgmv128, triton: the same with SGLang's back end of this name (and size of its chunks)

An arm can have changes, joined to it with `+`:

- eager: no CUDA graphs for prompts, which SGLang lacks by default with adapters
- graphs: SGLang's breakable CUDA graphs for prompts, which can have adapters, as on a run's servers
- delay: prompts wait for others, as on a run's servers
- mixed: prompts share their batch with the requests that decode

Trailing arguments are options of the server. Each arm runs in a separate process; the first of its `--passes` compiles
and is left out. Writes OUT/adapter_serving.json and prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # if this project is not installed, `recipe` may be another package

from recipe.dag.policy.sglang_scheduler import DELAY  # noqa: E402

PROMPTS = (160, 830, 1150)
"""Mean tokens of the prompts of planner, executor and verifier."""
ANSWER, LONGEST = 200, 1024
"""Mean and maximum of an answer's tokens, which are geometrically distributed."""
RANK = 16
ARMS: dict[str, tuple[tuple[str | None, ...], dict[str, Any]]] = {
    "whole": ((None,), {}),
    "one": (("a0",), {"lora_backend": "triton"}),
    "dense": (("a0", "a1", "a2"), {"lora_backend": "dense"}),
    "csgmv": (("a0", "a1", "a2"), {"lora_backend": "csgmv"}),
    "csgmv64": (("a0", "a1", "a2"), {"lora_backend": "csgmv", "max_lora_chunk_size": 64}),
    "csgmv128": (("a0", "a1", "a2"), {"lora_backend": "csgmv", "max_lora_chunk_size": 128}),
    "triton": (("a0", "a1", "a2"), {"lora_backend": "triton"}),
}
"""Name -> (adapters of the three calls in turn, the server's options)."""
CHANGES: dict[str, dict[str, Any]] = {
    "eager": {"disable_piecewise_cuda_graph": True},
    "graphs": {"enable_breakable_cuda_graph": True},
    "delay": DELAY,
    "mixed": {"enable_mixed_chunk": True},
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--arms", default="whole+delay,dense+graphs+delay,csgmv+delay", help=f"from {', '.join(ARMS)}")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_adapter_serving"))
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # set for the process of one arm
    parser.add_argument("options", nargs="*")
    args = parser.parse_intermixed_args(argv)
    for arm in args.arms.split(","):
        name, *changes = arm.split("+")
        if name not in ARMS or not CHANGES.keys() >= set(changes):
            changes_known = ", ".join(f"+{change}" for change in CHANGES)
            parser.error(f"--arms: unknown arm {arm}; choose from {', '.join(ARMS)}, with any of {changes_known}")
    if args.passes < 2:
        parser.error("--passes: 2 or more, since the first one is left out")
    return args


def write_adapters(model: str, names: list[str], out: Path) -> None:
    """Write adapters with random weights as PEFT folders."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from recipe.dag.platform.adapter_weights import target_layers, write_adapter
    from recipe.dag.workflow.adapter_shape import ALL_LINEAR, AdapterShape

    with torch.device("meta"):
        layers = target_layers(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)), (ALL_LINEAR,))
    draw = torch.Generator().manual_seed(0)
    for name in names:
        pairs = {}
        for path, layer in layers.items():
            a = torch.randn(RANK, layer.in_features, generator=draw) * layer.in_features**-0.5
            b = torch.randn(layer.out_features, RANK, generator=draw) * 0.02
            pairs[path] = (a.bfloat16(), b.bfloat16())
        write_adapter(out / name, AdapterShape(RANK, 2.0 * RANK, (ALL_LINEAR,)), pairs, model)


async def play(engine: Any, adapters: tuple[str | None, ...], episodes: int, vocabulary: int, seed: int) -> int:
    """Return the number of tokens that were sampled in episodes that start together. No prompt is repeated."""
    rng = random.Random(seed)

    async def episode(calls: list[tuple[list[int], int]]) -> int:
        for number, (prompt, length) in enumerate(calls):
            sampling = {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True}
            adapter = adapters[number % len(adapters)]
            await engine.async_generate(input_ids=prompt, sampling_params=sampling, lora_path=adapter)
        return sum(length for _, length in calls)

    def call(mean: int) -> tuple[list[int], int]:
        prompt = rng.choices(range(10, vocabulary), k=rng.randint(mean // 2, mean * 3 // 2))
        return prompt, max(1, min(LONGEST, round(rng.expovariate(1 / ANSWER))))

    plans = [[call(mean) for mean in PROMPTS] for _ in range(episodes)]
    return sum(await asyncio.gather(*map(episode, plans)))


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Measure one arm in this process."""
    from sglang.srt.entrypoints.engine import Engine  # pyright: ignore[reportMissingImports]  # on a CUDA host only
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]

    from recipe.dag.policy.adapter_config import TARGETS
    from recipe.dag.policy.sglang_adapters import allow_graphs
    from recipe.dag.policy.sglang_scheduler import run_scheduler_process
    from recipe.dag.workflow.adapter_shape import columns_of
    from recipe.dag.workflow.model_size import size_of

    name, *changes = args.arm.split("+")
    adapters, options = ARMS[name]
    for change in changes:
        options = options | CHANGES[change]
    names = sorted({name for name in adapters if name is not None})
    written = YAML(typ="safe").load("\n".join(option.replace("=", ": ", 1) for option in args.options)) or {}
    if names:
        write_adapters(args.model, names, args.out)
        # as a run's servers, which have a place for the base
        options = options | {"enable_lora": True, "max_lora_rank": RANK, "max_loras_per_batch": len(names) + 1}
        options |= {"lora_target_modules": list(TARGETS)}
    scheduler = partial(run_scheduler_process, adapter_columns=columns_of(RANK) * len(names))
    Engine.run_scheduler_process_func = staticmethod(scheduler)
    allow_graphs(ServerArgs)
    started = time.monotonic()
    engine = Engine(
        model_path=args.model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        mem_fraction_static=0.6,
        log_level="error",
        **options,
        **written,
    )
    for name in names:
        engine.load_lora_adapter(name, str(args.out / name))
    result = {"start_s": time.monotonic() - started}
    seconds, tokens = [], []
    for number in range(args.passes):
        started = time.monotonic()
        game = play(engine, adapters, args.episodes, size_of(args.model).vocabulary, seed=number)
        tokens.append(engine.loop.run_until_complete(game))
        seconds.append(time.monotonic() - started)
    engine.shutdown()
    return result | {"seconds": sum(seconds[1:]), "tokens_per_s": sum(tokens[1:]) / sum(seconds[1:])}


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.arm:
        (args.out / f"{args.arm}.json").write_text(json.dumps(measure(args)))
        return
    results, arms = {}, args.arms.split(",")
    for arm in arms:
        command = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv), "--arm", arm]
        with (args.out / f"{arm}.log").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=log).returncode
        if code:
            print(f"{arm}: failed, see {args.out / arm}.log", flush=True)
            continue
        results[arm] = json.loads((args.out / f"{arm}.json").read_text())
        print(f"{arm}: {results[arm]['tokens_per_s']:,.0f} tokens/s", flush=True)
    (args.out / "adapter_serving.json").write_text(json.dumps({"model": args.model, "arms": results}, indent=1))
    table = Table("arm", "sampled tokens/s", f"of {arms[0]}'s", "start, s")
    first = results.get(arms[0], {}).get("tokens_per_s")
    for arm, result in results.items():
        ratio = f"{result['tokens_per_s'] / first:.2f}" if first else "-"
        table.add_row(arm, f"{result['tokens_per_s']:,.0f}", ratio, f"{result['start_s']:.0f}")
    Console().print(table)
    if len(results) < len(arms):
        sys.exit(1)


if __name__ == "__main__":
    main()
