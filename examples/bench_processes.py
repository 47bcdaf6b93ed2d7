"""Wall time of many ReTool-MA episodes by the number of processes that play them (`rollout.processes`).

    python examples/bench_processes.py [--episodes 4096] [--wait 0.05] [--processes 1 2 4] [--rounds 3]

Texts, stub server and stub tool are those of bench_executor.py: every generation and every program takes `--wait`
seconds. 1 is the run's own process; more are Ray actors, whose start is not measured. Prints the median of the rounds
for each number of processes, and whether the records are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
os.environ.setdefault("MODEL_PATH", "none")
CLOCKS = {"seconds", "generation_seconds", "start_seconds"}
"""Fields of a record that differ between runs of the same episode."""


def make_stub_tools(workflow: Any, client: Any, wait: float) -> dict[str, Any]:
    from bench_executor import StubTool

    return {StubTool.name: StubTool(wait)}


def digest(episodes: list[Any]) -> str:
    """Return a hash of the records without times."""
    records = [without_clocks(episode.to_json()) for episode in episodes]
    return hashlib.sha256(json.dumps(records, default=str).encode()).hexdigest()


def without_clocks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_clocks(item) for key, item in value.items() if key not in CLOCKS}
    return [without_clocks(item) for item in value] if isinstance(value, list) else value


async def play(counts: list[int], episodes: int, wait: float, rounds: int, folder: str) -> None:
    from bench_executor import WORDS_LONG, StubServer, long_answers, problem, train_tokenizer

    from recipe.dag.episode.runner import EpisodeRunner
    from recipe.dag.loading.workflow_file import load_workflow
    from recipe.dag.policy.policy import PolicySpec
    from recipe.dag.train.rollout_processes import RolloutProcesses, SpreadRunner
    from recipe.dag.train.rollout_worker import WorkerSpec

    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(folder)
    flow = load_workflow(ROOT / "workflows/workflow_retool_ma.yaml")
    spec = PolicySpec(StubServer(tokenizer, long_answers(), wait), folder, False, 8192, 8192)
    endpoints = {"main": spec.endpoint()}
    make_tools = partial(make_stub_tools, wait=wait)
    runner = EpisodeRunner(flow, endpoints, make_tools(flow, None), seed=0)
    group, common = 8, {"ground_truth": "42", "data_source": "bench"}
    samples = [
        ({"prompt": [{"role": "user", "content": problem(number, WORDS_LONG)}], **common}, f"u{number}")
        for number in range(max(1, episodes // group))
    ]
    digests = set()
    started = time.perf_counter()
    workers = WorkerSpec({"main": spec}, make_tools, seed=0)
    processes = await RolloutProcesses.start(max(counts), workers, endpoints)
    print(f"started in {time.perf_counter() - started:.1f} s", flush=True)
    try:
        for count in counts:
            spread, times = SpreadRunner(runner, flow, processes, count), []
            await spread.run_batch(samples[:count], 1, step=0)  # warm up: imports and templates
            finished: list[Any] = []
            for _ in range(rounds):
                finished.clear()  # before the next round: its memory and garbage collection would be measured
                started = time.perf_counter()
                finished = await spread.run_batch(samples, group, step=0, max_in_flight=len(samples) * group)
                times.append(time.perf_counter() - started)
            digests.add(digest(finished))
            print(f"{count} processes: {statistics.median(times):.1f} s for {len(finished)} episodes", flush=True)
            del finished
    finally:
        await processes.close()
    print("the records are the same" if len(digests) == 1 else "the records differ")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=4096)
    parser.add_argument("--wait", type=float, default=0.05)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    from recipe.dag.platform.environment import prepare_environment

    prepare_environment("cpu")
    import ray

    logging.disable(logging.WARNING)
    path = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
    ray.init(
        address="local", include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}}
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(play(args.processes, args.episodes, args.wait, args.rounds, folder))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
