"""Ground truths from the answer column of a data set.

Invariant: a data set has one format; a row whose answer is in another format is a UserError that names the row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from recipe.dag.core.errors import UserError
from recipe.dag.reward.answer import extract_answer

_AFTER_HASHES = re.compile(r"^\s*####\s*(\S.*?)\s*$", re.MULTILINE)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def after_hashes(answer: str) -> str | None:
    """Return the text after the last `####` at the start of a line (GSM8K), without thousands separators."""
    matches = _AFTER_HASHES.findall(answer)
    return _THOUSANDS.sub("", matches[-1]) if matches else None


FORMATS: dict[str, Callable[[str], str | None]] = {"hashes": after_hashes, "boxed": extract_answer, "text": str}
"""Values of `data.answer_format` besides auto, with functions that return None for an answer in another format."""


def ground_truths(answers: Sequence[str], name: str, answer_format: str = "auto") -> list[str]:
    """Extract the ground truths from the answers of data set `name`. `auto` is the first format that all rows have.
    Raises UserError for an unknown format and for a row in another one."""
    if answer_format == "auto":
        for function in FORMATS.values():
            truths = [truth for answer in answers if (truth := function(answer)) is not None]
            if len(truths) == len(answers):
                return truths
    if answer_format not in FORMATS:
        raise UserError(f"data.answer_format={answer_format} is unknown; choose auto, {', '.join(FORMATS)}")
    truths = []
    for number, answer in enumerate(answers, 1):
        truth = FORMATS[answer_format](answer)
        if truth is None:
            start = " ".join(answer.split())[:60]
            raise UserError(f"{name}: row {number} has no answer in the format {answer_format}: '{start}'")
        truths.append(truth)
    return truths
