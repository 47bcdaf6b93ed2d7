"""Patterns of file names, as `fetch_files`, a session's listing and contracts about files use them.

Invariant: pure, and linear in the name: neither hostile names nor patterns cost more.
"""

from __future__ import annotations

import fnmatch


def matches(name: str, pattern: str) -> bool:
    """Return whether a file's name is the pattern, or fits it as in `fetch_files`: `*` and `?` stay within one folder
    and skip names that begin with a dot, `**` matches any number of folders."""
    if name == pattern:
        return True
    parts, wanted = name.split("/"), pattern.split("/")
    if wanted[-1] == "**":
        wanted.append("*")
    # Positions in the pattern that the parts read so far may have reached; a recursion could take exponential time.
    reached = _with_empty_folders({0}, wanted)
    for part in parts:
        fits = {at + 1 for at in reached if at < len(wanted) and wanted[at] != "**" and _fits(part, wanted[at])}
        inside = {at for at in reached if at < len(wanted) and wanted[at] == "**" and _fits(part, "*")}
        reached = _with_empty_folders(fits | inside, wanted)
    return len(wanted) in reached


def _with_empty_folders(reached: set[int], wanted: list[str]) -> set[int]:
    """Return the positions with those behind each `**`, which may match no folder."""
    for at in range(len(wanted)):
        if at in reached and wanted[at] == "**":
            reached = reached | {at + 1}
    return reached


def _fits(part: str, wanted: str) -> bool:
    return part.startswith(".") <= wanted.startswith(".") and fnmatch.fnmatchcase(part, wanted)
