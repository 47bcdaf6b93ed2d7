"""A mistake in a workflow file with its position, and all mistakes of a file as one error.

Invariant: a problem is one line, `file:line:col: where: message`, and says how to fix it.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ParamSpec

from recipe.dag.core.errors import UserError

P = ParamSpec("P")
KeyPath = tuple[str | int, ...]
"""Path of a value in the file, such as ("nodes", 3, "env")."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    file: str
    line: int
    """1-based; 0 if the file could not be read."""
    column: int
    where: str
    """`nodes[3].env`; empty for the whole file."""
    message: str
    training_only: bool = field(default=False, compare=False)
    """True for a warning that concerns training only, so that evaluations do not print it."""

    def __str__(self) -> str:
        return self._line()

    def as_warning(self) -> str:
        return self._line("warning")

    def _line(self, kind: str = "") -> str:
        position = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        text = ": ".join(part for part in (position, kind, self.where, self.message) if part)
        return " ".join(text.splitlines())


def each_once(problems: Iterable[Problem]) -> list[Problem]:
    """Sort problems in the file's order and remove duplicates, which aliased values cause."""
    by_position: dict[tuple, Problem] = {}
    for problem in sorted(problems):
        by_position.setdefault((problem.file, problem.line, problem.column, problem.message), problem)
    return list(by_position.values())


class WorkflowError(UserError):
    """All mistakes of a workflow file: `problems` in the file's order, one line each in the text."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = each_once(problems)
        super().__init__("\n".join(map(str, self.problems)))


def mistakes_reported(main: Callable[P, int]) -> Callable[P, int]:
    """Decorate a program's `main`: a mistake of the user is printed to stderr, and its exit code is 2."""

    @functools.wraps(main)
    def wrapper(*args: P.args, **keys: P.kwargs) -> int:
        try:
            return main(*args, **keys)
        except UserError as error:
            # each line of a WorkflowError begins with its position in the file
            print(error if isinstance(error, WorkflowError) else f"error: {error}", file=sys.stderr)
            return 2

    return wrapper


def contains(outer: str, inner: str) -> bool:
    """Return whether the rendered path `inner` is `outer`, or a part of the value there."""
    return inner == outer or inner.startswith((f"{outer}.", f"{outer}["))


def render_path(path: KeyPath) -> str:
    """Return a path as text, such as `nodes[3].env`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[\w-]+", part):
            text += f".{part}" if text else part
        else:
            text += f'["{part}"]'
    return text
