"""What decides which nodes run, how often, and what they agreed on: conditions, loops, votes.

Invariant: as in `schema`, which offers all of them under its own name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from recipe.dag.workflow.blocks import Frozen


def _scalar(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    raise PydanticCustomError("scalar_type", "expected text, a number, true or false")


Scalar = Annotated[Any, AfterValidator(_scalar)]
"""As written: 1 is a number, "1" is text."""


class Condition(Frozen):
    """What decides a branch or ends a loop. One subject (node, env or sample) with one test, or one of agree, phase,
    all_of, any_of, none_of, which need none. A subject that is not there (a node that was skipped, a key that nobody
    set) fails every test but `exists: false`."""

    node: str | None = None
    """The latest result of this rollout, vote or compute node: `parsed[key]`, or its text without a key."""
    env: str | None = None
    """The latest `info[key]` of the env that this rollout node steps."""
    sample: str | None = None
    """A dotted path into the sample: `extra_info.level`."""
    agree: tuple[str, ...] | None = None
    """These nodes' latest `parsed[key]` are there and all equal."""
    phase: Literal["training", "validation"] | None = None
    """What the episode is for; an evaluation counts as validation."""
    key: str | None = None
    """For `agree`, `answer` where absent."""
    equals: Scalar = None
    one_of: tuple[Scalar, ...] | None = None
    at_least: float | None = None
    at_most: float | None = None
    matches: str | None = None
    """A regular expression, searched for in the text."""
    exists: bool | None = None
    all_of: tuple[Condition, ...] | None = None
    any_of: tuple[Condition, ...] | None = None
    none_of: tuple[Condition, ...] | None = None


class Loop(Frozen):
    """Rollout nodes that run again, all of them, round after round inside one turn. In a round they see the round
    before; who depends on one of them waits for the last round. A round that ends the episode, or in which all were
    skipped, is the last."""

    nodes: tuple[str, ...]
    max_rounds: int = Field(ge=1)
    until: Condition | None = None
    """Checked after every round."""


class Vote(Frozen):
    """A VOTE node takes the most frequent `parsed[key]` of its dependencies. Its result is
    `parsed = {key: winner, share: 0..1, votes: {...}}`."""

    key: str = "answer"
    ties: Literal["first", "none"] = "first"
    """first: the one that was named first, in the order of `dependencies`. none: there is no winner."""
