"""JSON files, read as the YAML that they nearly are.

Invariant: what is no JSON is an error at its place, and places in the text stay what they were.
"""

from __future__ import annotations

import json
import re

from recipe.dag.workflow.problem import Problem, WorkflowError

_PAIR = re.compile(r"(?<!\\)((?:\\\\)*)\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
"""Two escapes that JSON reads as one character, and YAML as two that are none."""


def json_as_yaml(text: str, file: str) -> str:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        place = (error.lineno, error.colno)
        raise WorkflowError([Problem(file, *place, "", f"JSON syntax: {error.msg.lower()}")]) from error
    except RecursionError as error:
        raise WorkflowError([Problem(file, 1, 1, "", "the file is nested too deeply")]) from error
    # A tab stands between JSON's tokens only; YAML would not have it there.
    return _PAIR.sub(_one_character, text.replace("\t", " "))


def _one_character(match: re.Match[str]) -> str:
    high, low = int(match[2], 16), int(match[3], 16)
    return f"{match[1]}\\U{0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00):08x}"
