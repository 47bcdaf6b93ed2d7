"""Conversion of plain data to a schema object (an agent, a policy, a node ...), with a message for every mistake.

Invariant: a piece that is returned is valid. If it is valid without the mistakes (an unknown key, an invalid optional
value), it is built without them, so that later checks report further mistakes in the same run.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.algorithms.catalogue import DEFAULT, OWN, REMOVED, SELECTABLE, algorithm_class, readers
from recipe.dag.algorithms.mixer import Mixer
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import closest, did_you_mean, hint_at, listing
from recipe.dag.workflow.agent_schema import Agent, Lora, ToolSpec
from recipe.dag.workflow.node import Node
from recipe.dag.workflow.source import Source

Piece = TypeVar("Piece", bound=BaseModel)

INSTEAD = {
    **{
        (ToolSpec, key): "write `description` and `parameters`; the name stays that of the tool's own schema"
        for key in ("schema", "tool_schema")
    },
    **{(ToolSpec, key): "write `workers`" for key in ("num_workers", "max_concurrent", "max_concurrent_sandbox")},
    **{(ToolSpec, key): "write `calls_per_second`" for key in ("rate", "rate_limit", "enable_global_rate_limit")},
    **{
        (Agent, key): "write `chat_template_kwargs: {enable_thinking: true}`, for templates that read it"
        for key in ("enable_thinking", "is_reasoning_model")
    },
    (ToolSpec, "memory_limit_mb"): "write `memory_mb`",
    (ToolSpec, "default_timeout"): "write `timeout_s`",
    (ToolSpec, "class_name"): "write `path: file.py:Class`",
    (Lora, "from"): "write `path`",
    **{(Lora, key): "write `rank`" for key in ("r", "lora_rank")},
    (Lora, "lora_alpha"): "write `alpha`",
    (Lora, "target_modules"): "write `targets`",
    (Node, "filter_plugin"): "nodes have no filters; remove it (`algorithm.drop_zero_variance: true` drops groups)",
    (Node, "retry_limit"): "nodes are not retried one by one; remove it (`episode.retries` repeats the episode)",
    (Node, "train_cycle"): "this belongs to the policy; move it to `policies.<name>.train_cycle`",
    (Mixer, "mixing_hidden"): "`vdn` has no mixing network, only qmix does; remove it",
    (Node, "share_instance"): "this belongs to the critic; write `policies.<name>.critic: {share: <policy>}`",
}
"""Error messages for keys that users know from other systems or that belong to another block."""


def parse_piece(
    model: type[Piece], data: Any, source: Source, path: KeyPath, *, essential: frozenset[str] = frozenset()
) -> tuple[Piece | None, list[Problem]]:
    """Return the piece at `path` and its problems. The piece is None if it is not valid without the mistakes, or if a
    field in `essential` is invalid."""
    problems: list[Problem] = []
    data = copy.deepcopy(data)
    removed: set[tuple] = set()
    # Each round removes the mistakes of the round before. A misspelt key moves to the key that was meant, where its
    # value may turn out to be invalid in the next round.
    for _ in range(4):
        try:
            # JSON mode is strict about types (no "0.8" for 0.8, no true for 1), but reads lists as tuples.
            return model.model_validate_json(json.dumps(data), strict=True), problems
        except ValidationError as error:
            details = error.errors(include_url=False)
        moved = {_intended(model, detail) for detail in details}
        details = [d for d in details if not (d["type"] == "missing" and d["loc"] in moved | removed)]
        problems += [_problem(model, detail, source, path) for detail in details]
        if not all(_recoverable(detail, essential) for detail in details):
            return None, problems
        removed |= {_remove(model, data, detail) for detail in details}
        if not details:
            break
    return None, problems


def _recoverable(detail: ErrorDetails, essential: frozenset[str]) -> bool:
    """Return whether the piece may be valid without the invalid value."""
    loc = detail["loc"]
    return bool(loc) and detail["type"] != "missing" and loc[0] not in essential


def _problem(model: type[BaseModel], detail: ErrorDetails, source: Source, path: KeyPath) -> Problem:
    loc, kind = detail["loc"], detail["type"]
    full_path = (*path, *loc)
    if kind == "extra_forbidden":
        owner = _model_at(model, loc[:-1])
        message = INSTEAD.get((owner, loc[-1])) or _unread(owner, str(loc[-1]), source)
        message = message or f"unknown key{did_you_mean(str(loc[-1]), owner.model_fields)}"
        return source.problem(full_path, message, key=True)
    if kind == "missing":
        if full_path[-1] == "id":
            return source.problem(full_path, "missing; give the node an `id`")
        return source.problem(full_path, "missing; this key is required")
    return source.problem(full_path, _words(detail))


def parse_algorithm(data: Any, source: Source, path: KeyPath) -> tuple[Algorithm | None, list[Problem]]:
    """Return the block `algorithm` as an object of its estimator's class, and its problems. If the estimator does not
    exist, options that only some estimators read are left out, as they cannot be checked."""
    estimator = data.get("estimator", DEFAULT().estimator) if isinstance(data, dict) else None
    model = algorithm_class(estimator)
    if model is not None or not isinstance(data, dict):
        return parse_piece(model or DEFAULT, data, source, path)
    if isinstance(estimator, str) and estimator in REMOVED:
        message = f"there is no `{estimator}`: {REMOVED[estimator]}"
    else:
        message = choice(estimator, [*SELECTABLE, OWN])
    common = {key: value for key, value in data.items() if key != "estimator" and not readers(key)}
    piece, problems = parse_piece(DEFAULT, common, source, path)
    return piece, [source.problem((*path, "estimator"), message), *problems]


def _unread(owner: type[BaseModel], key: str, source: Source) -> str | None:
    """Return the error message for an option that only other estimators read, or None."""
    if not issubclass(owner, Algorithm) or not (names := readers(key)):
        return None
    estimator = source.data["algorithm"].get("estimator", DEFAULT().estimator)
    return f"estimator `{estimator}` does not use this option (only {', '.join(names)}); remove it"


def choice(value: Any, options: Sequence[str]) -> str:
    """Return the error message for a value that is none of `options`."""
    hint = hint_at(value, options) if isinstance(value, str) else ""
    return f"expected one of {listing(options)}, got {show_value(value)}{hint}"


def _words(detail: ErrorDetails) -> str:
    """Return pydantic's error in the words of this project."""
    kind, context, value = detail["type"], detail.get("ctx", {}), detail.get("input")
    if kind == "held":
        return detail["msg"]
    if kind == "string_too_short" and not value:
        return "must not be empty"
    expected = {
        "string_type": "text",
        "bool_type": "true or false",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "dict_type": "a mapping",
        "model_type": "a mapping",
        "model_attributes_type": "a mapping",
        "tuple_type": "a list",
        "greater_than": "a number above {gt}",
        "greater_than_equal": "a number of at least {ge}",
        "less_than": "a number below {lt}",
        "less_than_equal": "a number of at most {le}",
    }.get(kind)
    if expected is not None:
        limits = {key: f"{limit:g}" for key, limit in context.items() if key in ("gt", "ge", "lt", "le")}
        return f"expected {expected.format(**limits)}, got {show_value(value)}"
    if kind in ("enum", "literal_error"):
        options = [option.strip("' ") for option in context["expected"].replace(" or ", ", ").split(",")]
        return choice(value, options)
    return f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, got {show_value(value)}"


