"""Numbers that user code returns: rewards and outcomes.

Invariant: what passes is finite, also in float32, in which credit is handed to the losses.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

LARGEST = 3.4e38
"""Below float32's largest."""


def as_number(value: Any) -> float | None:
    """None for what is no number (a scalar of numpy or torch is one), not finite, or too large."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except Exception:  # an array of several numbers, or an object that is none of these
            return None
    return float(value) if isinstance(value, Real) and -LARGEST <= value <= LARGEST else None
