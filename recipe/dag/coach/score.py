"""Reads the scores in a coach's answer.

Invariant: pure and total. A score is a number that the coach wrote, brought onto its scale; whatever cannot be read is
None. No answer is ever given a default score. What the coach quotes, an agent's text in particular, states none.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from recipe.dag.types.markup import after_thinking

_DECORATION = r"[\s*_`\"'~$]*"
"""Markdown and quotes around a label or a number, which may be on the next line."""
_AFTER = r"[ \t*_`\"'~$>]*"
"""The same behind a number, with the end of `<8>`, in its line: what the next line says is no part of the score."""
_COLON = rf"(?:{_DECORATION}[(\[][^()\[\]\n]*[)\]])?{_DECORATION}[:=]"
"""A label's end; the scale may be in brackets before it."""
_NUMBER = r"[-+]?(?:\d+(?:[.,]\d+)?|\.\d+)(?:e[-+]?\d+)?"
_WORD = r"nan|[-+]?inf(?:inity)?|n/?a|none|null|unknown|yes|no|true|false|correct|incorrect|right|wrong"
# atomic, so that a number is never read in part
_VALUE = rf"(?>(?P<value>{_NUMBER}|{_WORD}))(?!\w)(?P<percent>[ \t]*%)?+"
_DENOMINATOR = rf"(?:{_AFTER}(?:[(\[]{_DECORATION})?(?:/|(?:out\s+)?of){_DECORATION}(?P<total>{_NUMBER}))?+"
_RANGE = rf"(?!{_AFTER}(?:-|–|—|\.\.|to\b|or\b){_DECORATION}\d)"
"""`0-10` states the scale and is no score."""
_MAY_GO_ON = re.compile(r"[^\w\n]*(?:o|ou|out|out\s+of?|of|or|t|to)?[^\w\n]*\Z", re.IGNORECASE)
"""After a number: more of it, its denominator or the end of a range may follow."""


_PROCESS, _OUTCOME, _CORRECT = (r"process[\s_-]?score", r"outcome[\s_-]?score", r"answer[\s_-]?correct")
_LABELS = rf"(?:{_PROCESS}|{_OUTCOME}|{_CORRECT})"
# `<8>` is a score, `<1 if it is right>` repeats the form, and `< 8` is none
_GAP = rf"(?P<gap>{_DECORATION}(?:[\[(]|<(?=(?:[^<>a-z]|out|of)*>))?)"
_STATEMENT = re.compile(
    rf"(?P<quote>[\"'`])?(?P<label>{_LABELS})(?(quote)(?P=quote)){_COLON}"
    rf"(?:{_GAP}{_VALUE}{_DENOMINATOR}{_RANGE}(?=(?P<rest>.*)))?",
    re.IGNORECASE,
)
"""A label and the value that it states; `value` is None where none can be read. A quote in front of the label ends
behind it, as in JSON and in `code`; one that spans the value is a quotation, whose match begins after that quote."""
_LINE_START = re.compile(r"[ \t]*(?:(?:[-+*•]|\d+[.)]|#{1,6})[ \t]+)*[ \t*_~$(\[{]*")
"""What may stand before a statement in its line: marks of lists, headings and emphasis, and brackets."""
_BETWEEN = re.compile(r"[ \t*_,;.|)\]]*")
"""What may stand between two statements of one line."""
_CLOSING_QUOTE = re.compile(r"[ \t*_.]*[\"'`”’»]")
_FENCED = re.compile(r"^[ \t>]*(`{3,}|~{3,}).*?(?:^[ \t>]*\1[`~]*[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_QUOTE = re.compile(r'(?<!\\)"')
_REASONING = re.compile(
    rf"(?<![a-z0-9])reasoning{_DECORATION}[:=][ \t*_`]*(.*?)(?=^[^\w\n]*{_LABELS}{_COLON}|\Z)",
    re.IGNORECASE | re.DOTALL | re.MULTILINE,
)
_SCORE_LINE = re.compile(rf"^[^\w\n]*{_LABELS}{_COLON}.*$", re.IGNORECASE | re.MULTILINE)
_RIGHT, _WRONG = ("yes", "true", "correct", "right"), ("no", "false", "incorrect", "wrong")
_TRUTH = dict.fromkeys(_RIGHT, 1.0) | dict.fromkeys(_WRONG, 0.0)


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
    """Read PROCESS_SCORE, OUTCOME_SCORE, ANSWER_CORRECT and REASONING, in any case and with Markdown around them.

    A statement starts its line, or follows another one in it; thoughts, quotations and fenced code do not count. The
    last statement of a score holds; if it cannot be read, no earlier one takes its place.

    A fraction (`8/10`, `4 out of 5`) or a percentage is brought onto the scale. Numbers beyond the scale count as its
    end. scale: the highest PROCESS_SCORE. opened: the prompt opened a thought.
    cut: a limit ended the text; a last statement that might have gone on cannot be read (`8`, of `8/10`).
    """
    text = after_thinking(text, opened=opened)
    statements = _statements(text)
    outcome = _last(_OUTCOME, statements, 1.0, cut)
    return Score(
        process=_last(_PROCESS, statements, scale, cut),
        outcome=_correct(statements, cut) if outcome is None else outcome,
        reasoning=_reasoning(text),
    )


def _statements(text: str) -> list[re.Match[str]]:
    """Return the coach's own statements, in order."""
    text = _FENCED.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    statements: list[re.Match[str]] = []
    for match in _STATEMENT.finditer(text):
        line = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        # JSON puts two statements into one line
        follows = bool(statements) and _BETWEEN.fullmatch(text, statements[-1].end(), match.start())
        if (follows or _LINE_START.fullmatch(line)) and not _is_quoted(match):
            statements.append(match)
    return statements


def _is_quoted(statement: re.Match[str]) -> bool:
    """Return whether a quotation began before the statement, in its line or in an earlier one."""
    opened = len(_QUOTE.findall(statement.string, 0, statement.start())) % 2 == 1
    value = statement["value"] is not None and not re.search(r"[\"'`]", statement["gap"])
    return opened or (value and bool(_CLOSING_QUOTE.match(statement["rest"])))


def _last(label: str, statements: list[re.Match[str]], scale: float, cut: bool) -> float | None:
    """Return the last score with this label, from 0 to `scale`."""
    statement = _last_statement(label, statements, cut)
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


def _last_statement(label: str, statements: list[re.Match[str]], cut: bool) -> re.Match[str] | None:
    """Return the last statement with this label; None if it cannot be read. An earlier one does not hold either."""
    own = [statement for statement in statements if re.fullmatch(label, statement["label"], re.IGNORECASE)]
    last = own[-1] if own else None
    if last is None or last["value"] is None or (cut and _MAY_GO_ON.match(last.string, last.end())):
        return None
    # `7, and so PROCESS_SCORE: 9`: which of the two holds is not clear
    if re.search(label, last["rest"], re.IGNORECASE):
        return None
    # a number at the start of a later line may begin a list, unless it is all of that line
    return None if "\n" in last["gap"] and re.search(r"\w", last["rest"]) else last


def _correct(statements: list[re.Match[str]], cut: bool) -> float | None:
    """Return the last ANSWER_CORRECT, 0.0 or 1.0."""
    statement = _last_statement(_CORRECT, statements, cut)
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
