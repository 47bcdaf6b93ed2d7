"""One call of a node in an episode, in one round of its loop in one turn.

Invariant: a move exists before the episode does; whether it is made is known only then.
"""

from __future__ import annotations

from typing import NamedTuple


class Move(NamedTuple):
    node: str
    turn: int
    round: int

    @property
    def id(self) -> str:
        return f"{self.node}@{self.turn}.{self.round}"