def show_value(value: Any) -> str:
    """Return a value as the user wrote it, shortened, for an error message."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _remove(model: type[BaseModel], data: Any, detail: ErrorDetails) -> tuple:
    """Remove the invalid key, or the list that contains it, and return its path. The value of a misspelt key moves to
    the key that was meant."""
    loc = detail["loc"]
    depth = 0
    while depth < len(loc) - 1 and isinstance(data.get(loc[depth]), dict):
        data, depth = data[loc[depth]], depth + 1
    value = data.pop(loc[depth], None)
    intended = _intended(model, detail)
    if intended is not None and depth == len(loc) - 1:  # not inside a list, which is removed completely
        data.setdefault(intended[-1], value)
    return loc[: depth + 1]


def _intended(model: type[BaseModel], detail: ErrorDetails) -> tuple | None:
    """Return the path of the key that a misspelt key was meant to be, or None."""
    if detail["type"] != "extra_forbidden":
        return None
    *parents, last = detail["loc"]
    owner = _model_at(model, tuple(parents))
    explained = (owner, last) in INSTEAD or (issubclass(owner, Algorithm) and readers(str(last)))
    intended = None if explained else closest(str(last), owner.model_fields)
    return None if intended is None else (*parents, intended)


def _model_at(model: type[BaseModel], loc: tuple) -> type[BaseModel]:
    """Return the model of the field at `loc`; `Agent | None` and `tuple[Agent, ...]` count as `Agent`."""
    for part in loc:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        model = next(_models(field.annotation), model) if field is not None else model
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
