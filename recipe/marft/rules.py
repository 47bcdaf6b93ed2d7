"""The ways in which a flag gets a meaning: functions that add what was given to a `Translation`.

Invariant: a rule adds something, finds that the value says what happens anyway, or raises a UserError that begins with
the flag; values come checked (`recipe.dag.settings.kinds`). Two flags never say different things of one
and the same. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from recipe.dag.errors import UserError
from recipe.dag.settings.kinds import ANY, Given, Kind

RUN = "actor_rollout_ref"


class Edit(NamedTuple):
    """One change of the workflow."""

    value: Any
    argument: str
    """What brought it, as it was passed."""


@dataclass
class Translation:
    """What a command line means here."""

    overrides: dict[str, str | None] = field(default_factory=dict)
    """Of the run's configuration, in hydra's grammar; None: no `=` and no value (`~key`)."""
    edits: dict[str, Edit] = field(default_factory=dict)
    """Of the workflow, for `recipe.marft.edits`."""
    given: dict[str, Given] = field(default_factory=dict)
    """By flag, the last one of each."""
    _claims: dict[str, Given] = field(default_factory=dict)

    def override(self, key: str, given: Given, text: str | None = None) -> None:
        self._claim(key, given)
        self.overrides[key] = given.text if text is None else text

    def edit(self, key: str, given: Given) -> None:
        self._claim(key, given)
        self.edits[key] = Edit(given.value, str(given))

    def _claim(self, what: str, given: Given) -> None:
        """A flag may be given again, as on any command line; two flags for one thing must agree."""
        before = self._claims.setdefault(what, given)
        if before.flag != given.flag and before.value != given.value:
            raise UserError(f"{given}: {before} says otherwise of the same; give one of them")
        self._claims[what] = given


Rule = Callable[[Given, Translation], None]
"""Raises UserError."""


class Flag(NamedTuple):
    kind: Kind
    rule: Rule


def as_it_is(kind: Kind) -> Flag:
    return Flag(kind, lambda given, out: out.override(given.flag, given))


def renamed(key: str, kind: Kind) -> Flag:
    return Flag(kind, lambda given, out: out.override(key, given))


def switched(kind: Kind, keys: Mapping[Any, tuple[str, str] | None]) -> Flag:
    """Value -> the key that it means and that one's value; None: what happens anyway."""

    def rule(given: Given, out: Translation) -> None:
        if (meant := keys[given.value]) is not None:
            out.override(meant[0], given, meant[1])

    return Flag(kind, rule)


def workflow(key: str, kind: Kind) -> Flag:
    """This edit of the workflow gets the value."""
    return Flag(kind, lambda given, out: out.edit(key, given))


def only(value: Any, kind: Kind, reason: str) -> Flag:
    """Means what happens here anyway; any other value is refused."""

    def rule(given: Given, out: Translation) -> None:
        if given.value != value:
            raise UserError(f"{given}: {reason}; leave it out or write {value}")

    return Flag(kind, rule)


_NONE = object()


def refused(reason: str, *, but: Any = _NONE) -> Flag:
    """`but`: siiRL's default, which asks for nothing."""

    def rule(given: Given, out: Translation) -> None:
        if given.value is not but:
            raise UserError(f"{given}: {reason}")

    return Flag(ANY, rule)


def tokens(kind: Kind) -> Flag:
    """Of a whole call, and of each of its generations."""

    def rule(given: Given, out: Translation) -> None:
        out.override("data.max_response_length", given)
        out.edit("sampling.max_tokens", given)

    return Flag(kind, rule)


def logger(kind: Kind) -> Flag:
    """A name may stand alone, as in siiRL's defaults."""
    alone = Kind(kind.takes, lambda value: kind.accepts([value] if isinstance(value, str) else value))

    def rule(given: Given, out: Translation) -> None:
        out.override(given.flag, given, f"[{given.text}]" if isinstance(given.value, str) else None)

    return Flag(alone, rule)
