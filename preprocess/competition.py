r"""Convert competition problems to parquet: thousands to train on, and contests to validate on.

`python preprocess/competition.py --local_dir data/competition` trains on DeepScaleR (40,000 problems) and validates on
AMC 2023 and AIME 2024. `--train math` uses MATH's 7,500 training problems, `--test math500` MATH-500; both options take
several names. `NAME=FILE` reads a copy of NAME from a file, folder or hub data set: `--test amc23=amc.jsonl`.

No problem occurs in both parts or twice in one; rows without a problem or an answer are left out and counted.
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

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.reward.answer import extract_answer
from recipe.dag.train import data_script
from recipe.dag.train.problems import Item, read_rows, row_of
from verl_dag.preprocess import aime, amc, deepscaler


@dataclass(frozen=True, slots=True)
class Source:
    """A data set on the hub."""

    hub: str
    split: str
    problem: str = "problem"
    answer: str = "answer"
    configurations: tuple[str | None, ...] = (None,)
    clean: Callable[[str], str | None] = str.strip
    """Returns the ground truth in the answer column, or None."""


MATH_PARTS = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory")
SOURCES = {
    "deepscaler": Source(deepscaler.HUB_NAME, "train"),
    "math": Source(
        "EleutherAI/hendrycks_math",
        "train",
        answer="solution",
        configurations=(*MATH_PARTS, "prealgebra", "precalculus"),
        clean=extract_answer,
    ),
    "amc23": Source("math-ai/amc23", "test", problem="question", clean=amc.clean_answer),
    "aime24": Source("HuggingFaceH4/aime_2024", "train", clean=aime.clean_answer),
    "math500": Source("HuggingFaceH4/MATH-500", "test"),
}


def problems_of(text: str) -> tuple[list[tuple[str, Item]], Counter[str]]:
    """Return the (name, problem) pairs of `NAME` or `NAME=FILE`, and the numbers of rejected rows by reason."""
    name, _, path = text.partition("=")
    if name not in SOURCES:
        raise UserError(f"{text}: unknown data set; choose from {', '.join(SOURCES)}, or pass NAME=FILE for a copy")
    rows = [_normalized(row, SOURCES[name]) for row in _rows(SOURCES[name], path)]
    items, rejected = deepscaler.items_of(rows)
    if not items:
        raise UserError(f"{path or SOURCES[name].hub}: no row has a problem and an answer in the columns of {name}")
    return [(name, item) for item in items], rejected


def _rows(source: Source, path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the source, or of its copy in `path` (a file, folder or hub data set)."""
    if path and Path(path).expanduser().is_file():
        yield from read_rows(path, source.split)
        return
    for configuration in source.configurations:
        yield from read_rows(path or source.hub, source.split, configuration, options="NAME=FILE")


def _normalized(row: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return the row as `problem` and `answer` (the ground truth); the columns of a copy may be renamed."""
    problem = row.get(source.problem, row.get("problem", row.get("question")))
    answer = deepscaler.text_of(row.get(source.answer, row.get("answer")))
    return {"problem": problem, "answer": (source.clean(answer) or "") if answer else ""}


def _collect(names: Sequence[str]) -> list[tuple[str, Item]]:
    """Return the (name, problem) pairs of all data sets, without problems of an earlier one."""
    problems: list[tuple[str, Item]] = []
    seen: set[str] = set()
    for name in names:
        part, rejected = problems_of(name)
        for reason, count in sorted(rejected.items()):
            print(f"{name}: left out {counted(count, 'row')} {reason}")
        new = [(source, item) for source, item in part if data_script.text_key(item.problem) not in seen]
        if len(new) < len(part):
            print(f"{name}: left out {counted(len(part) - len(new), 'row')} whose problem is in an earlier data set")
        seen.update(data_script.text_key(item.problem) for _, item in new)
        problems += new
    return problems


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--local_dir", required=True, type=data_script.folder, help="where train.parquet and test.parquet go"
    )
    parser.add_argument("--train", nargs="+", default=["deepscaler"], metavar="NAME[=FILE]", help="default: deepscaler")
    parser.add_argument("--test", nargs="+", default=["amc23", "aime24"], metavar="NAME[=FILE]")
    parser.add_argument("--add_prompt_suffix", default="", help="text put after each problem")
    options = parser.parse_args(argv)
    test = _collect(options.test)
    test_keys = {data_script.text_key(item.problem) for _, item in test}
    candidates = _collect(options.train)
    train = [(name, item) for name, item in candidates if data_script.text_key(item.problem) not in test_keys]
    if len(train) < len(candidates):
        print(f"train: left out {counted(len(candidates) - len(train), 'row')} whose problem is a test problem")
    if not train:
        raise UserError("every training problem is also a test problem; no training row is left")
    data_script.write(
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
    sys.exit(data_script.run(main))
