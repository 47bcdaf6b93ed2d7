"""New names for nodes, in what was read of a file but not yet checked.

Invariant: what is no name of a known node stays as it is, so that its mistake is found later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    return names.get(value, value) if isinstance(value, str) else value


def renamed_list(value: Any, names: Mapping[str, str]) -> Any:
    return [renamed(item, names) for item in value] if isinstance(value, list) else value


def renamed_condition(value: Any, names: Mapping[str, str]) -> Any:
    """`when` or `until`."""
    if not isinstance(value, dict):
        return value
    new = dict(value)
    for key in new:
        if key in ("node", "env"):
            new[key] = renamed(new[key], names)
        elif key == "agree":
            new[key] = renamed_list(new[key], names)
        elif key in ("all_of", "any_of", "none_of") and isinstance(new[key], list):
            new[key] = [renamed_condition(item, names) for item in new[key]]
    return new
