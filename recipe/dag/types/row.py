"""A row: one training sequence of one policy.

Invariant: `len(response_ids) == len(response_mask) == len(rollout_log_probs)`, and 1 in the mask means "sampled by this
policy". Rewards belong to calls, not to tokens: credit assignment distributes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Candidate:
    """The comparison of a call with the candidates beside it."""

    index: int
    """Its index among its siblings."""
    scores: tuple[float | None, ...]
    """The scores of all siblings, by index; None if one could not be scored."""
    parent: float | None = None
    """The score of the candidate that was kept last before these were generated."""
    kept: bool = True
    """False if another one was kept, so that the episode did not go on from this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCall:
    """The record of a call in a row, besides its tokens."""

    agent: str
    role: str
    """The agent's name if it has no role."""
    node: str
    end: int
    """Its end (exclusive) in the row's response."""
    reward: float
    """0.0 if no node paid the call, or if its reward is unknown."""
    turn: int
    round: int
    """The round of the node's loop; 0 outside loops."""
    position: int
    """Its index in `Episode.all_calls`, which are in causal order. Chained credit needs it."""
    step: int
    """Number of turns and rounds from the episode's start to the call; rewards are discounted by their differences."""
    branch: str
    """`Call.branch`."""
    parts: Mapping[str, float]
    """The reward by the node that paid it."""
    learns: bool = True
    """False for a call that the policy's loss excludes; it still counts in baselines."""
    unscored: bool = False
    """True if the reward is unknown."""
    candidate: Candidate | None = None
    """None for a call of a node without candidates."""


@dataclass(slots=True)
class Row:
    """One or more calls of one policy in one episode, merged where each prompt continues the call before. A candidate
    that was not kept is a row by itself."""

    uid: str
    episode: int
    trunk: int
    """`Episode.trunk`."""
    policy: str
    weight_version: int
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    rollout_log_probs: list[float]
    calls: tuple[RowCall, ...]
    """At least one. They tile the response: each begins where the one before ends."""
    temperature: float = 1.0
    given: bool = False
    """True if the data gave the response: its log-probs are 0, and it belongs to no episode."""

    def __post_init__(self) -> None:
        if not len(self.response_ids) == len(self.response_mask) == len(self.rollout_log_probs):
            raise ValueError(f"row {self.uid}/{self.episode}: ids, mask and log-probs differ in length")

    @property
    def is_dropped(self) -> bool:
        """Whether the row is a candidate that was not kept: it has a score, but no return."""
        return any(call.candidate is not None and not call.candidate.kept for call in self.calls)

    @property
    def learns(self) -> bool:
        """Whether one of its calls is in the policy's loss."""
        return any(call.learns for call in self.calls)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield start and end (exclusive) of each call in the response."""
        return pairwise((0, *(call.end for call in self.calls)))

    @property
    def agents(self) -> list[str]:
        """The agents of its calls, each once."""
        return list(dict.fromkeys(call.agent for call in self.calls))

    def describe(self) -> str:
        """Return which row it is, for error messages."""
        return f"row of uid {self.uid}, episode {self.episode}, agent {' and '.join(self.agents)}"

    def loss_mask(self) -> list[int]:
        """Return the response mask with 0 for the calls that the loss excludes."""
        return self._mask_of([call.learns for call in self.calls])

    def agent_mask(self, agent: str) -> list[int]:
        """Return the response mask with 0 for the calls of other agents."""
        return self._mask_of([call.agent == agent for call in self.calls])

    def _mask_of(self, kept: Sequence[bool]) -> list[int]:
        """Return the response mask with 0 for the calls that are not `kept`."""
        if all(kept):
            return self.response_mask
        mask: list[int] = []
        for is_kept, (start, end) in zip(kept, self.spans(), strict=True):
            mask += self.response_mask[start:end] if is_kept else [0] * (end - start)
        return mask

    def only(self, kept: Sequence[bool]) -> Row:
        """Return the row with the calls that are `kept`, at least one; the others become context, or are cut off behind
        the last one."""
        if all(kept):
            return self
        calls = tuple(call for call, own in zip(self.calls, kept, strict=True) if own)
        end, mask = calls[-1].end, self._mask_of(kept)
        log_probs = [value * bit for value, bit in zip(self.rollout_log_probs, mask, strict=True)]
        parts = {"response_ids": self.response_ids[:end], "response_mask": mask[:end]}
        return replace(self, **parts, rollout_log_probs=log_probs[:end], calls=calls)

    def without_tokens(self) -> Row:
        """Return the row without its tokens: its rewards still count in trajectories, its tokens in no statistic."""
        calls = tuple(replace(call, end=0) for call in self.calls)
        return replace(self, response_ids=[], response_mask=[], rollout_log_probs=[], calls=calls)
