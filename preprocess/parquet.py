"""Reading and writing of parquet files of any size and schema.

Invariant: memory is bounded by a few rows, whatever the file's size. Same input, same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recipe.dag.core.errors import UserError

_BATCH_ROWS, _BATCH_BYTES = 64, 32 << 20
"""Most rows and bytes that are decoded at once: a row may hold a text of many megabytes."""
_GROUP_BYTES = 64 << 20
_GROUP_ROWS = 16_384


def open_parquet(name: str | Path) -> pq.ParquetFile:
    """Open a parquet file that has rows. Raises UserError."""
    path = Path(name).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"{name}: {what}; pass a .parquet file (the scripts in preprocess/ write them)")
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(name, error) from error
    if file.metadata.num_rows == 0:
        raise UserError(f"{name}: contains no rows")
    return file


def batches(file: pq.ParquetFile, name: str | Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in order, a few at a time. `columns`: those to read. Raises UserError."""
    groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
    largest = max(group.total_byte_size // max(group.num_rows, 1) for group in groups)
    size = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(largest, 1)))
    rows = file.iter_batches(size, columns=None if columns is None else list(columns), use_threads=False)
    while True:
        try:
            batch = next(rows, None)
        except (OSError, pa.ArrowException, ValueError) as error:
            raise _unreadable(name, error) from error
        if batch is None:
            return
        yield batch


def _unreadable(name: str | Path, error: BaseException) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(f"{name}: cannot be read as parquet: {reason}; write or copy the file again")


def write_selected(
    rows: Iterable[pa.RecordBatch], schema: pa.Schema, places: Sequence[int | None], files: list
) -> None:
    """Write row i to `files[places[i]]`, in order; None leaves it out."""
    writers = [_GroupWriter(pq.ParquetWriter(file, schema)) for file in files]
    start = 0
    for batch in rows:
        chosen = places[start : start + batch.num_rows]
        start += batch.num_rows
        for index, writer in enumerate(writers):
            writer.add(batch.filter(pa.array([where == index for where in chosen], pa.bool_())))
    for writer in writers:
        writer.close()


class _GroupWriter:
    """Collects batches until they fill a row group, so that small batches do not become small row groups."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer
        self._waiting: list[pa.RecordBatch] = []

    def add(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._waiting.append(batch)
        rows, size = sum(part.num_rows for part in self._waiting), sum(part.nbytes for part in self._waiting)
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting))
        self._waiting = []

    def close(self) -> None:
        self._flush()
        self._writer.close()
