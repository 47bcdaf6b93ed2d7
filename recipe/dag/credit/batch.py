"""Rows as columns over calls.

Invariant: the call is the unit. The calls of a row tile its response tokens, and the rows are concatenated without
padding, so neither padding nor the merging of calls into rows can change what an estimator computes. Rewards are finite
and kept in float64.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from recipe.dag.types.row import Candidate, Row


@dataclass(frozen=True)
class CreditBatch:
    """B rows with C calls and N response tokens in all."""

    policy: tuple[str, ...]
    """[B] The policy whose weights sampled the row."""
    uid: tuple[str, ...]
    """[C] The sample (the prompt) that the call's episode plays. All fields up to `prompt_hash` are [C]."""
    episode: tuple[int, ...]
    """Index among the sample's episodes."""
    trunk: tuple[int, ...]
    """`Episode.trunk` of the call's episode."""
    agent: tuple[str, ...]
    role: tuple[str, ...]
    """The agent's name if it has no role."""
    turn: tuple[int, ...]
    round: tuple[int, ...]
    node: tuple[str, ...]
    branch: tuple[str, ...]
    """The path that the episode took to the call: skipped nodes and rounds of loops."""
    position: tuple[int, ...]
    """Position in the episode, from 0."""
    step: tuple[int, ...]
    """Number of turns and rounds before the call."""
    parts: tuple[Mapping[str, float], ...]
    """The outcome by the node that paid it."""
    unscored: tuple[bool, ...]
    """True where the reward is unknown; the outcome is then 0."""
    in_loss: tuple[bool, ...]
    """False where the policy's loss excludes the call."""
    candidate: tuple[Candidate | None, ...]
    """The comparison with the candidates beside it; None for a call without any."""
    given: tuple[bool, ...]
    """True where the data, not the policy, gave the response."""
    prompt_hash: tuple[str, ...] | None
    """Equal for calls with the same prompt, token by token; None unless `from_rows` was asked for it."""
    rewards: Tensor
    """[C] float64, penalties included."""
    outcomes: Tensor
    """[C] float64, without the penalties."""
    penalties: Tensor
    """[N] float64, added to the reward of each token (the KL in the reward); 0 where the mask is 0."""
    penalized: bool
    """True if penalties were passed."""
    mixer_credits: Tensor | None
    """[C] float64, advantages that a mixer gives the calls in addition to their rewards, with their baseline already
    subtracted; None without a mixer."""
    baselines: Tensor
    """[C] float64, the baseline of the call's role; 0 without one."""
    log_ratios: Tensor | None
    """[C] float64, the sum over the call's sampled tokens of the log-prob under the policy minus that under its
    reference; None if no log-probs were passed."""
    values: Tensor
    """[N] values of the critic, in its own precision; 0 where there are none."""
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
        mixer_credits: Sequence[Sequence[float]] | None = None,
        baselines: Mapping[str, float] | None = None,
        log_ratios: Sequence[Tensor | None] | None = None,
        one_policy: bool = True,
        prompts: bool = False,
    ) -> CreditBatch:
        """Return the batch of these rows.

        `values`, `penalties` and `log_ratios`: one tensor per row, as long as its response, or None for a row without
        any. `mixer_credits`: per row one number per call. `baselines`: by role. `prompts`: hash the prompt of each
        call. Raises ValueError, naming uid, episode and agent, for a reward, value, penalty or credit that is not
        finite, for calls that do not tile their row and, with `one_policy`, for rows of several policies.
        """
        policies = sorted({row.policy for row in rows})
        if one_policy and len(policies) > 1:
            raise ValueError(f"credit is computed per policy, but the rows belong to {', '.join(policies)}")
        for row in rows:
            _check(row)
        calls = [call for row in rows for call in row.calls]
        row_of_call = tuple(index for index, row in enumerate(rows) for _ in row.calls)
        rows_C = [rows[index] for index in row_of_call]
        mask_N = _mask(rows)
        lengths_C = torch.tensor([end - start for row in rows for start, end in row.spans()], dtype=torch.int64)
        outcomes_C = torch.tensor([call.reward for call in calls], dtype=torch.float64)
        penalties_N = _token_column(rows, mask_N, penalties, "penalty").double()
        # a call's reward for estimators without values; GAE pays each penalty on its own token instead
        rewards_C, ratios_C = outcomes_C, None
        if penalties is not None:
            rewards_C = outcomes_C + _sum_of_calls(penalties_N, lengths_C)
        if log_ratios is not None:
            ratios_N = _token_column(rows, mask_N, log_ratios, "log-ratio").double()
            ratios_C = _sum_of_calls(ratios_N, lengths_C)
        return cls(
            policy=tuple(row.policy for row in rows),
            uid=tuple(row.uid for row in rows_C),
            episode=tuple(row.episode for row in rows_C),
            trunk=tuple(row.trunk for row in rows_C),
            agent=tuple(call.agent for call in calls),
            role=tuple(call.role for call in calls),
            turn=tuple(call.turn for call in calls),
            round=tuple(call.round for call in calls),
            node=tuple(call.node for call in calls),
            branch=tuple(call.branch for call in calls),
            position=tuple(call.position for call in calls),
            step=tuple(call.step for call in calls),
            parts=tuple(call.parts for call in calls),
            unscored=tuple(call.unscored for call in calls),
            in_loss=tuple(call.learns for call in calls),
            candidate=tuple(call.candidate for call in calls),
            given=tuple(row.given for row in rows_C),
            prompt_hash=tuple(chain.from_iterable(map(_prompt_hashes, rows))) if prompts else None,
            rewards=rewards_C,
            outcomes=outcomes_C,
            penalties=penalties_N,
            penalized=penalties is not None,
            mixer_credits=None if mixer_credits is None else _credit_column(rows, mixer_credits),
            baselines=torch.tensor([(baselines or {}).get(call.role, 0.0) for call in calls], dtype=torch.float64),
            log_ratios=ratios_C,
            values=_token_column(rows, mask_N, values, "value"),
            valued=_has_tensor(rows, values),
            row_of_call=row_of_call,
            call_lengths=lengths_C,
            row_lengths=tuple(len(row.response_mask) for row in rows),
            mask=mask_N,
        )

    def per_token(self, values_C: Tensor) -> Tensor:
        """Return [N]: the value of each token's call, 0 where the mask is 0."""
        return values_C.repeat_interleave(self.call_lengths) * self.mask

    def learns(self) -> Tensor:
        """Return [N] bool: True for sampled tokens that have values."""
        return self.mask & self.valued

    def sampled(self) -> Tensor:
        """Return [C] int64: the number of sampled tokens of each call."""
        # differences of a running count: much faster than a loop over calls, and int32 halves the largest tensor
        zero = torch.zeros(1, dtype=torch.int32)
        sampled_before = torch.cat([zero, self.mask.cumsum(0, dtype=torch.int32)])  # [N + 1]
        call_bounds = torch.cat([self.call_lengths.new_zeros(1), self.call_lengths.cumsum(0)])  # [C + 1]
        return sampled_before[call_bounds].diff().long()

    def trajectories(self) -> Iterator[tuple[str, int, str]]:
        """Return [C] keys (uid, episode, agent), equal for the calls of one agent in one episode."""
        return zip(self.uid, self.episode, self.agent, strict=True)

    def policy_ids(self, calls: Tensor, counts: Tensor | None = None) -> Tensor | None:
        """Return int64 ids, equal for calls of one policy: one for each of `calls`, repeated `counts[i]` times where
        counts are passed. None if all rows belong to one policy."""
        ids = {name: number for number, name in enumerate(dict.fromkeys(self.policy))}
        if len(ids) < 2:
            return None
        policy_of_call = torch.tensor([ids[self.policy[row]] for row in self.row_of_call], dtype=torch.int64)[calls]
        return policy_of_call if counts is None else policy_of_call.repeat_interleave(counts)

    def describe(self, call: int) -> str:
        """Return which row the call belongs to, for error messages."""
        return f"row of uid {self.uid[call]}, episode {self.episode[call]}, agent {self.agent[call]}"

    def per_row(self, values_N: Tensor) -> list[Tensor]:
        """Return B tensors, float32, each as long as its row's response."""
        return list(values_N.to(torch.float32).split(list(self.row_lengths)))

    def broadcast_to_rows(self, values_C: Tensor) -> list[Tensor]:
        """Return B tensors, float32: the value of each token's call, 0 where the mask is 0."""
        return self.per_row(self.per_token(values_C.to(torch.float32)))

    def scatter_to_rows(self, tokens_L: Tensor, values_L: Tensor) -> list[Tensor]:
        """Return B tensors, float32: the values at the tokens with these indices, 0 at all other tokens."""
        values_N = torch.zeros(len(self.mask), dtype=torch.float32)
        values_N[tokens_L] = values_L.to(torch.float32)
        return self.per_row(values_N)


