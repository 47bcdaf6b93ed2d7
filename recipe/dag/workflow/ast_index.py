"""The definitions of a Python file, read from its syntax tree.

Invariant: the file is never run. Definitions that the tree does not contain (imported names, decorated functions, base
classes of other files) are `OPAQUE` and pass every check.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from inspect import Parameter
from pathlib import Path

from recipe.dag.types.convention import without_self


class Opaque(Enum):
    OPAQUE = "opaque"


OPAQUE = Opaque.OPAQUE
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef | Opaque
_TRANSPARENT = ("staticmethod", "classmethod", "Catalogued")
"""Decorators that leave a function's signature as it is."""
_EMPTY = ("object", "Protocol", "Generic", "ABC", "BaseModel", "Frozen")
"""Base classes that add no method and no option."""


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

    def method(self, owner: ast.ClassDef, name: str) -> Function | Opaque | None:
        """Return a method of the class or of its bases in this file, OPAQUE if a base is in another file, or None."""
        lineage = list(self._lineage(owner))
        for code in lineage:
            if code is not OPAQUE and (definition := _names(code.body).get(name)) is not None:
                return OPAQUE if isinstance(definition, ast.ClassDef) else definition
        return OPAQUE if OPAQUE in lineage else None

    def decorated(self, owner: ast.ClassDef) -> bool:
        """Return whether the class or a base has a decorator or a metaclass, which may add methods."""
        return any(code is not OPAQUE and (code.decorator_list or code.keywords) for code in self._lineage(owner))

    def options(self, owner: ast.ClassDef) -> tuple[Parameter, ...] | None:
        """Return the fields of the class `Options` of a hook class, as keyword parameters; None if it has none."""
        for code in self._lineage(owner):
            if code is not OPAQUE and isinstance(model := _names(code.body).get("Options"), ast.ClassDef):
                return tuple(field for part in self._lineage(model) for field in _fields(part))
        return None

    def _lineage(self, owner: ast.ClassDef, seen: frozenset[str] = frozenset()) -> Iterator[ast.ClassDef | Opaque]:
        """Yield the class and its bases that are defined in the same file, and OPAQUE for each other base that may add
        methods."""
        yield owner
        for base in owner.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name) and base.id in _EMPTY:
                continue
            definition = self.names.get(base.id, OPAQUE) if isinstance(base, ast.Name) else OPAQUE
            if not isinstance(definition, ast.ClassDef):
                yield OPAQUE
            elif definition.name not in seen:
                yield from self._lineage(definition, seen | {owner.name})


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


def parameters(function: Function | Opaque, *, method: bool) -> tuple[Parameter, ...] | Opaque:
    """Return the function's parameters, without self if it is a method; OPAQUE if a decorator may change them."""
    if function is OPAQUE:
        return OPAQUE
    calls = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    decorators = [d.id if isinstance(d, ast.Name) else "" for d in calls]
    if any(d not in _TRANSPARENT for d in decorators):
        return OPAQUE
    found = tuple(_parameters(function.args))
    return without_self(found) if method and "staticmethod" not in decorators else found


def _parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    kinds = {Parameter.POSITIONAL_ONLY: arguments.posonlyargs, Parameter.POSITIONAL_OR_KEYWORD: arguments.args}
    positional = [(argument.arg, kind) for kind, part in kinds.items() for argument in part]
    first_default = len(positional) - len(arguments.defaults)
    for index, (name, kind) in enumerate(positional):
        yield Parameter(name, kind, default=Parameter.empty if index < first_default else ...)
    if arguments.vararg is not None:
        yield Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else ...)
    if arguments.kwarg is not None:
        yield Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD)


def is_generator(function: Function) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(function))


def short_returns(function: Function) -> Iterator[tuple[int, int]]:
    """Yield (line, number of values) of each `return` of a tuple that is written out and is not 3 or 4 values long."""
    for node in _own_nodes(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            values = node.value.elts
            if len(values) not in (3, 4) and not any(isinstance(value, ast.Starred) for value in values):
                yield node.lineno, len(values)


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes of the function's body, breadth first, except those of functions and classes inside it."""
    pending: deque[ast.AST] = deque(function.body)
    while pending:
        node = pending.popleft()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            pending.extend(ast.iter_child_nodes(node))


def _fields(model: ast.ClassDef | Opaque) -> Iterator[Parameter]:
    if model is OPAQUE:
        yield Parameter("more", Parameter.VAR_KEYWORD)
        return
    for statement in model.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            default = Parameter.empty if statement.value is None else ...
            yield Parameter(statement.target.id, Parameter.KEYWORD_ONLY, default=default)


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
