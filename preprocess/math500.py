"""Convert MATH problems (columns problem or prompt, answer) to parquet; LaTeX answers are kept as written.

`python preprocess/math500.py --input math_test.json --test_size all --local_dir data/math500` writes only a test file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipe.dag.train import data_script


def main(argv: Sequence[str] | None = None) -> None:
    options = data_script.parser(__doc__ or "", prompt_split="test").parse_args(argv)
    data_script.convert(options, "math500", clean_answer=str.strip)


if __name__ == "__main__":
    sys.exit(data_script.run(main))
