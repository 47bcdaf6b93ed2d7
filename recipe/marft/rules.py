"""The ways in which a flag gets a meaning: functions of (flag, value) that add to a `Translation`.

Invariant: a rule adds something, finds that the value says what happens anyway, or raises a UserError that begins with
the flag. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.errors import UserError

RUN = "actor_rollout_ref"


@dataclass
class Translation:
    """What a command line means here."""

    overrides: dict[str, str] = field(default_factory=dict)
    """Of the run's configuration."""
    edits: dict[str, Any] = field(default_factory=dict)
    """Of the workflow, for `recipe.marft.edits`."""
    greedy: bool = False
    """Validation takes the likeliest token, whatever temperature another flag names."""


Rule = Callable[[str, str, Translation], None]
"""(flag, value, what to add to). Raises UserError."""


def as_it_is(flag: str, value: str, out: Translation) -> None:
    out.overrides[flag] = value


def renamed(key: str) -> Rule:
    def rule(flag: str, value: str, out: Translation) -> None:
        out.overrides[key] = value

    return rule


def workflow(key: str, kind: Callable[[str, str], Any] | None = None) -> Rule:
    """This edit of the workflow gets the value, read as a `kind` of value."""

    def rule(flag: str, value: str, out: Translation) -> None:
        out.edits[key] = (kind or number)(flag, value)

    return rule


def only(*allowed: str, reason: str) -> Rule:
    """Means what happens here anyway when it is one of `allowed`; else it is refused."""

    def rule(flag: str, value: str, out: Translation) -> None:
        if value.lower() not in allowed:
            raise UserError(f"{flag}={value}: {reason}; leave it out or write {allowed[0]}")

    return rule


def refused(reason: str) -> Rule:
    def rule(flag: str, value: str, out: Translation) -> None:
        raise UserError(f"{flag}={value}: {reason}")

    return rule


def choice(**choices: dict[str, Any]) -> Rule:
    """Each value stands for edits of its own."""

    def rule(flag: str, value: str, out: Translation) -> None:
        if value not in choices:
            raise UserError(f"{flag}={value}: choose one of {', '.join(choices)}")
        out.edits |= choices[value]

    return rule


def number(flag: str, value: str) -> float | int:
    try:
        return int(value)
    except ValueError:
        try:
            return float(value)
        except ValueError as error:
            raise UserError(f"{flag}={value}: a number is needed") from error


def truth(flag: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise UserError(f"{flag}={value}: True or False is needed")
    return value.lower() == "true"


def turns(flag: str, value: str) -> str:
    return "all" if truth(flag, value) else "last"


def text(flag: str, value: str) -> str:
    return value.strip("'\"")


def do_sample(flag: str, value: str, out: Translation) -> None:
    out.greedy = not truth(flag, value)


def clip_ratio(flag: str, value: str, out: Translation) -> None:
    """The two ends may have flags of their own, before or after this one."""
    for key in ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"):
        out.edits.setdefault(key, number(flag, value))


def tokens(flag: str, value: str, out: Translation) -> None:
    out.overrides["data.max_response_length"] = value
    out.edits["sampling.max_tokens"] = number(flag, value)


def micro_batch(flag: str, value: str, out: Translation) -> None:
    """Here batches are made by token count unless one says otherwise; then a count of rows would not be read."""
    out.overrides[flag] = value
    if flag.startswith("critic."):
        out.edits.setdefault("critic.config.use_dynamic_bsz", False)
    else:
        out.overrides.setdefault(f"{RUN}.actor.use_dynamic_bsz", "False")


def mini_batch(flag: str, value: str, out: Translation) -> None:
    out.edits["critic.mini_batch_size" if flag.startswith("critic.") else "algorithm.mini_batch_size"] = number(
        flag, value
    )


def epochs(flag: str, value: str, out: Translation) -> None:
    out.edits["total_epochs"] = number(flag, value)
