"""What a Python file defines, read from its syntax tree.

Invariant: the file is never run. What the tree cannot tell (imported names, decorated functions, foreign base classes)
is `OPAQUE`, and counts as fine.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from recipe.dag.workflow.problem import closest, listing


class Opaque(Enum):
    OPAQUE = "opaque"


OPAQUE = Opaque.OPAQUE
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef | Opaque


@dataclass(frozen=True, slots=True)
class Outline:
    names: dict[str, Definition]
    imports: dict[str, str]
    """`from module import thing as name`: name -> `module:thing`."""
    open: bool
    """`from x import *`: any further name may exist."""

    def find(self, name: str) -> Definition | None:
        """`function`, `Class` or `Class.method`."""
        first, *rest = name.split(".")
        found = self.names.get(first, OPAQUE if self.open else None)
        for part in rest:
            found = self.method(found, part) if isinstance(found, ast.ClassDef) else found and OPAQUE
        return found

    def method(self, owner: ast.ClassDef, name: str, seen: frozenset[str] = frozenset()) -> Function | Opaque | None:
        """A method of the class or of its bases in the same file; OPAQUE where a base stands elsewhere."""
        body = _names(owner.body)
        if name in body:
            found = body[name]
            return OPAQUE if isinstance(found, ast.ClassDef) else found
        inherited: Opaque | None = None
        for known in self._bases(owner):
            if known is OPAQUE:
                inherited = OPAQUE
            elif known.name not in seen and (found := self.method(known, name, seen | {owner.name})) is not None:
                return found
        return inherited

    def decorated(self, owner: ast.ClassDef, seen: frozenset[str] = frozenset()) -> bool:
        """A decorator or a metaclass, of the class or of a base, may have given it methods that stand nowhere."""
        if owner.decorator_list or owner.keywords:
            return True
        bases = [base for base in self._bases(owner) if base is not OPAQUE and base.name not in seen]
        return any(self.decorated(base, seen | {owner.name}) for base in bases)

    def _bases(self, owner: ast.ClassDef) -> Iterator[ast.ClassDef | Opaque]:
        """Those that stand in the same file, and OPAQUE for each other; not the ones that add no methods."""
        for base in owner.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name) and base.id in ("object", "Protocol", "Generic", "ABC"):
                continue
            known = self.names.get(base.id, OPAQUE) if isinstance(base, ast.Name) else OPAQUE
            yield known if isinstance(known, ast.ClassDef) else OPAQUE


@dataclass(frozen=True, slots=True)
class Signature:
    positional: tuple[str, ...]
    """Without self."""
    positional_only: int
    defaults: int
    """How many of `positional`, from the right, may be left out."""
    varargs: bool
    keywords: dict[str, bool]
    """Keyword-only names -> must be given."""
    kwargs: bool
    generator: bool = False

    def misfits(
        self, arguments: tuple[str, ...], keywords: Iterable[str], optional: frozenset[str]
    ) -> Iterator[tuple[str, str]]:
        """(keyword or "", what is wrong) of a call with positional `arguments` and `keywords`; `optional` names are
        passed only to those who take them."""
        keywords = list(keywords)
        if not self.varargs and len(self.positional) < len(arguments):
            takes = listing(self.positional) or "none"
            yield "", f"must take the positional arguments {listing(arguments)}, takes {takes}"
            return
        later = self.positional[len(arguments) :]
        required = {name for name in later[: max(0, len(later) - self.defaults)]}
        required |= {name for name, must in self.keywords.items() if must}
        for name in sorted(required - set(keywords) - optional):
            yield "", f"needs the argument `{name}`, which nobody gives"
        by_name = {*self.positional[max(self.positional_only, len(arguments)) :], *self.keywords}
        for name in keywords:
            if name in optional or name in self.positional[self.positional_only : len(arguments)]:
                yield name, f"`{name}` is already given by the engine; use another name"
            elif name not in by_name and not self.kwargs:
                near = closest(name, by_name)
                yield name, f"takes no `{name}`" + (f"; did you mean `{near}`?" if near else "; add it, or **kwargs")


def read_outline(path: Path) -> Outline:
    """Raises SyntaxError or ValueError (null bytes, bad encoding) with the interpreter's message."""
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
    """How the function is called; without self where it is a method."""
    if function is OPAQUE:
        return OPAQUE
    decorators = [d.id if isinstance(d, ast.Name) else "" for d in function.decorator_list]
    if any(d not in ("staticmethod", "classmethod") for d in decorators):
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
    """The function itself, not one that is defined in it."""
    left: list[ast.AST] = list(body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            left += ast.iter_child_nodes(node)
    return False


def _names(body: list[ast.stmt]) -> dict[str, Definition]:
    """What the statements define; `*` stands for a star import."""
    names: dict[str, Definition] = {}
    for statement in _statements(body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[statement.name] = statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0]: OPAQUE for alias in statement.names}
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names |= {n.id: OPAQUE for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return names


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, those under if, try, with and for included, but not what is inside functions and classes."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for block in (getattr(statement, part, []) for part in ("body", "orelse", "finalbody", "handlers")):
                yield from _statements(block)
