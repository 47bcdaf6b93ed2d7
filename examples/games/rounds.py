"""Write the rounds of the games. Each has a number, which only the relay's speaker sees; other games ignore it.

    python examples/games/rounds.py --local_dir outputs/games_data [--rounds 240]

Invariant: all remainders modulo 2, 3, 4 and 5 are equally frequent, so no fixed guess is better than another.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from recipe.dag.core.errors import UserError
from recipe.dag.train import data_script
from recipe.dag.train.problems import row_of

PERIOD = 60
"""The least common multiple of 2, 3, 4 and 5."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--local_dir", required=True, type=Path, help="where train.parquet and test.parquet go")
    parser.add_argument("--rounds", type=int, default=4 * PERIOD)
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.rounds % PERIOD:
        raise UserError(f"--rounds {options.rounds}: must be a multiple of {PERIOD}")
    sizes = {"train": options.rounds, "test": PERIOD}
    data_script.write(
        options.local_dir,
        {
            split: [row_of("games", f"Round {index}.", str(index % PERIOD), index, split) for index in range(size)]
            for split, size in sizes.items()
        },
    )


if __name__ == "__main__":
    sys.exit(data_script.run(main))
