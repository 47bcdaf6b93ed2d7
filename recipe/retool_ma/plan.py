"""The planner's answer as three strings.

Invariant: a plan always has exactly the keys of KEYS, each a string that UTF-8 can encode, whatever the model wrote.
"""

from __future__ import annotations

import json
import re
from typing import Any

from recipe.dag.episode.record import Call

KEYS = ("reasoning", "code_plan", "expected_output")

_DECODER = json.JSONDecoder(strict=False)  # models put raw newlines into JSON strings
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')


def parse_plan(text: str) -> tuple[dict[str, str], bool]:
    """The plan in `text` and whether one was found; where none was, the whole text stands under every key.

    Of several JSON objects the one with the most of the three keys counts, and the last of equals. Absent keys are "".
    """
    found = _best_object(text) or _best_object(_escape_latex(text))
    if found is None:
        return dict.fromkeys(KEYS, _encodable(text.strip())), False
    return {key: _as_text(found.get(key)) for key in KEYS}, True


def plan_json(plan: dict[str, str]) -> str:
    """The plan as downstream agents read it."""
    return json.dumps({key: plan[key] for key in KEYS}, ensure_ascii=False)


def plan_of(call: Call) -> dict[str, str]:
    """The plan of a planner's call; a hook of the user's own may have handed over text alone."""
    return call.parsed.get("plan") or parse_plan(call.text)[0]


def _best_object(text: str) -> dict[str, Any] | None:
    best, best_count = None, 0
    start = text.find("{")
    while start >= 0:
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            count = sum(key in value for key in KEYS)
            if count and count >= best_count:
                best, best_count = value, count
        start = text.find("{", end)
    return best


def _escape_latex(text: str) -> str:
    """Double the backslashes that start no JSON escape, as in "\\sqrt{2}" written with a single one."""
    return _ESCAPE.sub(lambda match: match.group() if len(match.group()) > 1 else "\\\\", text)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return _encodable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _encodable(text: str) -> str:
    """A JSON escape can spell half of a surrogate pair, which no tokenizer or file takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
