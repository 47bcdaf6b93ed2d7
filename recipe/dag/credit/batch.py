"""Rows as columns over calls.

Invariant: the call is the unit. The calls of a row tile its response tokens, and the rows lie end to end with no
padding, so neither padding nor the merging of rows can change what an estimator computes. Rewards are finite and kept
in float64.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from recipe.dag.episode.row import Row

PER_CALL = ("uid", "episode", "agent", "role", "turn", "round", "node", "branch", "position", "parts", "row_of_call")


@dataclass(frozen=True)
class CreditBatch:
    """B rows with C calls and N response tokens in all."""

    policy: tuple[str, ...]
    """[B] whose weights sampled the row."""
    uid: tuple[str, ...]
    """[C], as are the next ten."""
    episode: tuple[int, ...]
    agent: tuple[str, ...]
    role: tuple[str, ...]
    """The agent's name where it has none."""
    turn: tuple[int | None, ...]
    """None: a merged row that does not say."""
    round: tuple[int | None, ...]
    """None: a merged row that does not say."""
    node: tuple[str, ...]
    branch: tuple[str | None, ...]
    """Which way its episode took to it; None: a row that does not say."""
    position: tuple[int | None, ...]
    """In its episode, from 0; None: a row that does not say."""
    parts: tuple[Mapping[str, float] | None, ...]
    """The outcome by the node that paid it; None: a row that does not say."""
    prompt_hash: tuple[str, ...] | None
    """Equal for calls with the same prompt, token by token; None if nobody asked for it."""
    rewards: Tensor
    """[C] float64, penalties included."""
    outcomes: Tensor
    """[C] float64, without the penalties."""
    penalties: Tensor
    """[N] float64, what is added to the reward of each token (KL in the reward); 0 where the mask is 0."""
    penalised: bool
    """Whether there are penalties at all."""
    credits: Tensor | None
    """[C] float64, what a mixer credits the calls with beside their rewards, less a baseline of its own; None: nobody
    does."""
    values: Tensor
    """[N], the critic's, in its own precision; 0 where there is none."""
    valued: Tensor
    """[N] bool, True in rows that have values."""
    row_of_call: tuple[int, ...]
    """[C] index of the row that holds the call."""
    call_lengths: Tensor
    """[C] int64, response tokens; sums to N."""
    row_lengths: tuple[int, ...]
    """[B] response tokens; sums to N."""
    mask: Tensor
    """[N] bool, True where the policy sampled the token."""

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Row],
        *,
        values: Sequence[Tensor | None] | None = None,
        penalties: Sequence[Tensor | None] | None = None,
        credits: Sequence[Sequence[float]] | None = None,
        one_policy: bool = True,
        prompts: bool = False,
    ) -> CreditBatch:
        """`values` and `penalties`: one tensor per row, as long as its response, or None for a row without. `credits`:
        per row one number per call. `prompts`: hash what stood before each call. Raises ValueError, naming uid, episode
        and agent, for a reward, value, penalty or credit that is not finite, calls that do not tile their row, and,
        with `one_policy`, rows of more than one policy."""
        policies = sorted({row.policy for row in rows})
        if one_policy and len(policies) > 1:
            raise ValueError(f"credit is computed per policy, but the rows are of {', '.join(policies)}")
        calls: dict[str, list] = {name: [] for name in (*PER_CALL, "outcome", "length")}
        for index, row in enumerate(rows):
            _check(row)
            count = len(row.call_ends)
            calls["uid"] += [row.uid] * count
            calls["episode"] += [row.episode] * count
            calls["agent"] += [row.agent] * count
            calls["role"] += [row.role or row.agent] * count
            calls["turn"] += row.call_turns or ([row.turn] if count == 1 else [None] * count)
            calls["round"] += row.call_rounds or ([row.round] if count == 1 else [None] * count)
            calls["node"] += [row.node] * count
            calls["branch"] += row.call_branches or [None] * count
            calls["parts"] += row.call_parts or [None] * count
            calls["position"] += row.call_positions or [None] * count
            calls["row_of_call"] += [index] * count
            calls["outcome"] += row.call_rewards
            calls["length"] += [end - start for start, end in zip((0, *row.call_ends), row.call_ends, strict=False)]
        # bytes() walks a list in C; a tensor made of all the lists would first be one list of all their numbers
        mask = torch.frombuffer(
            bytearray(b"".join(bytes(row.response_mask) for row in rows)) or bytearray(1), dtype=torch.uint8
        )
        mask = mask[: sum(len(row.response_mask) for row in rows)].bool()
        lengths = torch.tensor(calls["length"], dtype=torch.int64)
        outcome = torch.tensor(calls["outcome"], dtype=torch.float64)
        penalty = _per_token(rows, mask, penalties, "penalty").double()
        rewards = outcome
        if penalties is not None:
            call_of_token = torch.arange(len(lengths)).repeat_interleave(lengths)
            rewards = outcome.index_add(0, call_of_token, penalty)
        return cls(
            policy=tuple(row.policy for row in rows),
            **{name: tuple(calls[name]) for name in PER_CALL},
            prompt_hash=tuple(digest for row in rows for digest in _prompt_hashes(row)) if prompts else None,
            rewards=rewards,
            outcomes=outcome,
            penalties=penalty,
            penalised=penalties is not None,
            credits=None if credits is None else _per_call(rows, credits),
            values=_per_token(rows, mask, values, "value"),
            valued=_given(rows, mask, values),
            call_lengths=lengths,
            row_lengths=tuple(len(row.response_mask) for row in rows),
            mask=mask,
        )

    def spread(self, values: Tensor) -> Tensor:
        """[C] per call -> [N] per token, 0 where the mask is 0."""
        return values.repeat_interleave(self.call_lengths) * self.mask

    def learns(self) -> Tensor:
        """[N] bool, True for sampled tokens that have values."""
        return self.mask & self.valued

    def sampled(self) -> Tensor:
        """[C] int64, sampled tokens of each call."""
        so_far = torch.cat([torch.zeros(1, dtype=torch.int32), self.mask.cumsum(0, dtype=torch.int32)])
        return so_far[torch.cat([self.call_lengths.new_zeros(1), self.call_lengths.cumsum(0)])].diff().long()

    def trajectories(self) -> Iterator[tuple[str, int, str]]:
        """[C] (uid, episode, agent), equal for the calls of one agent in one episode."""
        return zip(self.uid, self.episode, self.agent, strict=True)

    def policy_of(self, calls: Tensor, counts: Tensor | None = None) -> Tensor | None:
        """[M] int64 for M calls, equal for calls of one policy; each number `counts[m]` times where given. None: all
        rows are of one policy."""
        names = {name: number for number, name in enumerate(dict.fromkeys(self.policy))}
        if len(names) < 2:
            return None
        found = torch.tensor([names[self.policy[row]] for row in self.row_of_call], dtype=torch.int64)[calls]
        return found if counts is None else found.repeat_interleave(counts)

    def where(self, call: int) -> str:
        """For messages."""
        return _words(self.uid[call], self.episode[call], self.agent[call])

    def per_row(self, tokens: Tensor) -> list[Tensor]:
        """[N] -> B tensors, float32, each as long as its row's response."""
        return list(tokens.to(torch.float32).split(list(self.row_lengths)))

    def place(self, tokens: Tensor, values: Tensor) -> list[Tensor]:
        """[T] values of the tokens at [T] -> B tensors, float32, 0 for all other tokens."""
        found = torch.zeros(len(self.mask), dtype=torch.float32)
        found[tokens] = values.to(torch.float32)
        return self.per_row(found)


