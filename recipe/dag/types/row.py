"""A row: one training sequence of one policy.

Invariant: `len(response_ids) == len(response_mask) == len(rollout_log_probs)`, and 1 in the mask means "sampled by this
policy". The reward belongs to the row, not to a token: credit assignment distributes it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a call that was one of several candidates is compared with."""

    index: int
    """Its index among its siblings."""
    scores: tuple[float | None, ...]
    """The scores of all siblings, by index; None if one could not be scored."""
    parent: float | None = None
    """The score of the candidate that was kept last before these were generated."""
    kept: bool = True
    """False if another one was kept, so that the episode did not go on from this one."""


@dataclass(slots=True)
class Row:
    """One or more calls of a node in one episode, merged where each prompt continues the call before.

    The fields `call_...` have one entry per merged call; `turn` and `round` are those of the first call.
    """

    uid: str
    episode: int
    agent: str
    node: str
    turn: int
    policy: str
    weight_version: int
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    rollout_log_probs: list[float]
    reward: float
    """Sum over the merged calls."""
    call_ends: tuple[int, ...] = ()
    """End (exclusive) of each call in response_ids; the last one is len(response_ids)."""
    call_rewards: tuple[float, ...] = ()
    call_turns: tuple[int, ...] = ()
    """Only credit by turn (`group_by`) needs them. A merge never crosses nodes."""
    temperature: float = 1.0
    round: int = 0
    """The round of the node's loop; 0 outside loops."""
    call_rounds: tuple[int, ...] = ()
    call_positions: tuple[int, ...] = ()
    """Index of each call in the episode's calls, which are in causal order. Chained credit needs them."""
    call_steps: tuple[int, ...] = ()
    """Number of turns and rounds from the episode's start to each call; rewards are discounted by their differences.
    Empty: the turns."""
    role: str = ""
    """The agent's role; empty means the agent's name."""
    call_branches: tuple[str, ...] = ()
    """`Call.branch` of each call."""
    call_parts: tuple[dict[str, float], ...] = ()
    """Reward of each call by the node that paid it."""
    call_learns: tuple[bool, ...] = ()
    """False for a call that the policy's loss excludes; it still counts in baselines."""
    call_unscored: tuple[bool, ...] = ()
    """True for a call whose reward is unknown; `call_rewards` then has 0.0 for it. Empty: all are known."""
    call_candidates: tuple[Candidate | None, ...] = ()
    """None for a call of a node without candidates. A candidate that was not kept is a row by itself."""

    @property
    def is_dropped(self) -> bool:
        """Whether the row is a candidate that was not kept: it has a score, but no return."""
        return any(candidate is not None and not candidate.kept for candidate in self.call_candidates)

    def __post_init__(self) -> None:
        if not len(self.response_ids) == len(self.response_mask) == len(self.rollout_log_probs):
            raise ValueError(f"row {self.uid}/{self.episode}/{self.node}: ids, mask and log-probs differ in length")
        if not self.call_ends:
            self.call_ends, self.call_rewards = (len(self.response_ids),), (self.reward,)
        if not self.call_learns:
            self.call_learns = (True,) * len(self.call_ends)

    def loss_mask(self) -> list[int]:
        """Return the response mask with 0 for the calls that the loss excludes."""
        if all(self.call_learns):
            return self.response_mask
        mask: list[int] = []
        for end, learns in zip(self.call_ends, self.call_learns, strict=True):
            bits = self.response_mask[len(mask) : end]
            mask += bits if learns else [0] * len(bits)
        return mask
