"""The tests of programming data sets: what a sample's ground truth says, what to run for it, what a right result is.

Invariant: pure functions; no program runs here. Read are (as JSON text or as data): APPS' and PRIME's
`{"inputs": [...], "outputs": [...], "fn_name": optional}`, a list of `{"input": ..., "output": ...}`, MBPP's
`{"test_list": [...]}`, `{"assert_case": [...]}`, and a plain list of assert statements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from recipe.dag.errors import UserError

KINDS = (
    '{"inputs": [...], "outputs": [...]} with or without "fn_name", [{"input": ..., "output": ...}], '
    '{"test_list": [...]}, {"assert_case": [...]} or a list of assert statements'
)
TOLERANCE = 1e-6
"""Of floats, relative above 1 and absolute below."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test. stdio: `given` is the input text, `expected` the output text. call: `given` are the arguments of
    `function`, `expected` its result. assert: `given` are statements that must not raise."""

    kind: Literal["stdio", "call", "assert"]
    given: Any
    expected: Any = None
    function: str = ""


def cases_of(ground_truth: Any) -> list[Case]:
    """At least one. Raises UserError."""
    data = ground_truth
    if isinstance(data, str):
        try:
            data = json.loads(data)
        except ValueError:
            data = [data] if data.lstrip().startswith(("assert", "import", "from", "def")) else None
    cases: list[Case] = []
    if isinstance(data, Mapping) and {"inputs", "outputs"} <= data.keys():
        cases = _paired(data)
    elif isinstance(data, Mapping) and ("test_list" in data or "assert_case" in data):
        setup = data.get("test_setup_code") or "\n".join(data.get("test_imports") or ())
        asserts = data.get("test_list") or data.get("assert_case") or ()
        cases = [Case("assert", f"{setup}\n{text}" if setup else text) for text in asserts]
    elif isinstance(data, list) and all(isinstance(item, str) for item in data):
        cases = [Case("assert", text) for text in data]
    elif isinstance(data, list) and all(
        isinstance(item, Mapping) and {"input", "output"} <= item.keys() for item in data
    ):
        cases = [_case(item.get("fn_name"), item["input"], item["output"]) for item in data]
    if not cases:
        raise UserError(f"CodeEnv: no tests in the ground truth {str(ground_truth)[:80]!r}; it takes {KINDS}")
    return cases


def _paired(data: Mapping[str, Any]) -> list[Case]:
    inputs, outputs = data["inputs"], data["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UserError("CodeEnv: a ground truth's inputs and outputs must be lists of one length")
    return [_case(data.get("fn_name"), given, expected) for given, expected in zip(inputs, outputs, strict=True)]


def _case(function: str | None, given: Any, expected: Any) -> Case:
    if not function:
        return Case("stdio", _text(given), _text(expected))
    if isinstance(given, str):  # one argument per line, each JSON
        given, expected = [_value(line) for line in given.splitlines() if line.strip()], _value(expected)
    return Case("call", given if isinstance(given, list) else [given], expected, function)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _value(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


_HARNESS = """\
import json, sys, types
marker, source, function, arguments, statements = json.loads(sys.stdin.readline())
module = sys.modules["solution"] = types.ModuleType("solution")
space = module.__dict__
exec("import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys\\n"
     "from typing import *\\nfrom collections import *\\nfrom math import *", space)
exec(compile(source, "solution.py", "exec"), space)
if statements is not None:
    exec(compile(statements, "tests.py", "exec"), space)
    result = True
else:
    target = space[function] if function in space else getattr(space["Solution"](), function)
    result = target(*arguments)
text = json.dumps(result, default=lambda value: list(value) if hasattr(value, "__iter__") else str(value))
sys.stdout.write("\\n" + marker + text + "\\n")
"""


def program_for(code: str, case: Case, marker: str) -> tuple[str, str]:
    """(program, its standard input). `marker`: a text of one run, before which stdout is the program's own."""
    if case.kind == "stdio":
        return code, case.given
    arguments, statements = (case.given, None) if case.kind == "call" else (None, case.given)
    return _HARNESS, json.dumps([marker, code, case.function, arguments, statements]) + "\n"


def passed(case: Case, stdout: str, marker: str) -> bool:
    """Whether a program that ended well did what the test asks for."""
    if case.kind == "stdio":
        return same_output(stdout, case.expected)
    _, found, after = stdout.rpartition("\n" + marker)
    if not found:
        return False  # it left before the test was over
    if case.kind == "assert":
        return True
    try:
        result = json.loads(after.partition("\n")[0])
        # APPS wraps an expected result into a list of its own.
        return same(result, case.expected) or same([result], case.expected)
    except (ValueError, RecursionError, OverflowError):
        return False  # more digits, or a deeper list, than any expected value has


def same_output(text: str, expected: str) -> bool:
    """Line by line, spacing and blank lines aside; numbers with a fraction up to the tolerance."""
    ours, theirs = ([line.split() for line in part.splitlines() if line.strip()] for part in (text, expected))
    return len(ours) == len(theirs) and all(map(_same_words, ours, theirs))


def _same_words(ours: list[str], theirs: list[str]) -> bool:
    return len(ours) == len(theirs) and all(a == b or _close_words(a, b) for a, b in zip(ours, theirs, strict=True))


def _close_words(a: str, b: str) -> bool:
    if not any(sign in word for word in (a, b) for sign in ".eE"):
        return False
    try:
        return same(float(a), float(b))
    except ValueError:
        return False


def same(a: Any, b: Any) -> bool:
    """Equal as JSON values, floats up to the tolerance."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, float) or isinstance(b, float):
        numbers = isinstance(a, int | float) and isinstance(b, int | float)
        return numbers and (a == b or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE))
    return a == b
