"""How the engine calls the code of users: one entry for each function and method that it calls.

Invariant: the checks of a workflow file, which read the code and never run it, and the loaders of a run take the
arguments of every call from here, and find with the same `misfits` whether code can be called so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from pathlib import Path
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.core.problem import KeyPath
from recipe.dag.core.suggestion import hint_at, listing
from recipe.dag.core.user_code import load_object


@dataclass(frozen=True, slots=True)
class Convention:
    """The call of a function or method. Options that a workflow sets for it are passed by name besides."""

    arguments: tuple[str, ...] = ()
    """Passed by position."""
    any_order: bool = False
    """A function whose parameters have the names of `arguments` gets them by name."""
    optional: frozenset[str] = frozenset()
    """Passed by name, to functions that have a parameter of this name."""
    spread: frozenset[str] = frozenset()
    """Those of `optional` that a function with **kwargs gets, too."""
    required: bool = True
    """A class must define the method."""
    coroutine: bool = False
    """The method must be `async def`."""

    def misfits(self, parameters: Sequence[Parameter], options: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
        """Yield (option or "", error message) for each reason why the call fails. `parameters`: without self."""
        arguments, optional = self.arguments, self.optional
        if self.by_name(parameters):
            arguments, optional = (), optional.union(arguments)
        yield from _misfits(parameters, arguments, list(options), optional)

    def by_name(self, parameters: Sequence[Parameter]) -> bool:
        """Return whether `arguments` are passed by name."""
        return self.any_order and not any(_misfits(parameters, (), self.arguments, self.optional))

    def taken(self, parameters: Sequence[Parameter]) -> frozenset[str]:
        """Return the arguments of `optional` that are passed."""
        spread = self.spread if any(p.kind is Parameter.VAR_KEYWORD for p in parameters) else frozenset()
        return spread | self.optional.intersection(p.name for p in parameters)

    def load(self, ref: str, base: str | Path, where: str, options: Iterable[str] = ()) -> Callable[..., Any]:
        """Return the function that `ref` names. Raises UserError, which starts with `where`, if it names none, or one
        that cannot be called with these options."""
        function = load_object(ref, base)
        if not callable(function):
            raise UserError(f"{where}: {ref} is not a function; write file.py:function")
        self.check(function, f"{where}: {ref}", options)
        return function

    def check(self, function: Callable[..., Any], where: str, options: Iterable[str] = ()) -> None:
        """Raise UserError if the call fails."""
        # not what a decorator wraps: it may pass further arguments
        for _, message in self.misfits(parameters_of(function, follow_wrapped=False), options):
            raise UserError(f"{where} {message}")


@dataclass(frozen=True, slots=True)
class Reference:
    """Code that a workflow names."""

    ref: str
    """`file.py:name`"""
    at: KeyPath
    """Where it is written."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to it by name."""
    options_at: KeyPath = ()


_CONTEXT = frozenset({"context"})
HOOKS = {"prompt": Convention(("context",)), "parse": Convention(("context",))}
TOKEN_HOOKS = {
    "pre_process": Convention(("tokenizer", "prompt_ids", "obs"), optional=_CONTEXT, spread=_CONTEXT),
    "post_process": Convention(("tokenizer", "prompt_ids", "response_ids"), optional=_CONTEXT, spread=_CONTEXT),
}
ENV = {
    "step": Convention(("actions", "ground_truth"), any_order=True, optional=frozenset({"agents", "agent"})),
    "reset": Convention(
        optional=frozenset({"sample", "seed", "sandbox", "agents"}),
        spread=frozenset({"sample", "seed"}),
        required=False,
    ),
}
TOOL = {
    "execute": Convention(("arguments", "state"), coroutine=True),
    "close": Convention(required=False, coroutine=True),
}
CONSTRUCTOR = Convention()
"""Of a class of the user, before its methods are called."""
COMPUTE = Convention(("context",))
"""Also the function that scores a candidate."""
REWARD = {"episode": Convention(("episode",)), "group": Convention(("episodes",))}
"""By the scope of the node."""
COMPARE = Convention(("first", "second"))
"""Of two episodes."""
SCRIPT = Convention(("messages",))
ESTIMATOR = Convention(("batch",))
METRICS = Convention(("policies", "state"))

_ANY = (Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD))
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def form_of(defines: Callable[[str], bool]) -> Mapping[str, Convention]:
    """Return the form of the hooks of a file or class by the names that it `defines`: token-level if it has one of
    those, since a helper may be called parse."""
    return TOKEN_HOOKS if any(map(defines, TOKEN_HOOKS)) else HOOKS


def parameters_of(function: Callable[..., Any], *, follow_wrapped: bool = True) -> tuple[Parameter, ...]:
    """Return the parameters of a function or bound method; any if Python does not know them."""
    try:
        return tuple(inspect.signature(function, follow_wrapped=follow_wrapped).parameters.values())
    except (TypeError, ValueError):
        return _ANY


def method_parameters(cls: type, name: str) -> tuple[Parameter, ...]:
    """Return the parameters of a method without self."""
    parameters = parameters_of(getattr(cls, name))
    is_bound = isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)
    return parameters if is_bound else without_self(parameters)


def without_self(parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    return tuple(parameters[1:] if parameters and parameters[0].kind in _POSITIONAL else parameters)


def _misfits(
    parameters: Sequence[Parameter], arguments: Sequence[str], names: Collection[str], optional: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield the mistakes of a call with `arguments` by position and `names` by name, and with those of `optional` that
    the function takes."""
    kinds = {parameter.kind for parameter in parameters}
    positional = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
    if len(positional) < len(arguments) and Parameter.VAR_POSITIONAL not in kinds:
        takes = listing(parameter.name for parameter in positional) or "none"
        yield "", f"must take the positional arguments {listing(arguments)}, takes {takes}"
        return
    leading = positional[: len(arguments)]
    later = [*positional[len(arguments) :], *(p for p in parameters if p.kind is Parameter.KEYWORD_ONLY)]
    required = {parameter.name for parameter in later if parameter.default is Parameter.empty}
    for name in sorted(required - {*names, *optional}):
        yield "", f"needs the argument `{name}`, which is not passed"
    given = [parameter.name for parameter in leading if parameter.kind is not Parameter.POSITIONAL_ONLY]
    by_name = [parameter.name for parameter in later if parameter.kind is not Parameter.POSITIONAL_ONLY]
    for name in names:
        if name in optional or name in given:
            yield name, f"`{name}` is already given by the engine; use another name"
        elif name not in by_name and Parameter.VAR_KEYWORD not in kinds:
            yield name, f"takes no `{name}`{hint_at(name, by_name) or '; add it, or **kwargs'}"
