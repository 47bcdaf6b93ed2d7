"""A judge by rule behind OpenAI's interface, for `workflow_api_judge.yaml` without an external model:
`verl-dag serve --script examples/gallery/judge.py:judge`.

It recomputes the problem's first operation of two numbers, and says NO where there is none.
"""

from __future__ import annotations

import operator
import re

_OPERATION = re.compile(r"(-?\d+)\s*([-+*])\s*(-?\d+)")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_NUMBER = re.compile(r"-?\d+")


def judge(messages: list[dict[str, str]]) -> str:
    """Return YES if the student's first number is the result, else NO."""
    problem, _, answer = messages[-1]["content"].partition("Answer of a student:")
    operation, said = _OPERATION.search(problem), _NUMBER.search(answer)
    if operation is None or said is None:
        return "NO"
    left, name, right = operation.groups()
    return "YES" if int(said[0]) == _OPERATORS[name](int(left), int(right)) else "NO"
