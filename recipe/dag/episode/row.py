"""A row: one training sequence of one policy.

Invariant: `len(response_ids) == len(response_mask) == len(rollout_log_probs)`, and 1 in the mask means "sampled by this
policy". The reward stands on the row, not on a token: credit decides where it goes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Row:
    uid: str
    episode: int
    agent: str
    node: str
    turn: int
    """Of its first call."""
    policy: str
    weight_version: int
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    rollout_log_probs: list[float]
    reward: float
    """Sum over the calls in the row."""
    call_ends: tuple[int, ...] = ()
    """End (exclusive) of each merged call in response_ids; the last one is len(response_ids)."""
    call_rewards: tuple[float, ...] = ()
    call_turns: tuple[int, ...] = ()
    """Of each merged call; only credit by turn (`group_by`) needs them. A merge never crosses nodes."""
    temperature: float = 1.0
    round: int = 0
    """Of its first call: the round of the loop that its node stands in, 0 outside of loops."""
    call_rounds: tuple[int, ...] = ()
    """Of each merged call."""
    call_positions: tuple[int, ...] = ()
    """Of each merged call: its index in the episode's calls, which stand in causal order. Chained credit needs them."""
    role: str = ""
    """Of its agent; empty: the agent's name."""
    call_branches: tuple[str, ...] = ()
    """Of each merged call: which way the episode took to it."""
    call_parts: tuple[dict[str, float], ...] = ()
    """Of each merged call: its reward by the node that paid it."""
    call_learns: tuple[bool, ...] = ()
    """Of each merged call: whether the policy's loss has it. A call that it leaves out still counts in baselines."""

    def __post_init__(self) -> None:
        if not len(self.response_ids) == len(self.response_mask) == len(self.rollout_log_probs):
            raise ValueError(f"row {self.uid}/{self.episode}/{self.node}: ids, mask and log-probs differ in length")
        if not self.call_ends:
            self.call_ends, self.call_rewards = (len(self.response_ids),), (self.reward,)
        if not self.call_learns:
            self.call_learns = (True,) * len(self.call_ends)

    def loss_mask(self) -> list[int]:
        """Return the response mask, 0 over the calls that the loss leaves out."""
        if all(self.call_learns):
            return self.response_mask
        starts = (0, *self.call_ends)
        calls = zip(starts, self.call_ends, self.call_learns, strict=False)
        return [bit * learns for start, end, learns in calls for bit in self.response_mask[start:end]]
