"""Seconds and peak memory of every estimator, and of everything that weighs advantages or shapes rewards, on a large
batch.

    python examples/bench_credit.py [--rows 4096] [--tokens 2048] [--calls 2] [--rounds 3] [--width 896] [--ragged]

Each row holds `calls` merged calls; every agent has a row in every episode. `--ragged` draws lengths up to `tokens`.
`uncertainty` and `happo` are measured on top of an estimator's advantages, `shaping` and `vote` on the rewards of all
episodes. For each, prints the median seconds per round from rows to advantages, the CPU seconds (on a busy machine the
wall-clock seconds are longer), the additional peak memory in total and per token, and the latter at a quarter of the
rows: equal numbers mean that memory is linear in tokens. `mixer` lists the work of vdn and qmix on the driver, except
for the encoder, which is a language model: the advantages of one step's episodes, and the fit to them and to the
replayed steps, with the workflow's defaults, over random vectors of `--width` numbers. Needs Linux, whose /proc reports
the peak memory.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from recipe.dag.algorithms.blocks import Uncertainty
from recipe.dag.algorithms.catalogue import SELECTABLE, make_algorithm
from recipe.dag.algorithms.estimate import estimate
from recipe.dag.algorithms.happo import Happo
from recipe.dag.credit.agent_share import weighted
from recipe.dag.credit.happo import log_ratio, sampled_mask, weigh
from recipe.dag.credit.joint_advantages import baseline_inputs, center_among_siblings, joint_advantages
from recipe.dag.credit.joint_value import JointValueNet, joint_values
from recipe.dag.credit.mixer_batch import CallLayout, MixerBatch, concatenate, team_returns
from recipe.dag.credit.mixer_fit import fit
from recipe.dag.credit.shaping import influence, margin, verifier_sum
from recipe.dag.credit.uncertainty import surprise, uncertainty_weights
from recipe.dag.credit.vote import marginals
from recipe.dag.types.row import Row, RowCall

AGENTS, GROUP = ("planner", "executor"), 8


def make_rows(count: int, tokens: int, calls: int, *, ragged: bool, seed: int = 0) -> list[Row]:
    """`count` rows of one policy: groups of 8 episodes, two agents each; every fourth token is masked."""
    rng = random.Random(seed)
    mask, log_probs = [1, 1, 1, 0] * (tokens // 4 + 1), [-1.0, -0.5, -2.0, 0.0] * (tokens // 4 + 1)
    rows = []
    for index in range(count):
        episode, agent = divmod(index, len(AGENTS))
        length = rng.randint(calls, tokens) if ragged else tokens
        rewards = [rng.randint(0, 8) / 8 for _ in range(calls)]
        rows.append(
            Row(
                uid=f"problem {episode // GROUP}",
                episode=episode % GROUP,
                trunk=episode % GROUP,
                policy="main",
                weight_version=0,
                prompt_ids=[1],
                response_ids=mask[:length],
                response_mask=mask[:length],
                rollout_log_probs=log_probs[:length],
                calls=tuple(
                    RowCall(
                        agent=AGENTS[agent],
                        role=AGENTS[agent],
                        node=AGENTS[agent],
                        end=length * (turn + 1) // calls,
                        reward=reward,
                        turn=turn,
                        round=0,
                        position=turn * len(AGENTS) + agent,
                        step=turn,
                        branch="",
                        parts={"right": reward, "short": 1.0 - reward},
                    )
                    for turn, reward in enumerate(rewards)
                ),
            )
        )
    return rows


def rewards_of(rows: list[Row]) -> list[list[float]]:
    return [[call.reward for call in row.calls] for row in rows]


def peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def uncertainty(rows: list[Row]) -> Callable[[], object]:
    advantages = [torch.ones(len(row.response_mask)) for row in rows]
    parts, options = [(row, agent) for row in rows for agent in row.agents], Uncertainty.model_validate({})
    groups = [(row.uid, agent) for row, agent in parts]

    def work() -> object:
        surprises = [surprise(row.rollout_log_probs, row.agent_mask(agent)) for row, agent in parts]
        weights = uncertainty_weights(surprises, groups, alpha=options.alpha, bound=options.bound)
        by_row = [{agent: weight} for (_, agent), weight in zip(parts, weights, strict=True)]  # one agent per row
        return weighted(rows, advantages, by_row)

    return work


def happo(rows: list[Row]) -> Callable[[], object]:
    old = [torch.zeros(len(row.response_mask)) for row in rows]
    new, episodes = [log_probs + 1e-3 for log_probs in old], [(row.uid, row.episode) for row in rows]
    options = Happo.model_validate({})

    def work() -> object:
        masks = [sampled_mask(row.response_mask) for row in rows]
        ratios = log_ratio(new, old, masks, episodes, level=options.ratio, bound=options.bound)
        return weigh(old, episodes, ratios)

    return work


def shaping(rows: list[Row]) -> Callable[[], object]:
    table = torch.tensor(rewards_of(rows), dtype=torch.float64)
    rewards = table.reshape(-1, len(AGENTS), table.shape[1]).transpose(1, 2).contiguous()
    mask = torch.ones_like(rewards, dtype=torch.bool)
    return lambda: [shape(rewards, mask) for shape in (margin, influence, verifier_sum)]


def vote(rows: list[Row]) -> Callable[[], object]:
    return lambda: [marginals(rewards, {1.0: 1.0}, "first") for rewards in rewards_of(rows)]


def encoded(rows: list[Row], width: int, seed: int = 0) -> tuple[CallLayout, MixerBatch]:
    """Return the rows' episodes with a different message per call: in each turn, the second agent answers the first."""
    turns = len(rows[0].calls)
    calls = [f"{agent}@{turn}" for turn in range(turns) for agent in AGENTS]
    graph = {call: calls[:index] for index, call in enumerate(calls)}
    layout = CallLayout((0, 1) * turns, tuple(index // 2 for index in range(len(calls))), baseline_inputs(graph, calls))
    count = len(rows) // len(AGENTS)
    group = torch.arange(count) // GROUP
    vectors = torch.randn(
        count * len(calls) + int(group.max()) + 1, width, generator=torch.Generator().manual_seed(seed)
    )
    rewards = torch.tensor(rewards_of(rows), dtype=torch.float64)
    return layout, MixerBatch(
        vectors,
        count * len(calls) + group,
        torch.arange(count * len(calls)).reshape(count, len(calls)),
        rewards.reshape(count, len(AGENTS), turns).sum(1),
        torch.full((count,), turns),
        group,
    )


def mixer_parts(name: str, rows: list[Row], width: int) -> dict[str, Callable[[], object]]:
    """Return the work of vdn or qmix in one step, by part."""
    spec, (layout, batch) = make_algorithm(name).team_value, encoded(rows, width)
    assert spec is not None, f"{name} has no mixer"
    model = JointValueNet(layout, width, mixer=name, binary=spec.loss == "binary", **spec.widths)
    model.fit_text_scale(batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.lr, weight_decay=spec.weight_decay, fused=True)

    def compute_advantages() -> object:
        values, utilities = joint_values(model, batch)
        returns = team_returns(batch, gamma_turn=spec.gamma_turn)
        advantages = joint_advantages(model, batch, returns, utilities, form=spec.form)
        return advantages, center_among_siblings(values, batch)

    def fit_value() -> object:
        replayed = concatenate([batch] * (1 + spec.replay_steps))
        return fit(
            model,
            optimizer,
            replayed,
            epochs=spec.epochs,
            batch_size=spec.batch_size,
            steps=spec.steps_per_epoch,
            seed=0,
            gamma_turn=spec.gamma_turn,
            lam=spec.lam,
            tau=spec.target_tau,
        )

    return {"credit": compute_advantages, "fit": fit_value}


WEIGHTS_AND_SHAPES = {"uncertainty": uncertainty, "happo": happo, "shaping": shaping, "vote": vote}


def work_of(name: str, rows: list[Row]) -> Callable[[], object]:
    if name in WEIGHTS_AND_SHAPES:
        return WEIGHTS_AND_SHAPES[name](rows)
    algorithm = make_algorithm(name)
    values = [torch.zeros(len(row.response_mask)) for row in rows] if algorithm.needs_values else None
    return lambda: estimate(algorithm, rows, values=values)


def measure(work: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Return (median seconds, median CPU seconds, the largest additional peak memory in bytes)."""
    seconds, busy, needed = [], [], []
    for _ in range(rounds):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the memory in use now
        before = peak_bytes()
        started, worked = time.perf_counter(), time.process_time()
        result = work()
        seconds.append(time.perf_counter() - started)
        busy.append(time.process_time() - worked)
        needed.append(peak_bytes() - before)
        del result
    return statistics.median(seconds), statistics.median(busy), max(needed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--calls", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--ragged", action="store_true")
    options = parser.parse_args()
    rows = make_rows(options.rows, options.tokens, options.calls, ragged=options.ragged)
    few = rows[: max(len(AGENTS), len(rows) // 4 // len(AGENTS) * len(AGENTS))]
    tokens, few_tokens = (sum(len(row.response_mask) for row in part) for part in (rows, few))
    print(f"{len(rows)} rows, {tokens} tokens, {torch.get_num_threads()} threads")
    print(f"{'estimator':24} {'seconds':>8} {'CPU s':>8} {'MiB':>8} {'bytes/token':>12} {'at a quarter':>13}")
    for name in (*SELECTABLE, *WEIGHTS_AND_SHAPES):
        *_, few_bytes = measure(work_of(name, few), options.rounds)
        seconds, busy, needed = measure(work_of(name, rows), options.rounds)
        numbers = f"{seconds:8.2f} {busy:8.2f} {needed / 2**20:8.0f} {needed / tokens:12.1f}"
        print(f"{name:24} {numbers} {few_bytes / few_tokens:13.1f}")
    print(f"{'mixer':24} {'seconds':>8} {'CPU s':>8} {'MiB':>8}")
    for name in ("vdn", "qmix"):
        for part, work in mixer_parts(name, rows, options.width).items():
            seconds, busy, needed = measure(work, options.rounds)
            print(f"{name + ', ' + part:24} {seconds:8.2f} {busy:8.2f} {needed / 2**20:8.0f}")


if __name__ == "__main__":
    main()
