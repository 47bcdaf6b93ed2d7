"""Reads the scores in a coach's answer.

Invariant: pure and total. A score is a number that the coach wrote, brought onto its scale; whatever cannot be read is
None. No answer is ever given a default score.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from recipe.dag.types.thoughts import after_thinking

_DECORATION = r"[\s*_`\"'~]*"
_NUMBER = r"[-+]?(?:\d+(?:[.,]\d+)?|\.\d+)(?:e[-+]?\d+)?"
_WORD = r"nan|[-+]?inf(?:inity)?|n/?a|none|null|unknown|yes|no|true|false"
# atomic, so that a number is never read in part
_VALUE = rf"(?>(?P<value>{_NUMBER}|{_WORD}))(?!\w)(?P<percent>[ \t]*%)?+"
_TOTAL = rf"(?:{_DECORATION}[(\[]?{_DECORATION}(?:/|out\s+of){_DECORATION}(?P<total>{_NUMBER}))?+"
_RANGE = rf"(?!{_DECORATION}(?:-|–|—|\.\.|to\b|or\b){_DECORATION}\d)"
"""`0-10` states the scale and is no score."""
_MAY_GO_ON = re.compile(r"[^\w\n]*(?:o|ou|out|out\s+of?|or|t|to)?[^\w\n]*\Z", re.IGNORECASE)
"""After a number: more of it, its denominator or the end of a range may follow."""


def _pattern(label: str) -> re.Pattern[str]:
    words = label.replace("_", r"[\s_-]?")
    gap = rf"{_DECORATION}[:=](?P<gap>{_DECORATION}[\[(]?)"
    return re.compile(rf"(?<![a-z0-9]){words}{gap}{_VALUE}{_TOTAL}{_RANGE}(?=(?P<rest>.*))", re.IGNORECASE)


_PROCESS, _OUTCOME, _CORRECT = map(_pattern, ("process_score", "outcome_score", "answer_correct"))
_LABELS = r"(?:process[\s_-]?score|outcome[\s_-]?score|answer[\s_-]?correct)"
_REASONING = re.compile(
    rf"(?<![a-z0-9])reasoning{_DECORATION}[:=][ \t*_`]*(.*?)(?=^[^\w\n]*{_LABELS}{_DECORATION}[:=]|\Z)",
    re.IGNORECASE | re.DOTALL | re.MULTILINE,
)
_SCORE_LINE = re.compile(rf"^[^\w\n]*{_LABELS}{_DECORATION}[:=].*$", re.IGNORECASE | re.MULTILINE)
_TRUTH = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


@dataclass(frozen=True, slots=True)
class Score:
    """A coach's judgement of one action."""

    process: float | None
    """From 0 to the template's scale; None if it could not be read."""
    outcome: float | None
    """From 0 to 1, from OUTCOME_SCORE or else ANSWER_CORRECT; None if neither could be read."""
    reasoning: str
    """The text after REASONING, or else the text around the scores."""


def parse(text: str, scale: float = 10.0, *, opened: bool = False, cut: bool = False) -> Score:
    """Read PROCESS_SCORE, OUTCOME_SCORE, ANSWER_CORRECT and REASONING, wherever they are in the answer, in any case and
    with Markdown around them; thoughts do not count. The last statement of a score holds.

    A fraction (`8/10`, `4 out of 5`) or a percentage is brought onto the scale. Numbers beyond the scale count as its
    end. scale: the highest PROCESS_SCORE. opened: the prompt opened a thought.
    cut: a limit ended the text; a last statement that might have gone on cannot be read (`8`, of `8/10`).
    """
    text = after_thinking(text, opened=opened)
    outcome = _last(_OUTCOME, text, 1.0, cut)
    return Score(
        process=_last(_PROCESS, text, scale, cut),
        outcome=_correct(text, cut) if outcome is None else outcome,
        reasoning=_reasoning(text),
    )


def _last(pattern: re.Pattern[str], text: str, scale: float, cut: bool) -> float | None:
    """Return the last score in the text, from 0 to `scale`."""
    statement = _last_statement(pattern, text, cut)
    if statement is None:
        return None
    value, total = _number(statement["value"]), _number(statement["total"])
    if value is None or (statement["total"] is not None and (total is None or total <= 0.0)):
        return None
    if total is not None:
        value = value / total * scale
    elif statement["percent"]:
        value = value / 100.0 * scale
    return min(max(value, 0.0), scale) if math.isfinite(value) else None


def _last_statement(pattern: re.Pattern[str], text: str, cut: bool) -> re.Match[str] | None:
    # a number at the start of a later line may begin a list, unless it is all of that line
    statements = [m for m in pattern.finditer(text) if "\n" not in m["gap"] or not re.search(r"\w", m["rest"])]
    # an earlier statement does not hold either: the last one takes its place
    return statements[-1] if statements and not (cut and _MAY_GO_ON.match(text, statements[-1].end())) else None


def _correct(text: str, cut: bool) -> float | None:
    """Return the last ANSWER_CORRECT, 0.0 or 1.0."""
    statement = _last_statement(_CORRECT, text, cut)
    if statement is None or statement["total"] or statement["percent"]:
        return None
    word = statement["value"].lower()
    value = _TRUTH.get(word, _number(word))
    return value if value in (0.0, 1.0) else None


def _number(text: str | None) -> float | None:
    """Return a finite number; None for a word, for a number too large for a float, and for None."""
    try:
        value = float(text.replace(",", ".")) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _reasoning(text: str) -> str:
    matches = _REASONING.findall(text)
    return (matches[-1] if matches else _SCORE_LINE.sub("", text)).strip()
