"""Parts of the scripts that make data files: options, splitting problems, writing parquet.

Invariant: nothing is written before every row has been read and checked, and a file under its final name is complete.
Rows have verl's schema: data_source, prompt, ability, reward_model{style, ground_truth}, extra_info{index, split, ...}.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.core.problem import mistakes_reported
from recipe.dag.train.problems import ANSWER_KEYS, PROBLEM_KEYS, Item, read_rows, row_of, to_items

T = TypeVar("T")


def run(main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> int:
    """Run a script's `main` and return the exit code; a UserError is printed as one line, with exit code 2."""
    return mistakes_reported(lambda: main(argv) or 0)()


def parser(description: str, prompt_split: str, hub_name: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark's script. `hub_name`: default of --input, else required."""
    args = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    sources = "JSON, JSON Lines or parquet file, hub data set (owner/name) or a folder laid out like one"
    args.add_argument("--input", required=hub_name is None, default=hub_name, help=sources)
    args.add_argument("--local_dir", required=True, type=folder, help="where train.parquet and test.parquet go")
    args.add_argument("--test_input", help="test problems; by default, --test_size rows of --input are held out")
    args.add_argument("--test_size", type=test_size, help="rows to hold out, or 'all'; by default a quarter")
    args.add_argument("--input_key", help=f"column of the problem; by default one of {', '.join(PROBLEM_KEYS)}")
    args.add_argument("--label_key", help=f"column of the answer; by default one of {', '.join(ANSWER_KEYS)}")
    args.add_argument("--name", help="configuration of a hub data set; by default its main one")
    args.add_argument("--prompt_split", default=prompt_split, help="split of a hub data set")
    args.add_argument("--test_prompt_split", help="split of a hub --test_input; by default --prompt_split")
    args.add_argument("--max_samples", type=positive, help="use the first rows of --input only")
    args.add_argument("--add_prompt_suffix", default="", help="text put after each problem")
    args.add_argument("--seed", type=int, default=0, help="seed of the choice of held-out rows")
    return args


def check_numbers(options: argparse.Namespace) -> None:
    """Raise UserError for a size below 1 or a negative seed."""
    for name in ("train_size", "test_size", "size", "max_samples", "seed"):
        value, lowest = getattr(options, name, None), 0 if name == "seed" else 1
        if isinstance(value, int) and value < lowest:
            raise UserError(f"--{name} {value}: must be {lowest} or more")


def convert(
    options: argparse.Namespace,
    data_source: str,
    *,
    clean_answer: Callable[[str], str] = str,
    keep: Callable[[dict[str, Any]], bool] = lambda row: True,
) -> None:
    """Read, check, split and write the rows, given the parsed `options` of `parser`. `keep` filters rows of --input."""
    keys = (options.input_key, options.label_key)
    rows = read_rows(options.input, options.prompt_split, options.name)
    items = to_items(rows, options.input, *keys, clean_answer)
    items = [item for item in items if keep(item.source)][: options.max_samples]
    if not items:
        raise UserError(f"{options.input}: no row is left after filtering")
    if options.test_input:
        if options.test_size is not None:
            raise UserError("--test_size and --test_input cannot be combined; remove one of them")
        test_rows = read_rows(options.test_input, options.test_prompt_split or options.prompt_split, options.name)
        test = to_items(test_rows, options.test_input, *keys, clean_answer)
    else:
        items, test = hold_out(items, options.test_size, options.seed)
    train = without(items, test)
    if len(train) < len(items):
        print(f"train: left out {counted(len(items) - len(train), 'row')} whose problem is a test problem")
    if options.test_input and not train:
        raise UserError(f"{options.input}: every problem is also in {options.test_input}; no training row is left")
    write(
        options.local_dir,
        {
            split: [
                row_of(data_source, item.problem + options.add_prompt_suffix, item.answer, index, split)
                for index, item in enumerate(part)
            ]
            for split, part in (("train", train), ("test", test))
        },
    )


def hold_out(items: list[T], test_size: int | str | None, seed: int) -> tuple[list[T], list[T]]:
    """Return (train, test) in the input's order. The test rows depend only on `seed` and the numbers of rows."""
    count = len(items)
    if test_size == "all":
        return [], list(items)
    size = max(1, count // 4) if test_size is None else int(test_size)
    if size >= count:
        raise UserError(f"{size} test rows of {count} leave none to train on; pass a smaller --test_size, or 'all'")
    test_indices = set(random.Random(seed).sample(range(count), size))
    train = [item for index, item in enumerate(items) if index not in test_indices]
    return train, [item for index, item in enumerate(items) if index in test_indices]


def without(items: list[Item], others: list[Item]) -> list[Item]:
    """Return the items whose problem is not in `others`, ignoring spacing and letter case."""
    taken = {text_key(item.problem) for item in others}
    return [item for item in items if text_key(item.problem) not in taken]


def write(local_dir: Path, splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write one parquet file per non-empty split, all or none, and print the number of rows of each."""
    targets = {split: local_dir / f"{split}.parquet" for split in splits}
    parts = [split for split, rows in splits.items() if rows]
    with new_files([targets[split] for split in parts], "--local_dir") as files:
        for split, file in zip(parts, files, strict=True):
            pq.write_table(pa.Table.from_pylist(list(splits[split])), file)
    for split, rows in splits.items():
        stale = f", {targets[split]} of an earlier run stays" if not rows and targets[split].exists() else ""
        written = f"{counted(len(rows), 'row')} -> {targets[split]}"
        print(f"{split}: {written}" if rows else f"{split}: 0 rows, not written{stale}")


@contextmanager
def new_files(targets: Sequence[Path], option: str) -> Iterator[list[BinaryIO]]:
    """Yield a file to write for each target. They get their names together, when the block ends without an exception.

    `option`: where the user sets the folder, for the error message. Raises UserError if the files cannot be written.
    """
    temporary = [target.with_name(f".{target.name}.{os.getpid()}.tmp") for target in targets]
    files: list[BinaryIO] = []
    folder = targets[0].parent if targets else None
    try:
        for target, path in zip(targets, temporary, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir():
                raise IsADirectoryError(0, f"{target} is a folder")
            files.append(path.open("wb"))
        yield files
        for file in files:
            file.flush()
            os.fsync(file.fileno())  # some file systems report a full disk only here
            file.close()
        for target, path in zip(targets, temporary, strict=True):
            os.replace(path, target)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{folder}: cannot write: {reason}; free space there or pass another {option}") from error
    finally:
        for file in files:
            with suppress(OSError):  # closing flushes, which fails again on a full disk
                file.close()
        for path in temporary:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def text_key(problem: str) -> str:
    """Return the problem without spaces and in lower case, to compare problems by."""
    return "".join(problem.lower().split())


def folder(text: str) -> Path:
    """Parse --local_dir. A name of a data file is a misunderstanding: a folder of that name would be made."""
    if Path(text).suffix in (".parquet", ".json", ".jsonl"):
        raise argparse.ArgumentTypeError(f"'{text}' names a file; pass the folder for the parquet files")
    return Path(text)


def positive(text: str) -> int:
    """Parse an option that is a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of 1 or more")
    return int(text)


def test_size(text: str) -> int | str:
    """Parse --test_size: a number of rows or 'all'."""
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is neither a number of rows nor 'all'")
    return text if text == "all" else int(text)
