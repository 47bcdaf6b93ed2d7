"""What a centralised critic reads: the joint history in place of the agent's own prompt (MAPPO, credit/critic.py).

Invariant: before a call stands all that was said and shown in the episode before it, and nothing else: the calls of an
episode stand in causal order, so none of the earlier ones is an answer to it. A message of a peer that moved at
the same time is read too, which a value may know since the call could not change it. The response is never cut. Pure,
but for its count.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from recipe.dag.credit.critic import Said, history_parts
from recipe.dag.episode.record import Episode
from recipe.dag.episode.row import Row
from recipe.dag.train.said import question_of

SHORTEST = 16
"""Characters to which messages are shortened at most; the mark of what is left out has half as many."""


@dataclass(slots=True)
class JointReader:
    """Rows as the one critic reads them. `episodes` by (uid, index); `limit_of`: by critic owner, the most tokens of a
    row; `tokenizer_of`: its tokenizer, whose vocabulary is that of all who share the critic."""

    episodes: Mapping[Hashable, Episode]
    tokenizer_of: Callable[[str], Any]
    limit_of: Callable[[str], int]
    max_chars: int
    rows: int = 0
    shortened: int = 0
    """Rows whose history would not fit: its messages are shortened by halves, and where that does not suffice the
    beginning of the question is left out."""
    _encoded: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Token ids by owner and piece: a message stands in the histories of all later calls."""

    def __call__(self, owner: str, row: Row) -> Row:
        """The row with the joint history as its prompt, plain text without a chat template. Raises ValueError for a row
        of several calls, or of an episode that is not there."""
        where = f"row of uid {row.uid}, episode {row.episode}, agent {row.agent}"
        if len(row.call_positions) != 1:
            raise ValueError(f"{where}: a centralised critic reads one call at a time; its row holds several")
        if (row.uid, row.episode) not in self.episodes:
            raise ValueError(f"{where}: a centralised critic needs its episode, which was not handed over")
        episode = self.episodes[row.uid, row.episode]
        room = self.limit_of(owner) - len(row.response_ids)
        return replace(row, prompt_ids=self._history(episode, row.call_positions[0], owner, room))

    def _history(self, episode: Episode, position: int, owner: str, room: int) -> list[int]:
        *said, speaker = (Said(c.agent, c.turn, c.text, c.observation) for c in episode.calls[: position + 1])
        chars = self.max_chars
        self.rows += 1
        while True:
            parts = history_parts(question_of(episode), said, speaker, max_chars=chars)
            ids = list(chain.from_iterable(self._ids(owner, part) for part in parts))
            if len(ids) <= room:
                return ids
            self.shortened += chars == self.max_chars
            if chars <= SHORTEST:
                return ids[len(ids) - max(room, 1) :]
            chars = max(chars // 2, SHORTEST)

    def _ids(self, owner: str, text: str) -> list[int]:
        if (owner, text) not in self._encoded:
            self._encoded[owner, text] = list(self.tokenizer_of(owner).encode(text, add_special_tokens=False))
        return self._encoded[owner, text]
