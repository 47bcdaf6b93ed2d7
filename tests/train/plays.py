"""Episodes of random words, for the tests of what vdn and qmix learn from."""

from __future__ import annotations

import random

import torch

from recipe.dag.episode.record import Call, Episode
from recipe.dag.train.mixing import Mixing

WORDS = [f"word {i}" for i in range(12)]
QUESTIONS = [f"question {i}" for i in range(6)]
ASKED = 8
SIBLINGS = 8


def encode(texts) -> torch.Tensor:
    """Each text a random point of its own."""
    generators = (torch.Generator().manual_seed(sum(ord(c) * 31**k for k, c in enumerate(t)) % 2**31) for t in texts)
    return torch.stack([torch.randn(16, generator=generator) for generator in generators])


def worth(text: str) -> float:
    return float(WORDS.index(text) % 3)


def call_of(node: int, text: str, reward: float | None = 0.0, *, turn=0, policy="main") -> Call:
    tokens = {"prompt_ids": [3], "response_ids": [5, 6], "response_mask": [1, 1], "rollout_log_probs": [-1.0, -2.0]}
    return Call(f"n{node}", f"a{node}", node, policy, turn, text=text, reward=reward, **tokens)


def episode_of(uid: str, index: int, question: str, calls: list[Call]) -> Episode:
    return Episode(uid, index, {"prompt": [{"role": "user", "content": question}]}, calls=calls)


def play(step: int, agents: int, reward, *, turns=1, seed=0) -> list[Episode]:
    """A step's episodes of random words; the last agent gets the team's reward of each turn."""
    draw, episodes = random.Random(1000 * seed + step), []
    for group in range(ASKED):
        question = draw.choice(QUESTIONS)
        for index in range(SIBLINGS):
            calls = []
            for turn in range(turns):
                said = [call_of(node, draw.choice(WORDS), turn=turn) for node in range(agents)]
                said[-1].reward = reward([call.text for call in said], draw)
                calls += said
            episodes.append(episode_of(f"{step}-{group}", index, question, calls))
    return episodes


def sum_of(said, draw) -> float:
    return sum(map(worth, said)) + draw.gauss(0.0, 0.3)


def noise(said, draw) -> float:
    return draw.gauss(0.0, 1.0)


def learned(workflow, *, steps=8, agents=3, turns=1) -> Mixing:
    mixing = Mixing(workflow, encode, seed=0)
    for step in range(steps):
        mixing.learn(play(step, agents, sum_of, turns=turns), seed=step)
    return mixing


def again(mixing: Mixing, workflow, folder) -> Mixing:
    """Another one in the same state."""
    folder.mkdir(exist_ok=True)
    mixing.save(folder)
    copy = Mixing(workflow, encode, seed=99)
    copy.load(folder)
    return copy
