"""Equality of what agents say, and the majority among it.

Invariant: pure. Two answers are equal if their normal forms are the same text; None is no answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from recipe.dag.episode.context import Output


def normalised(answer: Any) -> str:
    """Text with its white space collapsed; numbers as text, 4.0 as `4`; true and false; anything else as JSON, or as
    Python shows it where it is none."""
    if isinstance(answer, str):
        return " ".join(answer.split())
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    try:
        return json.dumps(answer, sort_keys=True)
    except (TypeError, ValueError):
        return repr(answer)


def majority(answers: Sequence[Any], key: str, ties: Literal["first", "none"]) -> Output:
    """The most frequent answer as `parsed = {key: winner, share, votes}` and its normal form as text.

    None abstains. The winner is given as whoever named it first wrote it; None if nobody voted, or if there is a tie
    and `ties` is none. `share` is the winner's part of the votes cast (0.0 without a winner), `votes` the count of each
    normal form, the most frequent first. With `ties` first, a tie goes to the one that stands first in `answers`.
    """
    votes: dict[str, int] = {}
    written: dict[str, Any] = {}
    for answer in answers:
        if answer is not None:
            form = normalised(answer)
            votes[form] = votes.get(form, 0) + 1
            written.setdefault(form, answer)
    ranked = sorted(votes, key=lambda form: -votes[form])  # stable: ties stay in the order of `answers`
    tied = len(ranked) > 1 and votes[ranked[0]] == votes[ranked[1]]
    if not ranked or (tied and ties == "none"):
        return Output(text="", parsed={key: None, "share": 0.0, "votes": {form: votes[form] for form in ranked}})
    first = ranked[0]
    share = votes[first] / sum(votes.values())
    return Output(text=first, parsed={key: written[first], "share": share, "votes": {f: votes[f] for f in ranked}})
