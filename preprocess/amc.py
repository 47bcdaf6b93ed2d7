"""Convert AMC problems (columns problem, answer) to parquet.

`python preprocess/amc.py --input amc.jsonl --local_dir data/amc` holds out a quarter of the rows as test problems.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipe.dag.train import data_script


def clean_answer(answer: str) -> str:
    """Turn floats that are whole numbers, as AMC is published, into those: "27.0" becomes "27"."""
    return re.sub(r"\A(-?\d+)\.0+\Z", r"\1", answer.strip())


def main(argv: Sequence[str] | None = None) -> None:
    options = data_script.parser(__doc__ or "", prompt_split="train").parse_args(argv)
    data_script.convert(options, "amc", clean_answer=clean_answer)


if __name__ == "__main__":
    sys.exit(data_script.run(main))
