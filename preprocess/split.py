"""Split a parquet file of any schema into train.parquet and val.parquet.

`python preprocess/split.py --input IN.parquet --local_dir OUT` puts 1000 rows into val.parquet, of 1000 rows or fewer a
quarter. They depend only on the number of rows and the seed; both files keep the input's order. Training rows whose
prompt is also a validation row's are left out and counted: data sets repeat problems, and a repeated one would be
validated on what was trained.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.train import data_script
from recipe.dag.train.problems import PROBLEM_KEYS
from verl_dag.preprocess.parquet import batches, open_parquet, write_selected

TRAIN, VAL = 0, 1
DEFAULT = 1000
"""Validation rows."""
_KEYS = ("messages", *PROBLEM_KEYS)


def places(keys: Sequence[bytes], val_size: int, seed: int) -> list[int | None]:
    """Return TRAIN or VAL for each row, None for a row that repeats the key of a validation row. Raises UserError."""
    count = len(keys)
    if val_size >= count:
        raise UserError(f"{val_size} validation rows of {count} leave none to train on; pass a smaller --val_size")
    chosen = set(random.Random(seed).sample(range(count), val_size))
    taken = {keys[index] for index in chosen}
    split = [VAL if index in chosen else None if keys[index] in taken else TRAIN for index in range(count)]
    if TRAIN not in split:
        raise UserError(
            "every other row repeats a validation row, so none is left to train on; pass a smaller --val_size"
        )
    return split


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, help="parquet file")
    parser.add_argument(
        "--local_dir", required=True, type=data_script.folder, help="where train.parquet and val.parquet go"
    )
    parser.add_argument(
        "--val_size", type=data_script.positive, help="validation rows; default: 1000, or a quarter of 1000 or fewer"
    )
    parser.add_argument("--seed", type=int, default=42, help="seed of the choice of validation rows; default: 42")
    parser.add_argument("--key", help=f"column whose repetition counts; default: the first of {', '.join(_KEYS)}")
    options = parser.parse_args(argv)
    file = open_parquet(options.input)
    names = file.schema_arrow.names
    key = options.key or next((name for name in _KEYS if name in names), None)
    if key is not None and key not in names:
        raise UserError(f"{options.input}: has no column '{key}' (its columns: {', '.join(names)}); name it with --key")
    count = file.metadata.num_rows
    size = options.val_size or (DEFAULT if count > DEFAULT else max(1, count // 4))
    split = places(_keys(file, options.input, key), size, options.seed)
    targets = [options.local_dir / name for name in ("train.parquet", "val.parquet")]
    with data_script.new_files(targets, "--local_dir") as files:
        write_selected(batches(file, options.input), file.schema_arrow, split, files)
    if repeated := split.count(None):
        print(f"split: left out {counted(repeated, 'training row')} whose {key} is a validation row's")
    for index, target in enumerate(targets):
        print(f"split: {split.count(index)} rows -> {target}")


def _keys(file, name: str, column: str | None) -> list[bytes]:
    """Return a digest of each row's value in `column`; without a column, all rows differ."""
    if column is None:
        return [index.to_bytes(8, "big") for index in range(file.metadata.num_rows)]
    keys: list[bytes] = []
    for batch in batches(file, name, [column]):
        for value in batch.column(0).to_pylist():
            text = json.dumps(_question(value), sort_keys=True, default=str)
            keys.append(hashlib.blake2b(text.encode(), digest_size=16).digest())
    return keys


def _question(value: Any) -> Any:
    """Return a dialogue's messages before the first answer: the same question may have several; other values as they
    are."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return value
    answers = (index for index, message in enumerate(value) if message.get("role") == "assistant")
    return value[: next(answers, len(value))]


if __name__ == "__main__":
    sys.exit(data_script.run(main))
