"""Nested settings as dotted keys.

Invariant: every value is named once; an empty mapping is a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recipe.dag.workflow.problem import KeyPath


def flat(config: dict[str, Any], path: KeyPath = (), prefix: str = "") -> Iterator[tuple[str, Any, KeyPath]]:
    """(dotted key, value, place under `path`) of every value that is no mapping."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from flat(value, (*path, key), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value, (*path, key)
