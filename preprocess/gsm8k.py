"""Convert GSM8K's problems (columns question, answer) to parquet; the ground truth follows #### in the answer.

`python preprocess/gsm8k.py --local_dir data/gsm8k` reads the splits train and test of openai/gsm8k from the hub;
`--input train.jsonl --test_input test.jsonl` reads files, `--name socratic` the hub's other configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipe.dag.core.errors import UserError
from recipe.dag.train import data_script
from recipe.dag.train.ground_truth import after_hashes

HUB_NAME = "openai/gsm8k"


def clean_answer(answer: str) -> str:
    """Return the answer without the rationale before it. Raises UserError if #### is missing."""
    truth = after_hashes(answer)
    if truth is None:
        raise UserError(f"an answer without a line that starts with ####: '{' '.join(answer.split())[:60]}'")
    return truth


def main(argv: Sequence[str] | None = None) -> None:
    options = data_script.parser(__doc__ or "", prompt_split="train", hub_name=HUB_NAME).parse_args(argv)
    if options.test_input is None and options.test_size is None and not Path(options.input).is_file():
        options.test_input, options.test_prompt_split = options.input, options.test_prompt_split or "test"
    data_script.convert(options, "gsm8k", clean_answer=clean_answer)


if __name__ == "__main__":
    sys.exit(data_script.run(main))
