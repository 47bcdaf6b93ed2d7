"""Advantages from values of critics: one per policy (IPPO), or one per model that reads the joint history (MAPPO).

Invariant: the two differ in what the critic reads and in which calls form a sequence; the arithmetic is GAE. On the
action level a call is one step, with the critic's value at its first sampled token; on the token level every sampled
token is one. With gamma = lam = 1 both give a call's first token the same advantage.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.chain import sort_by_sequence
from recipe.dag.credit.gae import scan, sequence_gae, tokens_of
from recipe.dag.credit.options import check_choice, check_units
from recipe.dag.credit.whiten import standardize_per_policy


@dataclass(frozen=True)
class Utterance:
    """A message in the joint history."""

    agent: str
    turn: int
    text: str
    shown: str = ""
    """The observation that an env had shown the agent before."""


def history_parts(question: str, history: Sequence[Utterance], speaker: Utterance, *, max_chars: int) -> list[str]:
    """Return what a centralized critic reads before `speaker` moves, in pieces: the question, each observation and
    message with its agent and turn, the speaker's observation, and who speaks next (whose text is not read).

    A text longer than `max_chars` keeps its beginning and its end. An observation that several agents see in one turn
    is written once. Agents are named, so that two who say the same differ. The history of a later call begins
    with all pieces of an earlier one's except the last, so that a caller can encode each piece once.
    """
    if max_chars < 2:
        raise ValueError(f"max_chars: {max_chars} is not at least 2")
    parts, seen = [question], set[tuple[int, str]]()

    def add_observation(utterance: Utterance) -> None:
        if utterance.shown and (utterance.turn, utterance.shown) not in seen:
            seen.add((utterance.turn, utterance.shown))
            text = _shortened(utterance.shown, max_chars)
            parts.append(f"\n\n[turn {utterance.turn}] shown to {utterance.agent}:\n{text}")

    for utterance in history:
        add_observation(utterance)
        parts.append(f"\n\n[turn {utterance.turn}] {utterance.agent}:\n{_shortened(utterance.text, max_chars)}")
    add_observation(speaker)
    return [*parts, f"\n\n[next] {speaker.agent}:"]


def _shortened(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    return f"{text[: max_chars // 2]}\n[...]\n{text[len(text) - max_chars // 2 :]}"


def ippo(
    batch: CreditBatch, *, stream: str, level: str, gamma: float, lam: float, whiten: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, returns): one float32 tensor per row, 0 where the mask is 0 (IPPO, arXiv 2011.09533).

    `stream="agent"`: an agent's calls of an episode are one sequence, so what it earns later reaches its earlier calls.
    `stream="call"`: every call is a sequence by itself, with its own reward. Raises ValueError for unknown options and
    for a gamma or lam outside [0, 1].
    """
    check_choice("stream", stream, ("call", "agent"))
    keys: Sequence[Hashable] = range(len(batch.uid))
    if stream == "agent":
        keys = list(batch.trajectories())
    return _advantages(batch, keys, level, gamma, lam, whiten)


def mappo(
    batch: CreditBatch, *, level: str, gamma: float, lam: float, whiten: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, returns) as `ippo` does, with all calls of an episode in one sequence (MAPPO, arXiv
    2103.01955): the team's rewards reach every earlier call of every agent. The values must come from critics that
    read the joint history. Rewards copied to several agents would count several times."""
    return _advantages(batch, list(zip(batch.uid, batch.episode, strict=True)), level, gamma, lam, whiten)


def _advantages(
    batch: CreditBatch, keys: Sequence[Hashable], level: str, gamma: float, lam: float, whiten: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """`keys` [C]: see `sort_by_sequence`."""
    check_choice("level", level, ("action", "token"))
    check_units(gamma=gamma, lam=lam)
    call_order, sequence_ids = sort_by_sequence(batch, keys)
    if level == "token":
        return sequence_gae(batch, call_order, sequence_ids, gamma=gamma, lam=lam).per_row(batch, whiten=whiten)
    calls_S, counts_S, advantages_S, returns_S = _action_gae(batch, call_order, sequence_ids, gamma, lam)
    if whiten:
        advantages_S = standardize_per_policy(advantages_S, batch.policy_ids(calls_S), counts_S)
    return _per_row(batch, calls_S, advantages_S), _per_row(batch, calls_S, returns_S)


def _action_gae(
    batch: CreditBatch, call_order: Sequence[int], sequence_ids: Sequence[int], gamma: float, lam: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (the S calls that are steps, in order; the number of tokens that each sampled; their advantages; their
    returns). A call that sampled nothing or has no values is not a step; its reward goes to the step before it in the
    sequence, or to the first step if there is none before. A step with a part of its reward unknown has a delta of
    0."""
    all_calls_C = torch.arange(len(batch.row_of_call))
    tokens_L, counts_C = tokens_of(batch.call_lengths, all_calls_C, batch.learns())
    is_step = (counts_C > 0).tolist()
    calls_S = torch.tensor([call for call in call_order if is_step[call]], dtype=torch.int64)
    first_token_C = counts_C.cumsum(0) - counts_C
    # the value at an action's first token is V(s): the critic had read all that precedes the action, and none of it
    values_S = batch.values[tokens_L[first_token_C[calls_S]]].double()

    lengths_K = torch.zeros(max(sequence_ids, default=-1) + 1, dtype=torch.int64)
    lengths_K.index_add_(0, torch.tensor(sequence_ids, dtype=torch.int64)[calls_S], torch.ones_like(calls_S))
    first_step = (lengths_K.cumsum(0) - lengths_K).tolist()
    has_steps = (lengths_K > 0).tolist()
    rewards, step_rewards, last_step = batch.rewards.tolist(), [0.0] * len(calls_S), -1
    unknown = set[int]()
    for call in call_order:
        last_step += is_step[call]  # a call that is no step pays the step before it
        sequence = sequence_ids[call]
        if has_steps[sequence]:
            step = max(last_step, first_step[sequence])
            step_rewards[step] += rewards[call]
            unknown |= {step} if batch.unscored[call] else set()
    rewards_S = torch.tensor(step_rewards, dtype=torch.float64)
    unknown_steps = torch.tensor(sorted(unknown), dtype=torch.int64)
    advantages_S = scan(rewards_S, values_S, lengths_K, unknown_steps, gamma=gamma, lam=lam)
    return calls_S, counts_C[calls_S], advantages_S, advantages_S + values_S


def _per_row(batch: CreditBatch, calls_S: Tensor, values_S: Tensor) -> list[Tensor]:
    """Return one tensor per row: the call's value on each of its sampled tokens, 0 for calls that are not steps."""
    values_C = torch.zeros(len(batch.row_of_call), dtype=torch.float32)
    values_C[calls_S] = values_S.float()
    return batch.broadcast_to_rows(values_C)
