"""Credit from a critic's values: per agent (IPPO) or from one critic that knows what everybody said (MAPPO).

Invariant: the two differ in what the critic reads and in which calls make a chain; the arithmetic is GAE. On the action
level a call is one step, worth the critic's value at its first sampled token; on the token level every sampled token is
one. With gamma = lam = 1 both give a call's first token the same advantage.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.chain import in_order
from recipe.dag.credit.gae import chained_gae, scan, tokens_of
from recipe.dag.credit.options import check_choice, check_units
from recipe.dag.credit.whiten import standardised_by


@dataclass(frozen=True)
class Said:
    """A move of the joint history."""

    agent: str
    turn: int
    text: str
    shown: str = ""
    """What an env had shown the agent before."""


def joint_history(question: str, said: Sequence[Said], speaker: Said, *, max_chars: int = 4000) -> str:
    """What a centralised critic reads before `speaker` moves: the question, who was shown and said what in which turn,
    what the speaker is shown, and who it is. Its text is not read. A piece longer than `max_chars` keeps its beginning
    and its end; none is left out, but for an observation that several see in one turn, which stands there once. Roles
    are written out, so agents that say the same are told apart."""
    return "".join(history_parts(question, said, speaker, max_chars=max_chars))


def history_parts(question: str, said: Sequence[Said], speaker: Said, *, max_chars: int = 4000) -> list[str]:
    """The joint history in pieces: the question, one for each observation and message, and who is to move. A later
    call's history begins with the pieces of an earlier one's, but for the last."""
    if max_chars < 2:
        raise ValueError(f"max_chars: {max_chars} is not at least 2")
    parts, seen = [question], set[tuple[int, str]]()

    def show(by: Said) -> None:
        if by.shown and (by.turn, by.shown) not in seen:
            seen.add((by.turn, by.shown))
            parts.append(f"\n\n[turn {by.turn}] shown to {by.agent}:\n{_shortened(by.shown, max_chars)}")

    for message in said:
        show(message)
        parts.append(f"\n\n[turn {message.turn}] {message.agent}:\n{_shortened(message.text, max_chars)}")
    show(speaker)
    return [*parts, f"\n\n[next] {speaker.agent}:"]


def _shortened(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    return f"{text[: max_chars // 2]}\n[...]\n{text[len(text) - max_chars // 2 :]}"


def ippo(
    batch: CreditBatch,
    *,
    stream: str = "agent",
    level: str = "action",
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns): one float32 tensor per row, 0 where the mask is 0 (IPPO, arXiv 2011.09533).

    `stream="agent"`: an agent's calls of an episode follow each other, so what it earns later reaches its earlier
    calls. `stream="call"`: every call is an episode of its own, worth its own reward. Raises ValueError for unknown
    options, for calls that do not know their position, and for a gamma or lam outside [0, 1]."""
    check_choice("stream", stream, ("call", "agent"))
    keys: Sequence[Hashable] = range(len(batch.uid))
    if stream == "agent":
        keys = list(batch.trajectories())
    return _credit(batch, keys, level, gamma, lam, whiten)


def mappo(
    batch: CreditBatch, *, level: str = "action", gamma: float = 1.0, lam: float = 0.95, whiten: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """As `ippo`, but all calls of an episode are one chain (MAPPO, arXiv 2103.01955): the team's rewards reach every
    earlier call of every agent. The values must be of one critic that reads `joint_history`. Rewards copied to several
    agents would count several times."""
    return _credit(batch, list(zip(batch.uid, batch.episode, strict=True)), level, gamma, lam, whiten)


def _credit(
    batch: CreditBatch, keys: Sequence[Hashable], level: str, gamma: float, lam: float, whiten: bool
) -> tuple[list[Tensor], list[Tensor]]:
    check_choice("level", level, ("action", "token"))
    check_units(gamma=gamma, lam=lam)
    order, chain = in_order(batch, keys)
    if level == "token":
        return chained_gae(batch, order, chain, gamma=gamma, lam=lam).per_row(batch, whiten=whiten)
    steps, counts, advantages, returns = _per_call(batch, order, chain, gamma, lam)
    if whiten:
        advantages = standardised_by(advantages, batch.policy_of(steps), counts)
    return _spread(batch, steps, advantages), _spread(batch, steps, returns)


def _per_call(
    batch: CreditBatch, order: Sequence[int], chain: Sequence[int], gamma: float, lam: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(the S calls that are steps, in order; how many tokens each sampled; their advantages; their returns). A call
    that sampled nothing or that no critic valued is no step; its reward goes to the one before it in the chain, or to
    the first one if there is none."""
    everyone = torch.arange(len(batch.row_of_call))
    tokens, counts = tokens_of(batch.call_lengths, everyone, batch.learns())
    speaks = (counts > 0).tolist()
    steps = torch.tensor([call for call in order if speaks[call]], dtype=torch.int64)
    values = batch.values[tokens[(counts.cumsum(0) - counts)[steps]]].double()
    lengths = torch.zeros(max(chain, default=-1) + 1, dtype=torch.int64)
    lengths.index_add_(0, torch.tensor(chain, dtype=torch.int64)[steps], torch.ones_like(steps))
    first = (lengths.cumsum(0) - lengths).tolist()
    present = (lengths > 0).tolist()
    rewards, earned, place = batch.rewards.tolist(), [0.0] * len(steps), -1
    for call in order:
        place += speaks[call]
        if present[chain[call]]:
            earned[max(place, first[chain[call]])] += rewards[call]
    found = scan(torch.tensor(earned, dtype=torch.float64), values, lengths, gamma=gamma, lam=lam)
    return steps, counts[steps], found, found + values


def _spread(batch: CreditBatch, steps: Tensor, values: Tensor) -> list[Tensor]:
    """[S] values of calls -> per row, on every sampled token of the call; 0 for calls that are no steps."""
    calls = torch.zeros(len(batch.row_of_call), dtype=torch.float32)
    calls[steps] = values.float()
    return batch.per_row(batch.spread(calls))
