"""Equality of what agents say, and the majority among it.

Invariant: pure. Two answers are equal if their normal forms are the same text; None is no answer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from recipe.dag.credit.vote import majority as most_frequent
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
    forms = [None if answer is None else normalised(answer) for answer in answers]
    votes = dict(Counter(form for form in forms if form is not None).most_common())  # ties stay in their order
    winner = most_frequent(forms, ties)
    if winner is None:
        return Output(text="", parsed={key: None, "share": 0.0, "votes": votes})
    share = votes[winner] / sum(votes.values())
    return Output(text=winner, parsed={key: answers[forms.index(winner)], "share": share, "votes": votes})
