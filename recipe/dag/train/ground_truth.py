"""From a data set's answer column to ground truths.

Invariant: one format per data set; a row whose answer does not have it is a UserError that names the row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from recipe.dag.errors import UserError
from recipe.dag.reward.answer import extract_answer

_AFTER_HASHES = re.compile(r"^\s*####\s*(\S.*?)\s*$", re.MULTILINE)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def after_hashes(answer: str) -> str | None:
    """Return what follows the last `####` at the start of a line (GSM8K), without thousands separators."""
    matches = _AFTER_HASHES.findall(answer)
    return _THOUSANDS.sub("", matches[-1]) if matches else None


def boxed(answer: str) -> str | None:
    r"""Return what stands in the last \boxed{...} (MATH)."""
    return extract_answer(answer)


FORMATS: dict[str, Callable[[str], str | None]] = {"hashes": after_hashes, "boxed": boxed, "text": str}
"""Values of `data.answer_format`, besides auto; a function returns None for an answer in another format."""


def ground_truths(answers: Sequence[str], name: str, answer_format: str = "auto") -> list[str]:
    """Extract each ground truth from the answer column of data set `name`. `auto`: the first format that every row
    has. Raises UserError for an unknown format and for a row without it."""
    if answer_format == "auto":
        for function in FORMATS.values():
            truths = [function(answer) for answer in answers]
            if None not in truths:
                return truths
    if answer_format not in FORMATS:
        raise UserError(f"data.answer_format={answer_format} is unknown; choose auto, {', '.join(FORMATS)}")
    truths = [FORMATS[answer_format](answer) for answer in answers]
    if None in truths:
        row = truths.index(None)
        start = " ".join(answers[row].split())[:60]
        raise UserError(f"{name}: row {row + 1} has no answer in the format {answer_format}: '{start}'")
    return truths
