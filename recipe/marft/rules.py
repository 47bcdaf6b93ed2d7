"""Rules of translation: each turns the value of a siiRL flag into overrides of the run or edits of the workflow.

Invariant: a rule adds to the `Translation`, accepts a value that describes what happens anyway, or raises a UserError
that begins with the flag. Values have been checked (`recipe.dag.settings.kinds`). Two flags for the same setting must
agree. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from recipe.dag.core.errors import UserError, raise_all
from recipe.dag.core.problem import WorkflowError
from recipe.dag.settings.kinds import ANY, Argument, ValueKind


class Errors:
    """Lines about a command line from several checks, which are reported together."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep the UserError that ends the block, instead of raising it, except for mistakes of the workflow file."""
        try:
            yield
        except WorkflowError:
            raise
        except UserError as error:
            self.lines += str(error).split("\nerror: ")

    def check(self) -> None:
        """Raise UserError if there are lines."""
        raise_all(self.lines)


class Edit(NamedTuple):
    """One change of the workflow."""

    value: Any
    argument: str
    """The flag that caused it, as `flag=value`."""


@dataclass
class Translation:
    """A command line in terms of this engine."""

    overrides: dict[str, str | None] = field(default_factory=dict)
    """Overrides of the run's configuration, in hydra's syntax; None for a key without `=` (`~key`)."""
    edits: dict[str, Edit] = field(default_factory=dict)
    """Edits of the workflow, for `recipe.marft.edits`."""
    arguments: dict[str, Argument] = field(default_factory=dict)
    """The last value of each flag."""
    _claims: dict[str, Argument] = field(default_factory=dict)

    def override(self, key: str, argument: Argument, text: str | None = None) -> None:
        self._claim(key, argument)
        self.overrides[key] = argument.text if text is None else text

    def edit(self, key: str, argument: Argument) -> None:
        self._claim(key, argument)
        self.edits[key] = Edit(argument.value, str(argument))

    def _claim(self, setting: str, argument: Argument) -> None:
        """Raise UserError if another flag gave the setting another value; the same flag may be repeated."""
        before = self._claims.setdefault(setting, argument)
        if before.flag != argument.flag and before.value != argument.value:
            raise UserError(f"{argument}: {before} conflicts with it; pass only one of them")
        self._claims[setting] = argument


Rule = Callable[[Argument, Translation], None]
"""Adds the meaning of a flag to the translation. Raises UserError."""


class Flag(NamedTuple):
    kind: ValueKind
    rule: Rule


def as_it_is(kind: ValueKind) -> Flag:
    """Return a flag that becomes an override with the same name."""
    return Flag(kind, lambda argument, out: out.override(argument.flag, argument))


def renamed(key: str, kind: ValueKind) -> Flag:
    """Return a flag that becomes an override with another name."""
    return Flag(kind, lambda argument, out: out.override(key, argument))


def switched(kind: ValueKind, keys: Mapping[Any, tuple[str, str] | None]) -> Flag:
    """Return a flag whose value selects an override (key, value); None if the value describes what happens anyway."""

    def rule(argument: Argument, out: Translation) -> None:
        if (override := keys[argument.value]) is not None:
            out.override(override[0], argument, override[1])

    return Flag(kind, rule)


def workflow(key: str, kind: ValueKind) -> Flag:
    """Return a flag that becomes an edit of the workflow."""
    return Flag(kind, lambda argument, out: out.edit(key, argument))


def only(value: Any, kind: ValueKind, reason: str) -> Flag:
    """Return a flag that accepts only the value that describes what happens anyway."""

    def rule(argument: Argument, out: Translation) -> None:
        if argument.value != value:
            raise UserError(f"{argument}: {reason}; remove the flag or pass {value}")

    return Flag(kind, rule)


_NONE = object()


def refused(reason: str, *, but: Any = _NONE) -> Flag:
    """Return a flag that is not supported. `but`: siiRL's default, which is accepted and has no effect."""

    def rule(argument: Argument, out: Translation) -> None:
        if argument.value is not but:
            raise UserError(f"{argument}: {reason}")

    return Flag(ANY, rule)


def tokens(kind: ValueKind) -> Flag:
    """Return a flag that limits a whole call and each of its generations."""

    def rule(argument: Argument, out: Translation) -> None:
        out.override("data.max_response_length", argument)
        out.edit("sampling.max_tokens", argument)

    return Flag(kind, rule)


def logger(kind: ValueKind) -> Flag:
    """Return a flag that accepts a list of trackers, or a single name as in siiRL's defaults."""
    name_or_list = ValueKind(kind.takes, lambda value: kind.accepts([value] if isinstance(value, str) else value))

    def rule(argument: Argument, out: Translation) -> None:
        out.override(argument.flag, argument, f"[{argument.text}]" if isinstance(argument.value, str) else None)

    return Flag(name_or_list, rule)