def _per_call(rows: Sequence[Row], credits: Sequence[Sequence[float]]) -> Tensor:
    """[C] float64"""
    for row, mine in zip(rows, credits, strict=True):
        if len(mine) != len(row.call_ends):
            raise ValueError(f"{_where(row)}: {len(row.call_ends)} calls but {len(mine)} credits")
        if not all(map(math.isfinite, mine)):
            raise ValueError(f"{_where(row)}: a credit is not finite")
    return torch.tensor([one for mine in credits for one in mine], dtype=torch.float64)


def _per_token(rows: Sequence[Row], mask: Tensor, given: Sequence[Tensor | None] | None, what: str) -> Tensor:
    """[N], as precise as given, 0 outside the mask and for rows that have none."""
    if given is None:
        return torch.zeros((), dtype=torch.float64).expand(len(mask))  # one number, however many tokens
    for row, one in zip(rows, given, strict=True):
        if one is not None and len(one) != len(row.response_mask):
            raise ValueError(f"{_where(row)}: {len(one)} {what}s for a response of {len(row.response_mask)} tokens")
    parts = [torch.zeros(len(row.response_mask)) if one is None else one for row, one in zip(rows, given, strict=True)]
    tokens = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
    tokens.masked_fill_(~mask, 0.0)
    if len(tokens) and not torch.isfinite(torch.stack(torch.aminmax(tokens))).all():
        sizes = [len(part) for part in parts]
        row = next(r for r, part in zip(rows, tokens.split(sizes), strict=True) if not torch.isfinite(part).all())
        raise ValueError(f"{_where(row)}: a {what} is not finite")
    return tokens


def _given(rows: Sequence[Row], mask: Tensor, given: Sequence[Tensor | None] | None) -> Tensor:
    """[N] bool, True in rows that have something."""
    if given is None or all(one is not None for one in given):
        return torch.tensor(given is not None).expand(len(mask))
    lengths = torch.tensor([len(row.response_mask) for row in rows], dtype=torch.int64)
    return torch.tensor([one is not None for one in given], dtype=torch.bool).repeat_interleave(lengths)


def _prompt_hashes(row: Row) -> Iterator[str]:
    """Per call. What is masked between two calls is the prompt of the second one."""
    running, done = blake2b(array("q", row.prompt_ids).tobytes(), digest_size=16), 0
    for begin, end in zip((0, *row.call_ends), row.call_ends, strict=False):
        start = row.response_mask.index(1, begin, end) if 1 in row.response_mask[begin:end] else end
        running.update(array("q", row.response_ids[done:start]).tobytes())
        done = start
        yield running.hexdigest()


def _where(row: Row) -> str:
    return _words(row.uid, row.episode, row.agent)


def _words(uid: str, episode: int, agent: str) -> str:
    return f"row of uid {uid}, episode {episode}, agent {agent}"


def _check(row: Row) -> None:
    where = _where(row)
    ends = row.call_ends
    if not len(ends) == len(row.call_rewards):
        raise ValueError(f"{where}: {len(ends)} calls but {len(row.call_rewards)} call rewards")
    for what in ("turns", "rounds", "positions", "branches", "parts"):
        given = getattr(row, f"call_{what}")
        if given and len(given) != len(ends):
            raise ValueError(f"{where}: {len(ends)} calls but {len(given)} call {what}")
    if list(ends) != sorted(ends) or ends[0] < 0 or ends[-1] != len(row.response_mask):
        raise ValueError(f"{where}: call_ends {ends} do not tile a response of {len(row.response_mask)} tokens")
    for reward in row.call_rewards:
        if not math.isfinite(reward):
            raise ValueError(f"{where}: reward {reward} is not finite")
