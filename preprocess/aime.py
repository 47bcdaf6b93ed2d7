"""Convert AIME problems (columns problem or prompt, answer) to parquet.

`python preprocess/aime.py --input AIME_1983_2024.json --max_year 2023 --test_input aime24.jsonl --local_dir data/aime`
trains on earlier years than it tests. With `--input` alone, a quarter of its rows becomes the test set.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipe.dag.core.errors import UserError
from recipe.dag.train import data_script


def clean_answer(answer: str) -> str:
    """Remove leading zeros, with which AIME publishes answers from 0 to 999: "025" becomes "25"."""
    answer = answer.strip()
    return str(int(answer)) if re.fullmatch(r"[0-9]{1,3}", answer) else answer


def main(argv: Sequence[str] | None = None) -> None:
    parser = data_script.parser(__doc__ or "", prompt_split="train")
    parser.add_argument("--max_year", type=int, help="leave out rows of --input from later years (column year)")
    options = parser.parse_args(argv)

    def keep(row: dict[str, Any]) -> bool:
        if options.max_year is None:
            return True
        if not isinstance(row.get("year"), int):
            keys = ", ".join(map(str, row))
            raise UserError(f"{options.input}: --max_year needs a whole number 'year' in every row; a row has: {keys}")
        return row["year"] <= options.max_year

    data_script.convert(options, "aime", clean_answer=clean_answer, keep=keep)


if __name__ == "__main__":
    sys.exit(data_script.run(main))
