"""Tests of programming data sets: reads them from a sample's ground truth, builds the program that runs one, and
compares its output.

Invariant: pure functions; nothing is executed here. A ground truth is one of these, as JSON text or as data: APPS' and
PRIME's `{"inputs": [...], "outputs": [...], "fn_name": optional}`, a list of `{"input": ..., "output": ...}`, MBPP's
`{"test_list": [...]}`, `{"assert_case": [...]}`, or a list of assert statements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from recipe.dag.core.errors import UserError

KINDS = (
    '{"inputs": [...], "outputs": [...]} with or without "fn_name", [{"input": ..., "output": ...}], '
    '{"test_list": [...]}, {"assert_case": [...]} or a list of assert statements'
)
TOLERANCE = 1e-6
"""Allowed difference of floats, relative above 1 and absolute below."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test.

    - stdio: `inputs` is the text on standard input, `expected` the text on standard output
    - call: `inputs` are the arguments of `function`, `expected` its result
    - assert: `inputs` are statements that must not raise
    """

    kind: Literal["stdio", "call", "assert"]
    inputs: Any
    expected: Any = None
    function: str = ""


def cases_of(ground_truth: Any) -> list[Case]:
    """Return the tests, at least one. Raises UserError if there is none."""
    data = _decoded(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if isinstance(data, Mapping):
        cases = _cases_of_mapping(data)
    elif isinstance(data, list):
        cases = _cases_of_list(data)
    else:
        cases = []
    if not cases:
        raise UserError(f"CodeEnv: no tests in the ground truth {str(ground_truth)[:80]!r}; it must be {KINDS}")
    return cases


def _decoded(text: str) -> Any:
    """Parse JSON; other text is a single test if it starts like Python's."""
    try:
        return json.loads(text)
    except ValueError:
        return [text] if text.lstrip().startswith(("assert", "import", "from", "def")) else None


def _cases_of_mapping(data: Mapping[str, Any]) -> list[Case]:
    if {"inputs", "outputs"} <= data.keys():
        inputs, outputs = data["inputs"], data["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise UserError("CodeEnv: `inputs` and `outputs` of a ground truth must be lists of the same length")
        return [_case(data.get("fn_name"), *pair) for pair in zip(inputs, outputs, strict=True)]
    setup = data.get("test_setup_code") or "\n".join(data.get("test_imports") or ())
    asserts = data.get("test_list") or data.get("assert_case") or ()
    return [Case("assert", f"{setup}\n{text}" if setup else text) for text in asserts]


def _cases_of_list(data: list[Any]) -> list[Case]:
    if all(isinstance(item, str) for item in data):
        return [Case("assert", text) for text in data]
    if all(isinstance(item, Mapping) and {"input", "output"} <= item.keys() for item in data):
        return [_case(item.get("fn_name"), item["input"], item["output"]) for item in data]
    return []


def _case(function: str | None, inputs: Any, expected: Any) -> Case:
    if not function:
        return Case("stdio", _text(inputs), _text(expected))
    if isinstance(inputs, str):  # one argument per line, each JSON
        inputs, expected = [_value(line) for line in inputs.splitlines() if line.strip()], _value(expected)
    return Case("call", inputs if isinstance(inputs, list) else [inputs], expected, function)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _value(text: Any) -> Any:
    """Parse JSON; anything else is its own value."""
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
    """Return the program to run and its standard input. `marker`: a random text that precedes the result on stdout."""
    if case.kind == "stdio":
        return code, case.inputs
    arguments, statements = (case.inputs, None) if case.kind == "call" else (None, case.inputs)
    return _HARNESS, json.dumps([marker, code, case.function, arguments, statements]) + "\n"


def passed(case: Case, stdout: str, marker: str) -> bool:
    """Return whether a program that ended without an error passed the test."""
    if case.kind == "stdio":
        return same_output(stdout, case.expected)
    _, separator, result_text = stdout.rpartition("\n" + marker)
    if not separator:
        return False  # the program exited before the test ended
    if case.kind == "assert":
        return True
    try:
        result = json.loads(result_text.partition("\n")[0])
        # APPS wraps some expected results in a list
        return same(result, case.expected) or same([result], case.expected)
    except (ValueError, RecursionError, OverflowError):
        return False  # more digits or deeper nesting than any expected value


def same_output(text: str, expected: str) -> bool:
    """Compare line by line, ignoring spacing and blank lines; decimal numbers may differ by the tolerance."""
    actual_lines, expected_lines = _lines_of_words(text), _lines_of_words(expected)
    return len(actual_lines) == len(expected_lines) and all(map(_same_words, actual_lines, expected_lines))


def _lines_of_words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def _same_words(actual: list[str], expected: list[str]) -> bool:
    if len(actual) != len(expected):
        return False
    return all(a == b or _close_words(a, b) for a, b in zip(actual, expected, strict=True))


def _close_words(a: str, b: str) -> bool:
    # whole numbers must be equal as text; the tolerance is for decimals
    if not any(sign in word for word in (a, b) for sign in ".eE"):
        return False
    try:
        return same(float(a), float(b))
    except ValueError:
        return False


def same(a: Any, b: Any) -> bool:
    """Compare JSON values; floats may differ by the tolerance."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, int | float) and isinstance(b, int | float) and (isinstance(a, float) or isinstance(b, float)):
        return a == b or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return a == b
