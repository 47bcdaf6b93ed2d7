"""The catalogue of reward nodes, read from the source of the engine's reward functions.

Invariant: no reward function is imported, so that checks are fast. A function is listed if and only if it is decorated
with `Catalogued`; its options are its keyword-only parameters.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from recipe.dag.types import convention
from recipe.dag.types.convention import Convention
from recipe.dag.types.reward import Catalogued

ENGINE = Path(__file__).resolve().parents[1]
REQUIRED = object()
"""The default of an option that must be given."""
SHAPED = "reward.credit:shaped"
"""The function whose option `shaping` selects one of `shapings()`, which the catalogue lists in its place."""


class OptionKind(StrEnum):
    """The types that options are annotated with; those of nodes and agents are in types/reward.py."""

    FLOAT = "float"
    INT = "int"
    TEXT = "str"
    FLAG = "bool"
    SCALAR = "Scalar"
    CHOICE = "Literal"
    NODE = "NodeName"
    NODES = "NodeNames"
    PLAYERS = "Players"
    AGENT = "AgentName"
    AGENTS = "AgentNames"
    FUNCTION = "Callable"
    """`file.py:function`, annotated with the name of its entry in types/convention.py."""


@dataclass(frozen=True)
class RewardOption:
    """The values that an option of a reward node may have."""

    kind: OptionKind
    default: Any
    low: float = -math.inf
    """Least value of a number; least length of a list of nodes or players."""
    high: float = math.inf
    choices: tuple[str, ...] = ()
    convention: Convention | None = None
    """How a function is called."""


@dataclass(frozen=True)
class RewardEntry:
    where: str
    """The function, as module:name under recipe.dag."""
    traits: Catalogued
    takes: Mapping[str, RewardOption]
    """The options of the function."""
    of_group: bool
    """Compares all episodes of a sample: its node needs `scope: group`."""

    @property
    def name(self) -> str:
        return self.where.partition(":")[2]

    @property
    def shaping(self) -> bool:
        """Whether `shaped` calls the function, and not the reward node itself."""
        return self.where.startswith("credit.")


def read_entry(where: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> RewardEntry | None:
    """Return the entry of a function of the engine; None if it is not catalogued."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == Catalogued.__name__:
            traits = Catalogued(*map(ast.literal_eval, decorator.args), **_keywords(decorator))
            parameters = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
            takes = {parameter.arg: _option(parameter.annotation, default) for parameter, default in parameters}
            return RewardEntry(where, traits, takes, of_group=function.args.args[0].arg == "episodes")
    return None


@cache
def entries(module: str) -> Mapping[str, RewardEntry]:
    """Return name -> entry of the catalogued functions of a module under recipe.dag."""
    body = ast.parse((ENGINE / f"{module.replace('.', '/')}.py").read_bytes()).body
    functions = (statement for statement in body if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef))
    declarations = (read_entry(f"{module}:{function.name}", function) for function in functions)
    return {entry.name: entry for entry in declarations if entry is not None}


def shapings() -> Mapping[str, RewardEntry]:
    return entries("credit.shaping")


def chosen_shaping(options: Mapping[str, Any]) -> RewardEntry | None:
    """Return the entry of the shaping that these options of `shaped` select; None if there is no such shaping."""
    return shapings().get(str(options.get("shaping")))


def reward_nodes() -> list[RewardEntry]:
    """Return the entries of the functions that a reward node may name, and of the shapings in place of `shaped`."""
    modules = [f"reward.{file.stem}" for file in sorted((ENGINE / "reward").glob("*.py"))]
    named = [entry for module in modules for entry in entries(module).values() if entry.where != SHAPED]
    return [*named, *shapings().values()]


def _option(annotation: ast.expr | None, default: ast.expr | None) -> RewardOption:
    """Return what a parameter says about its option. Raises ValueError for a type that OptionKind lacks."""
    value = REQUIRED if default is None else ast.literal_eval(default)
    match annotation:
        case ast.BinOp(left=type_, right=ast.Constant(value=None)):
            return _option(type_, default)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return RewardOption(OptionKind.CHOICE, value, choices=ast.literal_eval(choices))
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[type_, ast.Call() as field])):
            bounds = _keywords(field)
            low, high = bounds.get("ge", bounds.get("min_length", -math.inf)), bounds.get("le", math.inf)
            return replace(_option(type_, default), low=low, high=high)
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[_, ast.Name(id=name)])):
            return RewardOption(OptionKind.FUNCTION, value, convention=getattr(convention, name))
        case ast.Name(id="ShapingName"):
            return RewardOption(OptionKind.CHOICE, value, choices=tuple(shapings()))
        case ast.Name(id=name):
            return RewardOption(OptionKind(name), value)
    raise ValueError(f"an option of a catalogued reward function has the type {annotation and ast.unparse(annotation)}")


def _keywords(call: ast.Call) -> dict[str, Any]:
    return {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg is not None}
