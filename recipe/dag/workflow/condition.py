"""Conditions: `when` of a node and `until` of a loop. Their form, checks, description and evaluation.

Invariant: pure and total. A well-formed condition has one subject and one test, or joins several conditions; for any
output of the agents it is True or False. A missing subject (a skipped node, a key that was never set, None) fails every
test except `exists: false`.

A new test is a field of `Condition` and an entry in `TESTS`; a new subject is a field and an entry in `SUBJECTS`. The
checks, the description and the renaming of nodes in a sub-workflow follow the entry.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from recipe.dag.core.frozen import Frozen
from recipe.dag.core.problem import KeyPath
from recipe.dag.core.suggestion import listing
from recipe.dag.types.values import look_up, normalized

AGREE_KEY = "answer"
"""The entry that `agree` compares if the condition has no `key`."""


def _scalar(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    raise PydanticCustomError("scalar_type", "expected text, a number, true or false")


Scalar = Annotated[Any, AfterValidator(_scalar)]
"""A value as it is written: 1 is a number, "1" is text."""


class Condition(Frozen):
    """A condition that selects a branch or ends a loop: one subject (node, env or sample) with one test, or one of
    agree, phase, all_of, any_of and none_of, which need no test. A missing subject (a skipped node, a key that was
    never set) fails every test except `exists: false`."""

    node: str | None = None
    """The latest result of this rollout, vote or compute node: `parsed[key]`, or its text without a key."""
    env: str | None = None
    """The latest `info[key]` of the env that this rollout node steps."""
    sample: str | None = None
    """A dotted path into the sample, such as `extra_info.level`."""
    agree: tuple[str, ...] | None = None
    """Nodes whose results must agree: true if the latest `parsed[key]` of all of them exist and are equal."""
    phase: Literal["training", "validation"] | None = None
    """The purpose of the episode; an evaluation counts as validation."""
    key: str | None = None
    """The entry of the subject; `answer` by default for `agree`."""
    equals: Scalar = None
    """True if the subject has this value."""
    one_of: tuple[Scalar, ...] | None = None
    """True if the subject has one of these values."""
    at_least: float | None = None
    """True if the subject is a number of at least this."""
    at_most: float | None = None
    """True if the subject is a number of at most this."""
    matches: str | None = None
    """A regular expression: true if it matches anywhere in the subject's text."""
    exists: bool | None = None
    """true: the subject must exist. false: it must not."""
    all_of: tuple[Condition, ...] | None = None
    """True if all of these conditions are true."""
    any_of: tuple[Condition, ...] | None = None
    """True if at least one of these conditions is true."""
    none_of: tuple[Condition, ...] | None = None
    """True if none of these conditions is true."""


Mistake = tuple[str | None, str, bool]
"""(key of a condition, None for the whole one; error message; whether it is about the key itself, not its value)."""


