"""What an option of an estimator may be.

Invariant: each check raises ValueError with the option's name and what it may be.
"""

from __future__ import annotations

from collections.abc import Sequence


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}: {value!r} is none of {', '.join(known)}")


def check_units(**values: float) -> None:
    """Numbers from 0 to 1."""
    for name, value in values.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}: {value} is not between 0 and 1")