def _mask(rows: Sequence[Row]) -> Tensor:
    """Return [N] bool."""
    # bytes() walks a list of 0 and 1 in C; torch.tensor would first need one Python list of all N numbers.
    # frombuffer refuses an empty buffer, hence the one byte that the slice removes again
    joined = bytearray(b"".join(bytes(row.response_mask) for row in rows)) or bytearray(1)
    return torch.frombuffer(joined, dtype=torch.uint8)[: sum(len(row.response_mask) for row in rows)].bool()


def _sum_of_calls(tokens_N: Tensor, lengths_C: Tensor) -> Tensor:
    """Return [C]: the sum of the tokens of each call."""
    call_of_token_N = torch.arange(len(lengths_C)).repeat_interleave(lengths_C)
    return tokens_N.new_zeros(len(lengths_C)).index_add(0, call_of_token_N, tokens_N)


def _credit_column(rows: Sequence[Row], mixer_credits: Sequence[Sequence[float]]) -> Tensor:
    """Return [C] float64."""
    for row, row_credits in zip(rows, mixer_credits, strict=True):
        if len(row_credits) != len(row.calls):
            raise ValueError(f"{row.describe()}: {len(row.calls)} calls but {len(row_credits)} credits")
        if not all(map(math.isfinite, row_credits)):
            raise ValueError(f"{row.describe()}: a credit is not finite")
    return torch.tensor(list(chain.from_iterable(mixer_credits)), dtype=torch.float64)


