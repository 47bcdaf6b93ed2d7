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
from recipe.dag.credit.gae import chained_gae, scan
from recipe.dag.credit.whiten import whitened


@dataclass(frozen=True)
class Said:
    """A message of the joint history."""

    agent: str
    turn: int
    text: str


def joint_history(question: str, said: Sequence[Said], speaker: str, *, max_chars: int = 4000) -> str:
    """What a centralised critic reads before `speaker` moves: the question, who said what in which turn, and who is to
    move. A message longer than `max_chars` keeps its beginning and its end; none is left out. Roles are written out, so
    agents that say the same are told apart."""
    if max_chars < 2:
        raise ValueError(f"max_chars: {max_chars} is not at least 2")
    parts = [question]
    for message in said:
        text = message.text
        if len(text) > max_chars:
            text = f"{text[: max_chars // 2]}\n[...]\n{text[len(text) - max_chars // 2 :]}"
        parts.append(f"[turn {message.turn}] {message.agent}:\n{text}")
    return "\n\n".join([*parts, f"[next] {speaker}:"])


def ippo(
    batch: CreditBatch,
    *,
    stream: str = "call",
    level: str = "action",
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns): one float32 tensor per row, 0 where the mask is 0 (IPPO, arXiv 2011.09533).

    `stream="call"`: every call is an episode of its own. `stream="agent"`: an agent's calls of an episode follow each
    other, so what it earns later reaches its earlier calls. Raises ValueError for unknown options, for calls that do
    not know their position, and for a gamma or lam outside [0, 1]."""
    _check("stream", stream, ("call", "agent"))
    keys: Sequence[Hashable] = range(len(batch.uid))
    if stream == "agent":
        keys = list(zip(batch.uid, batch.episode, batch.agent, strict=True))
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
    _check("level", level, ("action", "token"))
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}: {value} is not between 0 and 1")
    number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    chain = [number[key] for key in keys]
    if len(number) < len(chain) and None in batch.position:
        call = batch.position.index(None)
        raise ValueError(
            f"row of uid {batch.uid[call]}, episode {batch.episode[call]}, agent {batch.agent[call]}: its calls do not "
            "say at which position they are (call_positions)"
        )
    order = sorted(range(len(chain)), key=lambda call: (chain[call], batch.position[call] or 0))
    if level == "token":
        advantages, returns = chained_gae(batch, batch.mask, batch.values, order, chain, gamma=gamma, lam=lam)
    else:
        advantages, returns = (batch.spread(part) for part in _per_call(batch, order, chain, gamma, lam))
    return batch.per_row(whitened(advantages, batch.mask) if whiten else advantages), batch.per_row(returns)


def _per_call(
    batch: CreditBatch, order: Sequence[int], chain: Sequence[int], gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [C]. A call that sampled nothing is no step; its reward goes to the one before it in the
    chain, or to the first one if there is none."""
    ends = batch.call_lengths.cumsum(0)
    so_far = torch.cat([torch.zeros(1, dtype=torch.int64), batch.mask.cumsum(0)])
    sampled = so_far[ends] > so_far[ends - batch.call_lengths]
    tokens = batch.mask.nonzero().squeeze(1)
    values = torch.zeros_like(batch.rewards)
    values[sampled] = batch.values[tokens[so_far[(ends - batch.call_lengths)[sampled]]]]
    speaks = sampled.tolist()
    steps = [call for call in order if speaks[call]]
    lengths = torch.zeros(max(chain, default=-1) + 1, dtype=torch.int64)
    lengths.index_add_(
        0, torch.tensor([chain[call] for call in steps], dtype=torch.int64), torch.ones_like(ends[steps])
    )
    first = (lengths.cumsum(0) - lengths).tolist()
    rewards, earned, place = batch.rewards.tolist(), [0.0] * len(steps), -1
    for call in order:
        place += speaks[call]
        if lengths[chain[call]]:
            earned[max(place, first[chain[call]])] += rewards[call]
    found = scan(torch.tensor(earned, dtype=torch.float64), values[steps], lengths, gamma=gamma, lam=lam)
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[steps] = found
    returns[steps] = found + values[steps]
    return advantages, returns


def _check(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}: {value!r} is none of {', '.join(known)}")
