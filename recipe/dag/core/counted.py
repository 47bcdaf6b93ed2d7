"""Counts in texts that people read."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return the number and its noun: "1 row", "2 rows". `plural`: of a noun that does not take an s alone."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
