"""Chooses the interpreter that a Python program starts from.

Invariant: the choice can change how long a start takes, never what the program does. A program that could behave
differently in a warm interpreter gets a fresh one: if one of its files has the name of a module that is already loaded,
or if it sets variables that libraries read only once.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

COLD = "cold"
_IMPORT = re.compile(r"^[ \t]*(?:import[ \t]+([^#\n;]+)|from[ \t]+([\w.]+)[ \t]+import)", re.MULTILINE)
_READ_ONCE = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "PYTHONHASHSEED")


@dataclass(frozen=True)
class Kind:
    """A zygote's libraries. `imports` are loaded if installed; `warm_up` runs once, for what they load lazily."""

    name: str
    triggers: frozenset[str]
    imports: tuple[str, ...] = ()
    warm_up: tuple[str, ...] = ()
    eager: bool = True
    """Started with the engine, not with its first job."""

    def settings(self) -> dict[str, list[str]]:
        installed = [name for name in self.imports if _installed(name.partition(".")[0])]
        statements = [text for text in self.warm_up if all(_installed(name) for name in _imported(text))]
        return {"preload": installed, "warm_up": statements}

    def useful(self) -> bool:
        return not self.imports or bool(self.settings()["preload"])


_NUMPY = ("numpy", "numpy.random", "numpy.linalg", "numpy.fft", "numpy.polynomial")
_LINEAR_ALGEBRA = "import numpy\nnumpy.linalg.solve(numpy.eye(2), numpy.ones(2))"
_ALGEBRA = """\
import sympy
x = sympy.Symbol("x")
sympy.factor(x**2 - 1)
sympy.simplify(sympy.sin(x) ** 2 + sympy.cos(x) ** 2)
sympy.solve(x**2 - 2, x)
sympy.integrate(x, x)
sympy.sqrt(8), sympy.Rational(1, 3).evalf(), sympy.Matrix([[1, 2], [3, 4]]).det()
from sympy.core.cache import clear_cache
clear_cache()
"""
_TABLES = "import pandas\npandas.DataFrame({'a': [1, 2], 'b': [1, 1]}).groupby('b').sum().to_csv()"

KINDS = (
    Kind("lean", frozenset()),
    Kind("sci", frozenset({"numpy", "sympy", "mpmath", "scipy"}), (*_NUMPY, "sympy"), (_LINEAR_ALGEBRA, _ALGEBRA)),
    Kind("data", frozenset({"pandas"}), (*_NUMPY, "pandas"), (_LINEAR_ALGEBRA, _TABLES), eager=False),
)


def choose(code: str, names: Iterable[str], loaded: Mapping[str, Collection[str]]) -> str:
    """Return the name of a kind, or COLD. names: the files in the program's directory. loaded: modules by kind."""
    if "\0" in code or any(setting in code for setting in _READ_ONCE):
        return COLD  # a null byte is an error that only a file can cause
    imported = _imported(code)
    kind = "lean"
    for candidate in KINDS:
        if candidate.name in loaded and candidate.triggers & imported:
            kind = candidate.name
    own = {name.removeprefix("./").partition("/")[0].partition(".")[0] for name in names}
    if own and not loaded[kind]:
        return COLD  # its zygote has not started yet, so its modules are unknown
    return COLD if own & set(loaded[kind]) else kind


def _imported(code: str) -> set[str]:
    names = set()
    for listed, source in _IMPORT.findall(code):
        for name in (source or listed).split(","):
            names.add(name.strip().partition(" ")[0].partition(".")[0])
    return names


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
