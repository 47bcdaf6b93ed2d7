"""Convert MATH problems (columns problem or prompt, answer) to parquet; LaTeX answers are kept as written.

`python preprocess/math500.py --input math_test.json --test_size all --local_dir data/math500` writes only a test file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from verl_dag.preprocess import common


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__ or "", prompt_split="test").parse_args(argv)
    common.convert(options, "math500", clean_answer=str.strip)


if __name__ == "__main__":
    sys.exit(common.run(main))
