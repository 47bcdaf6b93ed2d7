"""The base of everything that is parsed from a workflow, and the marks of its fields.

Invariant: an object does not change after it was checked, and an unknown key is an error. The value of a field without
a mark decides what is learned, so a new field counts when a run resumes.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from recipe.dag.core.paths import names_env, names_function


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Mark(Enum):
    """What a field is to the comparison of two runs, as in `Annotated[int, Mark.UNLEARNED]`."""

    UNLEARNED = "does not decide what is learned, or follows from what does"
    CONTENT = "names a model or a folder, whose content is compared in its place"
    CODE = "names code, as `file.py:Name`; compared are its place in the project and the content of its files"
    CODE_OR_NAME = "names code, or a part of the same file"


M = TypeVar("M", bound=BaseModel)


def marked(model: type[BaseModel], mark: Mark) -> list[str]:
    """Return the names of the model's fields with this mark."""
    return [name for name, field in model.model_fields.items() if mark in field.metadata]


def with_code(model: M, replace: Callable[[str], str]) -> M:
    """Return the model with `replace(ref)` in place of each reference to code, those of nested models included."""
    update = {}
    for name, value in model:
        marks = type(model).model_fields[name].metadata
        if Mark.CODE in marks:
            new = _each(value, replace)
        elif Mark.CODE_OR_NAME in marks:
            new = _each(value, lambda ref: ref if names_env(ref) else replace(ref))
        else:
            new = _each(value, replace, nested=True)
        if new != value:
            update[name] = new
    return model.model_copy(update=update) if update else model


def _each(value: Any, replace: Callable[[str], str], *, nested: bool = False) -> Any:
    """Return the value of a field with its references replaced; `nested`: only those in models that it holds."""
    if isinstance(value, BaseModel):
        return with_code(value, replace)
    if isinstance(value, tuple):
        return tuple(_each(item, replace, nested=nested) for item in value)
    if isinstance(value, dict):  # models by name, or keyword arguments of which some name functions
        return {key: _each(item, replace, nested=nested or not names_function(item)) for key, item in value.items()}
    return replace(value) if isinstance(value, str) and not nested else value
