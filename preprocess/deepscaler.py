"""Convert DeepScaleR's problems (columns problem, answer, solution) to parquet, each with a request for a boxed answer.

`python preprocess/deepscaler.py --local_dir data/deepscaler` reads agentica-org/DeepScaleR-Preview-Dataset from the
hub; `--input FILE` reads JSON, JSON Lines or parquet. Rows without a problem or an answer are left out and counted.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.train import data_script
from recipe.dag.train.problems import Item, read_rows, row_of

HUB_NAME = "agentica-org/DeepScaleR-Preview-Dataset"
INSTRUCTION = " Reason step by step, and put the final answer in \\boxed{}."


def items_of(rows: list[dict[str, Any]]) -> tuple[list[Item], Counter[str]]:
    """Return the usable problems, and the numbers of rejected rows by reason."""
    items: list[Item] = []
    rejected: Counter[str] = Counter()
    seen: dict[str, str] = {}  # problem without spacing and case -> answer
    for row in rows:
        problem, answer = text_of(row.get("problem")), text_of(row.get("answer"))
        key = data_script.text_key(problem)
        if not problem or not answer:
            rejected["without a problem" if not problem else "without an answer"] += 1
        elif key in seen:
            same_answer = seen[key] == answer
            rejected["with a repeated problem" if same_answer else "with a repeated problem and another answer"] += 1
        else:
            seen[key] = answer
            items.append(Item(problem, answer, row))
    return items, rejected


def text_of(value: Any) -> str:
    """Return text without surrounding space, or a number in plain notation; "" for anything else."""
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        number = Decimal(str(value))
        value = f"{number:f}" if number.is_finite() else ""
    return value.strip() if isinstance(value, str) else ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--local_dir", required=True, type=data_script.folder, help="where train.parquet and test.parquet go"
    )
    parser.add_argument("--input", default=HUB_NAME, help="JSON, JSON Lines or parquet file, or hub data set")
    parser.add_argument("--name", help="configuration of a hub data set")
    parser.add_argument("--prompt_split", default="train", help="split of a hub data set")
    parser.add_argument("--test_size", type=data_script.test_size, default=500, help="rows to hold out, or 'all'")
    parser.add_argument("--max_samples", type=int, help="use the first rows only")
    parser.add_argument("--instruction", default=INSTRUCTION, help="text put after each problem")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of held-out rows")
    options = parser.parse_args(argv)
    data_script.check_numbers(options)
    items, rejected = items_of(read_rows(options.input, options.prompt_split, options.name)[: options.max_samples])
    for reason, count in sorted(rejected.items()):
        print(f"left out {counted(count, 'row')} {reason}")
    if not items:
        raise UserError(f"{options.input}: no row has text in both columns, 'problem' and 'answer'")
    train, test = data_script.hold_out(items, options.test_size, options.seed)
    data_script.write(
        options.local_dir,
        {
            split: [
                row_of(
                    "deepscaler",
                    item.problem + options.instruction,
                    item.answer,
                    index,
                    split,
                    solution=text_of(item.source.get("solution")),
                )
                for index, item in enumerate(part)
            ]
            for split, part in (("train", train), ("test", test))
        },
    )


if __name__ == "__main__":
    sys.exit(data_script.run(main))
