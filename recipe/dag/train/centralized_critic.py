"""The input of a centralised critic: the joint history replaces the agent's own prompt (MAPPO, credit/critic.py).

Invariant: the prompt of a call is everything that agents wrote and observed in the episode before it, and nothing else.
An episode's calls are in causal order, so no earlier call can be a reaction to a later one. The history includes the
message of a peer that acted at the same time; a value may depend on it, because the call could not change it. The
response is never cut. Pure except for its counters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from recipe.dag.credit.critic import Utterance, history_parts
from recipe.dag.train.mixer_inputs import question_of
from recipe.dag.types.record import Episode
from recipe.dag.types.row import Row

SHORTEST = 16
"""Messages are never shortened below this many characters; the mark of an omission has half as many."""


@dataclass(slots=True)
class JointHistory:
    """Converts policies' rows to those that a centralised critic reads."""

    episodes: Mapping[tuple[str, int], Episode]
    """Episodes by (uid, index)."""
    tokenizer_of: Callable[[str], Any]
    """Returns the tokenizer of a critic's owner; all policies that share the critic have its vocabulary."""
    limit_of: Callable[[str], int]
    """Returns the maximum number of tokens in a row of a critic's owner."""
    max_chars: int
    rows: int = 0
    shortened: int = 0
    """Rows whose history would not fit: messages are halved repeatedly, and if that does not suffice the beginning of
    the question is cut off."""
    _encoded: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Token ids by owner and text; cached, because a message is part of the histories of all later calls."""

    def __call__(self, owner: str, row: Row) -> Row:
        """Return the row with the joint history as its prompt, in plain text without a chat template. Raises ValueError
        for a row of several calls, or of an unknown episode."""
        if len(row.calls) != 1:
            raise ValueError(f"{row.describe()}: a centralised critic reads one call at a time; its row holds several")
        if (row.uid, row.episode) not in self.episodes:
            raise ValueError(f"{row.describe()}: a centralised critic needs the row's episode, which is missing")
        episode = self.episodes[row.uid, row.episode]
        room = self.limit_of(owner) - len(row.response_ids)
        return replace(row, prompt_ids=self._history(episode, row.calls[0].position, owner, room))

    def _history(self, episode: Episode, position: int, owner: str, room: int) -> list[int]:
        calls = episode.calls[: position + 1]
        *history, speaker = (Utterance(call.agent, call.turn, call.text, call.observation) for call in calls)
        chars = self.max_chars
        self.rows += 1
        while True:
            parts = history_parts(question_of(episode), history, speaker, max_chars=chars)
            ids = list(chain.from_iterable(self._ids(owner, part) for part in parts))
            if len(ids) <= room:
                return ids
            self.shortened += chars == self.max_chars  # count the row once, not once per halving
            if chars <= SHORTEST:
                return ids[len(ids) - max(room, 1) :]
            chars = max(chars // 2, SHORTEST)

    def _ids(self, owner: str, text: str) -> list[int]:
        if (owner, text) not in self._encoded:
            self._encoded[owner, text] = list(self.tokenizer_of(owner).encode(text, add_special_tokens=False))
        return self._encoded[owner, text]
