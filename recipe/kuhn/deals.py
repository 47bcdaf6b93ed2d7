"""Write the games: rows without a problem, since the env deals the cards from the seed of the episode.

    python recipe/kuhn/deals.py --local_dir outputs/kuhn_data [--games 4096]

Invariant: `extra_info.past` says which seat a past self takes in workflow_kuhn_past.yaml: in a quarter of the games the
first, in a quarter the second, in half none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from recipe.dag.train import data_script
from recipe.dag.train.problems import row_of

PAST = ("none", "first", "none", "second")
TEST = 64


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--local_dir", required=True, type=Path, help="where train.parquet and test.parquet go")
    parser.add_argument("--games", type=int, default=4096)
    options = parser.parse_args(argv)
    data_script.write(
        options.local_dir,
        {
            split: [row_of("kuhn", "Play.", "", n, split, past=PAST[n % len(PAST)]) for n in range(size)]
            for split, size in (("train", options.games), ("test", TEST))
        },
    )


if __name__ == "__main__":
    sys.exit(data_script.run(main))
