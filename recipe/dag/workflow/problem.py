"""One mistake in a workflow file, at its place; and all of a file's mistakes as one error.

Invariant: a problem is one line, `file:line:col: where: message`, and says how to mend it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from recipe.dag.errors import UserError

KeyPath = tuple[str | int, ...]
"""Where a value stands in the file: ("nodes", 3, "agent_options", "env_path")."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    file: str
    line: int
    """1-based; 0: the file itself could not be read."""
    column: int
    where: str
    """`nodes[3].agent_options.env_path`; empty for the whole file."""
    message: str
    training_only: bool = field(default=False, compare=False)
    """Of a warning: an evaluation has no reason to show it."""

    def __str__(self) -> str:
        return self._line()

    def as_warning(self) -> str:
        return self._line("warning")

    def _line(self, kind: str = "") -> str:
        position = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        text = ": ".join(part for part in (position, kind, self.where, self.message) if part)
        return " ".join(text.splitlines())


def each_once(problems: Iterable[Problem]) -> list[Problem]:
    """In the file's order; an aliased value is wrong once, however often it is used."""
    by_place: dict[tuple, Problem] = {}
    for problem in sorted(problems):
        by_place.setdefault((problem.file, problem.line, problem.column, problem.message), problem)
    return list(by_place.values())


class WorkflowError(UserError):
    """Everything that is wrong with a workflow file: `problems` in the file's order, one line each in the text."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = each_once(problems)
        super().__init__("\n".join(map(str, self.problems)))


def render_path(path: KeyPath) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[\w-]+", part):
            text += f".{part}" if text else part
        else:
            text += f'["{part}"]'
    return text


def closest(word: str, options: Iterable[str]) -> str | None:
    """The option that `word` was probably meant to be."""
    options = list(options)
    match = difflib.get_close_matches(word, options, n=1)
    if match:
        return match[0]
    by_lower = {option.lower(): option for option in options}
    match = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[match[0]] if match else None


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """`; did you mean ...?`, or what there is to choose from."""
    options = list(options)
    match = closest(word, options)
    if match is not None:
        return f"; did you mean `{match}`?"
    return f"; there is {listing(options)}" if options else ""


def listing(options: Iterable[str]) -> str:
    return ", ".join(f"`{option}`" for option in options)
