"""Reads submissions and answers: CSV of unknown origin, joined with the truth by id.

Invariant: a submission is data of an agent. Whatever it contains, the result is aligned columns of text or Unscorable
with one reason; never another exception, never more than the size limit in memory, and nothing in it is executed.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from recipe.dsbench.metrics import Unscorable

MAX_BYTES = 64 << 20
"""Limit of a submission. The largest published answer file has about two million rows."""
_MAX_HEADER = 64 << 10
_MAX_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of text, all of the same length."""

    columns: dict[str, list[str]]

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values())))


def read_bytes(source: bytes | str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return a file's content. Raises Unscorable if it is missing, not a regular file, or larger than `max_bytes`, of
    which no more than that is read."""
    if isinstance(source, bytes):
        data = source
    else:
        try:
            path = Path(source)
            if not path.is_file():
                raise Unscorable("no file" if not path.exists() else "not a regular file")
            with path.open("rb") as file:
                data = file.read(max_bytes + 1)
        except (OSError, ValueError) as error:
            raise Unscorable(f"cannot be read: {type(error).__name__}") from None
    if len(data) > max_bytes:
        raise Unscorable(f"larger than {max_bytes >> 20} MB" if max_bytes >> 20 else f"larger than {max_bytes} bytes")
    return data


def read_table(data: bytes, max_rows: int | None = None) -> Table:
    """Parse CSV with a header; every cell is text without surrounding spaces. Raises Unscorable. max_rows: more rows
    than this are refused without being parsed."""
    if not data.strip():
        raise Unscorable("empty file")
    if b"\0" in data:
        raise Unscorable("not a text file")
    header = data.lstrip().split(b"\n", 1)[0]
    if len(header) > _MAX_HEADER:
        raise Unscorable(f"the header has more than {_MAX_HEADER} bytes")
    if header.count(b",") >= _MAX_COLUMNS:
        raise Unscorable(f"more than {_MAX_COLUMNS} columns")
    try:
        return _parsed(StringIO(data.decode("utf-8-sig"), newline=""), max_rows)
    except UnicodeDecodeError:
        raise Unscorable("not UTF-8 text") from None
    except csv.Error as error:
        raise Unscorable(f"not CSV: {error}") from None


def _parsed(text: StringIO, max_rows: int | None) -> Table:
    reader = csv.reader(text)
    names = [name.strip() for name in next(reader, [])]
    if len(set(names)) < len(names):
        raise Unscorable("two columns have the same name")
    rows: list[list[str]] = []
    for row in reader:
        if not row:  # a blank line
            continue
        if len(row) != len(names):
            raise Unscorable(f"line {reader.line_num} has {len(row)} cells, the header {len(names)}")
        if max_rows is not None and len(rows) == max_rows:
            raise Unscorable(f"more than {max_rows} rows")
        rows.append(row)
    if not rows:
        raise Unscorable("no rows")
    columns = [[cell.strip() for cell in column] for column in zip(*rows, strict=True)]
    return Table(dict(zip(names, columns, strict=True)))


def align(submission: Table, ids: Sequence[str], id_column: str, targets: Sequence[str]) -> dict[str, list[str]]:
    """Return the submission's target columns in the order of `ids`.

    Names are compared without case; if the task has one target, the only other column may have any name. Raises
    Unscorable for missing columns, and for ids that are missing, repeated or unknown.
    """
    by_name = {name.lower(): name for name in submission.columns}
    id_name = by_name.get(id_column.lower())
    if id_name is None:
        raise Unscorable(f"no column '{id_column}'; it has {_names(submission.columns)}")
    others = [name for name in submission.columns if name != id_name]
    chosen = {}
    for target in targets:
        name = by_name.get(target.lower())
        if name is None and len(targets) == 1 and len(others) == 1:
            name = others[0]
        if name is None or name == id_name:
            raise Unscorable(f"no column '{target}'; it has {_names(submission.columns)}")
        chosen[target] = submission.columns[name]
    rows = _positions(submission.columns[id_name], ids)
    return {target: [values[row] for row in rows] for target, values in chosen.items()}


def _positions(submitted: Sequence[str], ids: Sequence[str]) -> list[int]:
    """Return the row of each id."""
    if len(submitted) != len(ids):
        raise Unscorable(f"{len(submitted)} rows for {len(ids)} ids")
    wanted = keys_of(ids)
    # an id column that passed through floating point reads 1.0 for 1
    keys = keys_of(submitted) if all(isinstance(key, int) for key in wanted) else list(submitted)
    rows = {key: row for row, key in enumerate(keys)}
    if len(rows) < len(keys):
        raise Unscorable(f"{len(keys) - len(rows)} repeated ids")
    unknown = rows.keys() - set(wanted)
    if unknown:
        raise Unscorable(f"{len(unknown)} unknown ids")
    return [rows[key] for key in wanted]


def keys_of(ids: Sequence[str]) -> list[int | str]:
    """Return ids as integers where all are, else unchanged."""
    numbers: list[int | str] = []
    for text in ids:
        digits = text[:-2] if text.endswith(".0") else text
        # more digits than an id has would cost quadratic time to convert
        if len(digits) > 20 or not digits.removeprefix("-").isdecimal() or not digits.isascii():
            return list(ids)
        numbers.append(int(digits))
    return numbers


def _names(columns: Sequence[str] | dict[str, list[str]]) -> str:
    names = ", ".join(name[:40] for name in list(columns)[:6])
    return names + (", ..." if len(columns) > 6 else "")
