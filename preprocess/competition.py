r"""Thousands of competition problems to train on, and contests to validate on, as parquet.

`python preprocess/competition.py --local_dir data/competition` trains on DeepScaleR (40,000 problems) and validates on
AMC 2023 and AIME 2024. `--train math` takes MATH's 7,500 training problems, `--test math500` MATH-500; several of each
may be named. `NAME=FILE` reads a file, folder or hub data set in the place of NAME's own: `--test amc23=amc.jsonl`.

No problem is in both parts, and none twice in one; rows without a problem or an answer are left out and counted.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from preprocess import aime, amc, common, deepscaler
from recipe.dag.errors import UserError
from recipe.dag.train.ground_truth import boxed
from recipe.dag.train.problems import Item, read_rows, row_of


@dataclass(frozen=True, slots=True)
class Source:
    """A data set of the hub."""

    hub: str
    split: str
    problem: str = "problem"
    answer: str = "answer"
    configurations: tuple[str | None, ...] = (None,)
    clean: Callable[[str], str | None] = str.strip
    """From the answer column to the ground truth; None where it has none."""


MATH_PARTS = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory")
SOURCES = {
    "deepscaler": Source(deepscaler.HUB_NAME, "train"),
    "math": Source(
        "EleutherAI/hendrycks_math",
        "train",
        answer="solution",
        configurations=(*MATH_PARTS, "prealgebra", "precalculus"),
        clean=boxed,
    ),
    "amc23": Source("math-ai/amc23", "test", problem="question", clean=amc.clean_answer),
    "aime24": Source("HuggingFaceH4/aime_2024", "train", clean=aime.clean_answer),
    "math500": Source("HuggingFaceH4/MATH-500", "test"),
}


def problems_of(text: str) -> tuple[list[tuple[str, Item]], Counter[str]]:
    """Return (name, problem) of `NAME` or `NAME=FILE`, and how many rows are left out, by reason."""
    name, _, place = text.partition("=")
    if name not in SOURCES:
        raise UserError(f"{text}: no such data set; choose of {', '.join(SOURCES)}, or NAME=FILE for a copy of one")
    rows = [_plain(row, SOURCES[name]) for row in _rows(SOURCES[name], place)]
    items, left_out = deepscaler.items_of(rows)
    if not items:
        raise UserError(f"{place or SOURCES[name].hub}: no row has a problem and an answer as {name} has them")
    return [(name, item) for item in items], left_out


def _rows(source: Source, place: str) -> Iterator[dict[str, Any]]:
    if place and Path(place).expanduser().is_file():
        yield from read_rows(place, source.split)
        return
    for configuration in source.configurations:
        yield from read_rows(place or source.hub, source.split, configuration, options="NAME=FILE")


def _plain(row: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return the columns `problem` and `answer`, a ground truth; a copy of a data set may have renamed its columns."""
    problem = row.get(source.problem, row.get("problem", row.get("question")))
    answer = deepscaler.text_of(row.get(source.answer, row.get("answer")))
    return {"problem": problem, "answer": (source.clean(answer) or "") if answer else ""}


def _collect(names: Sequence[str]) -> list[tuple[str, Item]]:
    problems: list[tuple[str, Item]] = []
    seen: set[str] = set()
    for name in names:
        part, left_out = problems_of(name)
        for reason, count in sorted(left_out.items()):
            print(f"{name}: left out {count} rows {reason}")
        new = [(source, item) for source, item in part if common.text_key(item.problem) not in seen]
        if len(new) < len(part):
            print(f"{name}: left out {len(part) - len(new)} rows whose problem is in an earlier data set")
        seen.update(common.text_key(item.problem) for _, item in new)
        problems += new
    return problems


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dir", required=True, type=Path, help="where train.parquet and test.parquet go")
    parser.add_argument("--train", nargs="+", default=["deepscaler"], metavar="NAME[=FILE]", help="default: deepscaler")
    parser.add_argument("--test", nargs="+", default=["amc23", "aime24"], metavar="NAME[=FILE]")
    parser.add_argument("--add_prompt_suffix", default="", help="text put after each problem")
    options = parser.parse_args(argv)
    test = _collect(options.test)
    taken = {common.text_key(item.problem) for _, item in test}
    found = _collect(options.train)
    train = [(name, item) for name, item in found if common.text_key(item.problem) not in taken]
    if len(train) < len(found):
        print(f"train: left out {len(found) - len(train)} rows whose problem is a test problem")
    if not train:
        raise UserError("every training problem is also a test problem; no training row is left")
    common.write(
        options.local_dir,
        {
            split: [
                row_of(name, item.problem + options.add_prompt_suffix, item.answer, index, split)
                for index, (name, item) in enumerate(part)
            ]
            for split, part in (("train", train), ("test", test))
        },
    )


if __name__ == "__main__":
    sys.exit(common.run(main))
