"""Rows as a table of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: list[str] | None, rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, indented by two spaces; columns are as wide as their widest cell."""
    cells = ([header] if header else []) + list(rows)
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
