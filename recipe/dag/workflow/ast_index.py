"""The definitions of a Python file, read from its syntax tree.

Invariant: the file is never run. Definitions that the tree does not contain (imported names, decorated functions, base
classes of other files) are `OPAQUE` and pass every check.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from recipe.dag.core.suggestion import closest, listing


class Opaque(Enum):
    OPAQUE = "opaque"


OPAQUE = Opaque.OPAQUE
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef | Opaque
_TRANSPARENT = ("staticmethod", "classmethod", "Catalogued")
"""Decorators that leave a function's signature as it is."""


@dataclass(frozen=True, slots=True)
class Outline:
    names: dict[str, Definition]
    imports: dict[str, str]
    """Imported names, `from module import thing as name`: name -> `module:thing`."""
    open: bool
    """The file contains `from x import *`, so any other name may exist."""

    def find(self, name: str) -> Definition | None:
        """Return the definition of `function`, `Class` or `Class.method`, or None."""
        first, *rest = name.split(".")
        definition = self.names.get(first, OPAQUE if self.open else None)
        for part in rest:
            if isinstance(definition, ast.ClassDef):
                definition = self.method(definition, part)
            else:
                definition = definition and OPAQUE
        return definition

    def method(self, owner: ast.ClassDef, name: str, seen: frozenset[str] = frozenset()) -> Function | Opaque | None:
        """Return a method of the class or of its bases in this file, OPAQUE if a base is in another file, or None."""
        body = _names(owner.body)
        if name in body:
            definition = body[name]
            return OPAQUE if isinstance(definition, ast.ClassDef) else definition
        inherited: Opaque | None = None
        for base in self._bases(owner):
            if base is OPAQUE:
                inherited = OPAQUE
            elif base.name not in seen and (method := self.method(base, name, seen | {owner.name})) is not None:
                return method
        return inherited

    def decorated(self, owner: ast.ClassDef, seen: frozenset[str] = frozenset()) -> bool:
        """Return whether the class or a base has a decorator or a metaclass, which may add methods."""
        if owner.decorator_list or owner.keywords:
            return True
        bases = [base for base in self._bases(owner) if base is not OPAQUE and base.name not in seen]
        return any(self.decorated(base, seen | {owner.name}) for base in bases)

    def _bases(self, owner: ast.ClassDef) -> Iterator[ast.ClassDef | Opaque]:
        """Yield the bases defined in the same file, and OPAQUE for each other base that may add methods."""
        for base in owner.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name) and base.id in ("object", "Protocol", "Generic", "ABC"):
                continue
            definition = self.names.get(base.id, OPAQUE) if isinstance(base, ast.Name) else OPAQUE
            yield definition if isinstance(definition, ast.ClassDef) else OPAQUE


@dataclass(frozen=True, slots=True)
class Signature:
    positional: tuple[str, ...]
    """Names of the positional parameters, without self."""
    positional_only: int
    defaults: int
    """The number of `positional`, from the right, that have a default."""
    varargs: bool
    keywords: dict[str, bool]
    """Keyword-only names -> whether they are required."""
    kwargs: bool
    generator: bool = False

    def misfits(
        self, arguments: tuple[str, ...], keywords: Iterable[str], optional: frozenset[str]
    ) -> Iterator[tuple[str, str]]:
        """Yield (keyword or "", error message) for a call with positional `arguments` and `keywords`. Arguments in
        `optional` are passed only to functions that take them."""
        keywords = list(keywords)
        if not self.varargs and len(self.positional) < len(arguments):
            takes = listing(self.positional) or "none"
            yield "", f"must take the positional arguments {listing(arguments)}, takes {takes}"
            return
        later = self.positional[len(arguments) :]
        required = {name for name in later[: max(0, len(later) - self.defaults)]}
        required |= {name for name, must in self.keywords.items() if must}
        for name in sorted(required - set(keywords) - optional):
            yield "", f"needs the argument `{name}`, which is not passed"
        by_name = {*self.positional[max(self.positional_only, len(arguments)) :], *self.keywords}
        for name in keywords:
            if name in optional or name in self.positional[self.positional_only : len(arguments)]:
                yield name, f"`{name}` is already given by the engine; use another name"
            elif name not in by_name and not self.kwargs:
                suggestion = closest(name, by_name)
                hint = f"; did you mean `{suggestion}`?" if suggestion else "; add it, or **kwargs"
                yield name, f"takes no `{name}`{hint}"


def read_outline(path: Path) -> Outline:
    """Read the outline of a file. Raises SyntaxError or ValueError (null bytes, bad encoding) with the interpreter's
    message."""
    body = ast.parse(path.read_bytes(), filename=str(path)).body
    names = _names(body)
    imports = {
        alias.asname or alias.name: f"{statement.module}:{alias.name}"
        for statement in _statements(body)
        if isinstance(statement, ast.ImportFrom) and statement.module and statement.level == 0
        for alias in statement.names
    }
    return Outline(names, imports, open="*" in names)


def signature(function: Function | Opaque, *, method: bool) -> Signature | Opaque:
    """Return the function's signature, without self if it is a method; OPAQUE if a decorator may change it."""
    if function is OPAQUE:
        return OPAQUE
    calls = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    decorators = [d.id if isinstance(d, ast.Name) else "" for d in calls]
    if any(d not in _TRANSPARENT for d in decorators):
        return OPAQUE
    arguments = function.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    only = len(arguments.posonlyargs)
    if method and "staticmethod" not in decorators and positional:
        positional, only = positional[1:], max(0, only - 1)
    keywords = {a.arg: default is None for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}
    return Signature(
        positional=tuple(positional),
        positional_only=only,
        defaults=min(len(arguments.defaults), len(positional)),
        varargs=arguments.vararg is not None,
        keywords=keywords,
        kwargs=arguments.kwarg is not None,
        generator=_yields(function.body),
    )


def _yields(body: list[ast.stmt]) -> bool:
    """Return whether a function with this body is a generator; functions defined inside it do not count."""
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            pending += ast.iter_child_nodes(node)
    return False


def _names(body: list[ast.stmt]) -> dict[str, Definition]:
    """Return the names that the statements define, and `*` if there is a star import."""
    names: dict[str, Definition] = {}
    for statement in _statements(body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[statement.name] = statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0]: OPAQUE for alias in statement.names}
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            # `function.attribute = value` defines no name
            stored = (n for target in targets for n in ast.walk(target) if isinstance(getattr(n, "ctx", 0), ast.Store))
            names |= {n.id: OPAQUE for n in stored if isinstance(n, ast.Name)}
    return names


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements, including those under if, try, with and for, but not those inside functions and classes."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for block in (getattr(statement, part, []) for part in ("body", "orelse", "finalbody", "handlers")):
                yield from _statements(block)


def short_returns(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, int]]:
    """Yield (line, number of values) of each `return` of a tuple that is written out and is not 3 or 4 values long."""
    inner: list[ast.AST] = list(function.body)
    while inner:
        node = inner.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            values = node.value.elts
            if len(values) not in (3, 4) and not any(isinstance(value, ast.Starred) for value in values):
                yield node.lineno, len(values)
        inner.extend(ast.iter_child_nodes(node))
