"""Write the problems of @name@ as parquet files in verl's schema.

python @folder@/data.py --local_dir outputs/@name@/data
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from recipe.dag.train import data_script
from recipe.dag.train.problems import row_of

PAIRS = [(left, right) for left in range(10) for right in range(10) if left != right]
TEST = PAIRS[::6]
TRAIN = [pair for pair in PAIRS if pair not in TEST]


def question(pair: tuple[int, int]) -> str:
    return f"Which is larger, {pair[0]} or {pair[1]}?"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--local_dir", required=True, type=data_script.folder, help="where train.parquet and test.parquet go"
    )
    options = parser.parse_args(argv)
    files = {
        split: [row_of("@name@", question(pair), str(max(pair)), index, split) for index, pair in enumerate(pairs)]
        for split, pairs in (("train", TRAIN), ("test", TEST))
    }
    data_script.write(options.local_dir, files)


if __name__ == "__main__":
    sys.exit(data_script.run(main))
