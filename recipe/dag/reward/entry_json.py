"""Problems of reasoning-gym as JSON: their metadata holds tuples, sets and dictionaries whose keys are not text.

Invariant: `from_json(to_json(value)) == value`, types included, or `to_json` raises TypeError.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date, datetime
from fractions import Fraction
from typing import Any

_KIND, _ITEMS = "__kind__", "items"
_BASES: tuple[type[Any], ...] = (str, int, float, list, tuple)
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def to_json(value: Any) -> str:
    """Return the JSON text of a value. Raises TypeError for a type that it does not know."""
    return json.dumps(_plain(value), sort_keys=False)


def from_json(text: str) -> Any:
    """Return the value of a text that `to_json` made."""
    return json.loads(text, object_hook=_restored)


def _plain(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_plain(item) for item in value]
    if kind.__name__ in _SEQUENCES and kind is _SEQUENCES[kind.__name__]:
        items = [_plain(item) for item in value]
        # a set has no order, and the same problem must have the same text
        return {_KIND: kind.__name__, _ITEMS: items if kind is tuple else sorted(items, key=json.dumps)}
    if kind is dict:
        if all(type(key) is str for key in value) and _KIND not in value:
            return {key: _plain(item) for key, item in value.items()}
        return {_KIND: "dict", _ITEMS: [[_plain(key), _plain(item)] for key, item in value.items()]}
    if kind in (date, datetime):
        return {_KIND: kind.__name__, _ITEMS: value.isoformat()}
    if kind is Fraction:
        return {_KIND: "Fraction", _ITEMS: str(value)}
    if isinstance(value, dict | str | int | float | list | tuple) or hasattr(value, "item"):
        return _plain(_base(value))
    raise TypeError(f"a {kind.__name__} cannot be stored")


def _base(value: Any) -> Any:
    """Return an instance of a subclass (an enumeration's member, numpy's numbers) as its base type."""
    if isinstance(value, dict):
        return dict(value)
    base = next((base for base in _BASES if isinstance(value, base)), None)
    return value.item() if base is None else base(value)


def _restored(fields: dict[str, Any]) -> Any:
    kind = fields.get(_KIND)
    if kind is None:
        return fields
    items = fields[_ITEMS]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](items)
    if kind == "dict":
        return {key: item for key, item in items}
    return {"date": date.fromisoformat, "datetime": datetime.fromisoformat, "Fraction": Fraction}[kind](items)
