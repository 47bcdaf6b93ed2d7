"""Nested settings as dotted keys.

Invariant: every value is named once; an empty mapping is a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recipe.dag.core.problem import KeyPath


def flatten(config: dict[str, Any], path: KeyPath = (), prefix: str = "") -> Iterator[tuple[str, Any, KeyPath]]:
    """Yield (dotted key, value, path below `path`) of every value that is not a mapping."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, (*path, key), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value, (*path, key)
