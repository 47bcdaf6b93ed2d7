"""Seconds and peak memory of every estimator, and of what weighs advantages or shapes rewards, on one large batch.

    python examples/bench_credit.py [--rows 4096] [--tokens 2048] [--calls 2] [--rounds 3] [--ragged]

Each row holds `calls` merged calls, every agent has a row in every episode. `--ragged` draws lengths up to `tokens`.
`uncertainty` and `happo` are the weights' cost on top of an estimator's, `shaping` and `vote` the rewards' of all
episodes. Prints, for each, the median seconds of the rounds from rows to advantages, those of the CPU (a busy machine
makes the first ones longer), the memory that it needed beyond what was there before, per token, and the same at a
quarter of the rows: equal numbers mean that memory is linear in tokens. `mixer` has all that vdn and qmix do on the
driver beside it, but for the encoder, which is a language model: the credit of one step's episodes, and the fit to them
and to the replayed ones, both with the workflow's defaults, over random vectors of `--width` numbers.
Needs Linux, whose /proc tells the peak.
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

from recipe.dag.algorithms.catalogue import SELECTABLE, make_algorithm
from recipe.dag.credit.estimator import estimate
from recipe.dag.credit.happo import log_ratio, sampled_mask, weigh
from recipe.dag.credit.mixer_credit import peers_of
from recipe.dag.credit.mixer_data import Encoded, Layout, joined, returns_of
from recipe.dag.credit.mixer_fit import fit
from recipe.dag.credit.shaping import influence, margin, verifier_sum
from recipe.dag.credit.team_value import TeamValue, team_values
from recipe.dag.credit.team_value_credit import among_siblings, credit
from recipe.dag.credit.uncertainty import surprise, uncertainty_weights, weighted
from recipe.dag.credit.vote import marginals
from recipe.dag.episode.row import Row

AGENTS, GROUP = ("planner", "executor"), 8


def make_rows(count: int, tokens: int, calls: int, *, ragged: bool, seed: int = 0) -> list[Row]:
    """`count` rows of one policy: groups of 8 episodes, two agents each; every fourth token is masked."""
    rng = random.Random(seed)
    mask, log_probs = [1, 1, 1, 0] * (tokens // 4 + 1), [-1.0, -0.5, -2.0, 0.0] * (tokens // 4 + 1)
    rows = []
    for index in range(count):
        episode, agent = divmod(index, len(AGENTS))
        length = rng.randint(calls, tokens) if ragged else tokens
        rewards = tuple(rng.randint(0, 8) / 8 for _ in range(calls))
        rows.append(
            Row(
                uid=f"problem {episode // GROUP}",
                episode=episode % GROUP,
                agent=AGENTS[agent],
                node=AGENTS[agent],
                turn=0,
                policy="main",
                weight_version=0,
                prompt_ids=[1],
                response_ids=mask[:length],
                response_mask=mask[:length],
                rollout_log_probs=log_probs[:length],
                reward=sum(rewards),
                call_ends=tuple(length * (call + 1) // calls for call in range(calls)),
                call_rewards=rewards,
                call_turns=tuple(range(calls)),
                call_rounds=(0,) * calls,
                call_branches=("",) * calls,
                call_parts=tuple({"right": reward, "short": 1.0 - reward} for reward in rewards),
                call_positions=tuple(call * len(AGENTS) + agent for call in range(calls)),
            )
        )
    return rows


def peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def uncertainty(rows: list[Row]) -> Callable[[], object]:
    advantages = [torch.ones(len(row.response_mask)) for row in rows]
    groups = [(row.uid, row.agent) for row in rows]

    def work() -> object:
        surprises = [surprise(row.rollout_log_probs, row.response_mask) for row in rows]
        return weighted(advantages, uncertainty_weights(surprises, groups))

    return work


def happo(rows: list[Row]) -> Callable[[], object]:
    old = [torch.zeros(len(row.response_mask)) for row in rows]
    new, episodes = [one + 1e-3 for one in old], [(row.uid, row.episode) for row in rows]

    def work() -> object:
        masks = [sampled_mask(row.response_mask) for row in rows]
        return weigh(old, episodes, log_ratio(new, old, masks, episodes))

    return work


def shaping(rows: list[Row]) -> Callable[[], object]:
    table = torch.tensor([row.call_rewards for row in rows], dtype=torch.float64)
    rewards = table.reshape(-1, len(AGENTS), table.shape[1]).transpose(1, 2).contiguous()
    mask = torch.ones_like(rewards, dtype=torch.bool)
    return lambda: [shape(rewards, mask) for shape in (margin, influence, verifier_sum)]


def vote(rows: list[Row]) -> Callable[[], object]:
    return lambda: [marginals(row.call_rewards, {1.0: 1.0}) for row in rows]


def encoded(rows: list[Row], width: int, seed: int = 0) -> tuple[Layout, Encoded]:
    """The rows' episodes, every message another one: in each turn, the second agent answers the first."""
    turns = len(rows[0].call_ends)
    calls = [f"{agent}@{turn}" for turn in range(turns) for agent in AGENTS]
    graph = {call: calls[:place] for place, call in enumerate(calls)}
    layout = Layout((0, 1) * turns, tuple(place // 2 for place in range(len(calls))), peers_of(graph, calls))
    count = len(rows) // len(AGENTS)
    group = torch.arange(count) // GROUP
    vectors = torch.randn(
        count * len(calls) + int(group.max()) + 1, width, generator=torch.Generator().manual_seed(seed)
    )
    rewards = torch.tensor([row.call_rewards for row in rows], dtype=torch.float64)
    return layout, Encoded(
        vectors,
        count * len(calls) + group,
        torch.arange(count * len(calls)).reshape(count, len(calls)),
        rewards.reshape(count, len(AGENTS), turns).sum(1),
        torch.full((count,), turns),
        group,
    )


def mixing(name: str, rows: list[Row], width: int) -> dict[str, Callable[[], object]]:
    """By part: what vdn and qmix do once in a step."""
    spec, (layout, data) = make_algorithm(name).team_value, encoded(rows, width)
    model = TeamValue(layout, width, mixer=name, **spec.widths)
    model.standardise(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.lr, weight_decay=spec.weight_decay, fused=True)

    def divide() -> object:
        values, utilities = team_values(model, data)
        return credit(model, data, returns_of(data), utilities=utilities), among_siblings(values, data)

    def learn() -> object:
        replayed = joined([data] * (1 + spec.replay_steps))
        options = {"epochs": spec.epochs, "batch_size": spec.batch_size, "steps": spec.steps_per_epoch}
        return fit(model, optimizer, replayed, **options, seed=0)

    return {"credit": divide, "fit": learn}


OTHERS = {"uncertainty": uncertainty, "happo": happo, "shaping": shaping, "vote": vote}


def work_of(name: str, rows: list[Row]) -> Callable[[], object]:
    if name in OTHERS:
        return OTHERS[name](rows)
    algorithm = make_algorithm(name)
    values = [torch.zeros(len(row.response_mask)) for row in rows] if algorithm.needs_values else None
    return lambda: estimate(algorithm, rows, values=values)


def measure(work: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """(median seconds, median seconds of the CPU, bytes beyond what was there)."""
    seconds, busy, needed = [], [], []
    for _ in range(rounds):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is there now
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
    given = parser.parse_args()
    rows = make_rows(given.rows, given.tokens, given.calls, ragged=given.ragged)
    few = rows[: max(len(AGENTS), len(rows) // 4 // len(AGENTS) * len(AGENTS))]
    tokens, fewer = (sum(len(row.response_mask) for row in some) for some in (rows, few))
    print(f"{len(rows)} rows, {tokens} tokens, {torch.get_num_threads()} threads")
    print(f"{'estimator':24} {'seconds':>8} {'CPU s':>8} {'MiB':>8} {'bytes/token':>12} {'at a quarter':>13}")
    for name in (*SELECTABLE, *OTHERS):
        *_, some = measure(work_of(name, few), given.rounds)
        seconds, busy, all_ = measure(work_of(name, rows), given.rounds)
        print(f"{name:24} {seconds:8.2f} {busy:8.2f} {all_ / 2**20:8.0f} {all_ / tokens:12.1f} {some / fewer:13.1f}")
    print(f"{'mixer':24} {'seconds':>8} {'CPU s':>8} {'MiB':>8}")
    for name in ("vdn", "qmix"):
        for part, work in mixing(name, rows, given.width).items():
            seconds, busy, needed = measure(work, given.rounds)
            print(f"{name + ', ' + part:24} {seconds:8.2f} {busy:8.2f} {needed / 2**20:8.0f}")


if __name__ == "__main__":
    main()