def _token_column(rows: Sequence[Row], mask_N: Tensor, tensors: Sequence[Tensor | None] | None, name: str) -> Tensor:
    """Return [N] in the precision of `tensors`, 0 outside the mask and in rows without a tensor."""
    if tensors is None:
        return torch.zeros((), dtype=torch.float64).expand(len(mask_N))  # one number in memory, however many tokens
    filled = []
    for row, tensor in zip(rows, tensors, strict=True):
        length = len(row.response_mask)
        if tensor is not None and len(tensor) != length:
            raise ValueError(f"{row.describe()}: {len(tensor)} {name}s for a response of {length} tokens")
        filled.append(torch.zeros(length) if tensor is None else tensor)
    column_N = torch.cat(filled) if filled else torch.zeros(0, dtype=torch.float64)
    column_N.masked_fill_(~mask_N, 0.0)
    # minimum and maximum are finite only if all entries are: no [N] tensor of booleans is needed
    if len(column_N) and not torch.isfinite(torch.stack(torch.aminmax(column_N))).all():
        split = column_N.split([len(tensor) for tensor in filled])
        row = next(row for row, part in zip(rows, split, strict=True) if not torch.isfinite(part).all())
        raise ValueError(f"{row.describe()}: a {name} is not finite")
    return column_N


def _has_tensor(rows: Sequence[Row], tensors: Sequence[Tensor | None] | None) -> Tensor:
    """Return [N] bool, True in rows that have a tensor."""
    lengths_B = torch.tensor([len(row.response_mask) for row in rows], dtype=torch.int64)
    if tensors is None or all(tensor is not None for tensor in tensors):
        return torch.tensor(tensors is not None).expand(int(lengths_B.sum()))
    return torch.tensor([tensor is not None for tensor in tensors], dtype=torch.bool).repeat_interleave(lengths_B)


def _prompt_hashes(row: Row) -> Iterator[str]:
    """Yield the hash of each call's prompt: all tokens of the row before the first one that the call sampled."""
    running, hashed = blake2b(array("q", row.prompt_ids).tobytes(), digest_size=16), 0
    for begin, end in row.spans():
        # tool results between two calls are part of the next call's prompt
        start = row.response_mask.index(1, begin, end) if 1 in row.response_mask[begin:end] else end
        running.update(array("q", row.response_ids[hashed:start]).tobytes())
        hashed = start
        yield running.hexdigest()


def _check(row: Row) -> None:
    ends = [call.end for call in row.calls]
    if not ends or ends != sorted(ends) or ends[0] < 0 or ends[-1] != len(row.response_mask):
        length = len(row.response_mask)
        raise ValueError(f"{row.describe()}: calls that end at {ends} do not tile a response of {length} tokens")
    for call in row.calls:
        if not math.isfinite(call.reward):
            raise ValueError(f"{row.describe()}: reward {call.reward} is not finite")