class Result(Protocol):
    """The result of a node: a Call or an Output."""

    @property
    def text(self) -> str | None: ...
    @property
    def parsed(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Facts:
    """The state of an episode that conditions ask about. Nodes without a result are absent from the mappings."""

    results: Mapping[str, Result]
    """The latest results by node id."""
    infos: Mapping[str, Mapping[str, Any]]
    """The latest `info` of the env that a node steps, by node id."""
    sample: Mapping[str, Any]
    validate: bool
    """The episode belongs to a validation."""

    def result(self, node: str, key: str | None) -> Any:
        if node not in self.results:
            return None
        return self.results[node].text if key is None else self.results[node].parsed.get(key)


@dataclass(frozen=True, slots=True)
class Test:
    """A test of a subject's value against the condition's option of the same name. `value` is never None."""

    holds: Callable[[Any, Any], bool]
    """(value, option) -> whether the test passes."""
    words: Callable[[Any], str]
    """option -> description of the test."""
    problem: Callable[[Any], str | None] = lambda option: None
    """option -> error message, or None if the option is valid."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The thing asked about. Subjects with `value` need a test; those with `holds` are their own test."""

    words: Callable[[Condition], str]
    value: Callable[[Condition, Facts], Any] | None = None
    holds: Callable[[Condition, Facts], bool] | None = None
    names: Literal["results", "votes", "envs"] | None = None
    """The subject is the id of a node, or a list of ids, and asks about the nodes' results, about how they vote, or
    about the envs that they step."""
    joins: bool = False
    """The subject is a list of conditions."""
    at_least: tuple[int, str] | None = None
    """The least number of entries in the subject's list, and the noun for them."""
    takes_key: bool = False
    problem: Callable[[Condition, Sequence[str]], Mistake | None] = lambda condition, tests: None
    """(condition, its tests in the file's order) -> a mistake that only this subject has."""


def _number(value: Any) -> float:
    """Return a number, or text that contains one, as a float; otherwise NaN, which fails every test."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _literal(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"  # 10.0 as 10
    return f"'{value}'" if isinstance(value, str) else str(value)


def _regex_problem(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        return f"not a regular expression: {error}"
    return None


TESTS: Mapping[str, Test] = {
    "equals": Test(
        holds=lambda value, option: normalized(value) == normalized(option),
        words=lambda option: f"is {_literal(option)}",
    ),
    "one_of": Test(
        holds=lambda value, option: normalized(value) in map(normalized, option),
        words=lambda option: f"is one of {', '.join(map(_literal, option))}",
        problem=lambda option: None if option else "an empty list is never met; add a value",
    ),
    "at_least": Test(
        holds=lambda value, option: _number(value) >= option,
        words=lambda option: f"is at least {option:g}",
    ),
    "at_most": Test(
        holds=lambda value, option: _number(value) <= option,
        words=lambda option: f"is at most {option:g}",
    ),
    "matches": Test(
        holds=lambda value, option: (
            re.search(option, value if isinstance(value, str) else normalized(value)) is not None
        ),
        words=lambda option: f"matches {option}",
        problem=_regex_problem,
    ),
    "exists": Test(
        holds=lambda value, option: option,
        words=lambda option: "exists" if option else "does not exist",
    ),
}


def _agree(condition: Condition, facts: Facts) -> bool:
    answers = [facts.result(name, condition.key or AGREE_KEY) for name in condition.agree or ()]
    return None not in answers and len({normalized(answer) for answer in answers}) == 1


def _agree_words(condition: Condition) -> str:
    *most, last = condition.agree or ("",)
    return f"{', '.join(most)} and {last} agree on {condition.key or AGREE_KEY}"


def _join(key: str, verdict: Callable[[Iterator[bool]], bool]) -> Subject:
    """Return the subject that joins the conditions in its list by `verdict`."""

    def words(condition: Condition) -> str:
        parts = getattr(condition, key)
        joined = (" and " if key == "all_of" else " or ").join(in_words(part, inside=len(parts) > 1) for part in parts)
        return f"not ({joined})" if key == "none_of" else joined

    return Subject(
        words=words,
        holds=lambda condition, facts: verdict(holds(part, facts) for part in getattr(condition, key)),
        joins=True,
        at_least=(1, "condition"),
    )


def _node_problem(condition: Condition, tests: Sequence[str]) -> Mistake | None:
    if condition.key is not None or not tests or tests[0] not in ("at_least", "at_most"):
        return None
    return tests[0], f"`{tests[0]}` needs a number; add `key: name`, the entry of the node's result", True


def _env_problem(condition: Condition, tests: Sequence[str]) -> Mistake | None:
    return None if condition.key is not None else (None, "`env` needs `key: name`, the entry of the env's info", False)


def _sample_problem(condition: Condition, tests: Sequence[str]) -> Mistake | None:
    is_path = all((condition.sample or "").split("."))
    return None if is_path else ("sample", "write a path into the sample, such as `extra_info.level`", False)


SUBJECTS: Mapping[str, Subject] = {
    "node": Subject(
        words=lambda c: f"{c.key} of {c.node}" if c.key is not None else str(c.node),
        value=lambda c, facts: facts.result(c.node or "", c.key),
        names="results",
        takes_key=True,
        problem=_node_problem,
    ),
    "env": Subject(
        words=lambda c: f"{c.key} of {c.env}'s env",
        value=lambda c, facts: facts.infos.get(c.env or "", {}).get(c.key or ""),
        names="envs",
        takes_key=True,
        problem=_env_problem,
    ),
    "sample": Subject(
        words=lambda c: f"the sample's {c.sample}",
        value=lambda c, facts: look_up(facts.sample, c.sample or ""),
        problem=_sample_problem,
    ),
    "agree": Subject(words=_agree_words, holds=_agree, names="votes", at_least=(2, "nodes"), takes_key=True),
    "phase": Subject(
        words=lambda c: f"in {c.phase}",
        holds=lambda c, facts: c.phase == ("validation" if facts.validate else "training"),
    ),
    "all_of": _join("all_of", all),
    "any_of": _join("any_of", any),
    "none_of": _join("none_of", lambda verdicts: not any(verdicts)),
}
JOINS = tuple(key for key, subject in SUBJECTS.items() if subject.joins)


def holds(condition: Condition, facts: Facts) -> bool:
    key, subject = _subject_of(condition)
    if subject.holds is not None:
        return subject.holds(condition, facts)
    assert subject.value is not None, key
    value = subject.value(condition, facts)
    tests = [(test, option) for name, test in TESTS.items() if (option := getattr(condition, name)) is not None]
    if value is None:
        return condition.exists is False and len(tests) == 1
    return all(test.holds(value, option) for test, option in tests)


def _subject_of(condition: Condition) -> tuple[str, Subject]:
    """Return the key and the subject of a well-formed condition."""
    return next((key, subject) for key, subject in SUBJECTS.items() if getattr(condition, key) is not None)


def in_words(condition: Condition, *, inside: bool = False) -> str:
    """Describe a condition in words, for plans and figures: in brackets if it joins others `inside` another. Equal
    conditions give equal words."""
    key, subject = _subject_of(condition)
    text = subject.words(condition)
    if subject.holds is None:
        option, test = next((getattr(condition, n), TESTS[n]) for n in TESTS if getattr(condition, n) is not None)
        return f"{text} {test.words(option)}"
    needs_brackets = inside and key in ("all_of", "any_of") and len(getattr(condition, key)) > 1
    return f"({text})" if needs_brackets else text


def parts(condition: Condition, path: KeyPath) -> Iterator[tuple[KeyPath, Condition]]:
    """Yield the condition and all conditions inside it, each with its path."""
    yield path, condition
    for join in JOINS:
        for index, inner in enumerate(getattr(condition, join) or ()):
            yield from parts(inner, (*path, join, index))


def asked_nodes(condition: Condition, path: KeyPath) -> Iterator[tuple[KeyPath, str, Subject]]:
    """Yield (path, id, subject) of each node that this condition asks about, without those of conditions inside it."""
    for key, subject in SUBJECTS.items():
        names = getattr(condition, key) if subject.names else None
        if isinstance(names, str):
            yield (*path, key), names, subject
        for index, name in enumerate(names if isinstance(names, tuple) else ()):
            yield (*path, key, index), name, subject


def form_problems(condition: Condition, subjects: list[str], tests: list[str]) -> Iterator[Mistake]:
    """Yield the mistakes in the form of a condition. `subjects` and `tests`: its keys that are set, in the file's
    order; at least one subject."""
    name, subject = subjects[0], SUBJECTS[subjects[0]]
    for other in subjects[1:]:
        yield other, f"a condition has one subject, here `{name}`; join two with `all_of`", True
    if subject.holds is not None:
        for test in tests:
            yield test, f"`{name}` needs no test; remove it", True
    else:
        for test in tests[1:]:
            yield test, f"a condition has one test, here `{tests[0]}`; join two with `all_of`", True
    if subject.at_least is not None and len(getattr(condition, name)) < subject.at_least[0]:
        yield name, f"`{name}` needs at least {subject.at_least[0]} {subject.at_least[1]}", False
    if condition.key is not None and not subject.takes_key:
        yield "key", f"`key` has no effect next to `{name}`; remove it", True
    if (mistake := subject.problem(condition, tests)) is not None:
        yield mistake
    for test in tests:
        if (message := TESTS[test].problem(getattr(condition, test))) is not None:
            yield test, message, False


def needs_a_test(subject: str) -> str | None:
    """Return the error message for a condition with this subject and no test, or None if the subject needs no test."""
    return None if SUBJECTS[subject].holds is not None else f"`{subject}` needs a test: one of {listing(TESTS)}"


def renamed_condition(value: Any, rename: Callable[[Any], Any]) -> Any:
    """Return a condition that has not been checked yet with its nodes renamed. `rename`: of a node's id, or of a list
    of ids."""
    if not isinstance(value, dict):
        return value
    new = dict(value)
    for key in SUBJECTS.keys() & new.keys():
        if SUBJECTS[key].names:
            new[key] = rename(new[key])
        elif SUBJECTS[key].joins and isinstance(new[key], list):
            new[key] = [renamed_condition(item, rename) for item in new[key]]
    return new
