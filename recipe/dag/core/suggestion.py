"""Suggests the right name for a misspelled one, in error messages.

Invariant: pure; a suggestion is one of the options.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, options: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the option that `word` probably means, or None. `cutoff`: their least similarity, in [0, 1]."""
    options = list(options)
    match = difflib.get_close_matches(word, options, n=1, cutoff=cutoff)
    if match:
        return match[0]
    by_lower = {option.lower(): option for option in options}
    match = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[match[0]] if match else None


def hint_at(word: str, options: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return `; did you mean ...?`, or "" if no option is close. `cutoff`: as in `closest`."""
    match = closest(word, options, cutoff=cutoff)
    return "" if match is None else f"; did you mean `{match}`?"


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return `; did you mean ...?`, or the list of options if none is close."""
    options = list(options)
    return hint_at(word, options) or (f"; available: {listing(options)}" if options else "")


def listing(options: Iterable[str]) -> str:
    """Return the options in backticks, separated by commas."""
    return ", ".join(f"`{option}`" for option in options)
