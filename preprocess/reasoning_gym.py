"""Generate problems with a generator of the package reasoning-gym, to be scored by its own verifier.

`pip install reasoning-gym`, then
`python preprocess/reasoning_gym.py --generator chain_sum --local_dir data/chain_sum max_terms=4`: the last arguments
are the generator's options, as key=value (JSON values). `--list` prints the generators, with `--generator NAME` its
options.
Reward node: `reward: recipe.dag.reward.verifier:verifier_reward`.

Before anything is written, the verifier is tried: it must give full marks to the answers of the generator, and none to
texts that answer nothing; a generator whose verifier pays for `nan` or for any text is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.reward.entry_json import from_json, to_json
from recipe.dag.reward.verifier import KEY, scored
from recipe.dag.train import data_script
from recipe.dag.train.problems import row_of

INSTRUCTION = "\nWrite only the final answer between <answer> and </answer>."
JUNK = ("nan", "qz no answer 7")
"""Texts that answer no problem; a wrong answer may be right by chance, these never are."""
_TRIED = 8
"""Problems on which a verifier is tried."""


def generators() -> dict[str, tuple[Any, type]]:
    """Return (data set class, configuration class) by name, without those that combine others. Raises UserError."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError("reasoning-gym is not installed; pip install reasoning-gym") from error
    return {name: entry for name, entry in DATASETS.items() if name != "composite"}


def options_of(arguments: Sequence[str], generator: str) -> dict[str, Any]:
    """Parse key=value arguments. Raises UserError for an option that the generator does not have."""
    known = [
        field.name for field in dataclasses.fields(generators()[generator][1]) if field.name not in ("seed", "size")
    ]
    options: dict[str, Any] = {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator:
            raise UserError(f"{argument}: unexpected argument; options of the generator are key=value")
        if key not in known:
            raise UserError(f"{argument}: {generator} has no option {key}; it has {', '.join(known) or 'none'}")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def entries_of(generator: str, options: dict[str, Any], size: int, seed: int) -> list[dict[str, Any]]:
    """Return `size` problems of a generator. Raises UserError for options that it refuses."""
    from reasoning_gym.factory import create_dataset

    try:
        dataset = create_dataset(generator, size=size, seed=seed, **options)
        return [dataset[index] for index in range(size)]
    except Exception as error:  # the generators' failures have no common type
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{generator}: cannot generate: {reason[:200]}; see its options with --list") from error


def problem_of(generator: str, options: str, entry: dict[str, Any]) -> dict[str, str]:
    """Return what the verifier needs to score an answer. Raises UserError if it cannot be stored."""
    try:
        text = to_json(entry)
    except TypeError as error:
        raise UserError(f"{generator}: its problems cannot be stored: {error}; choose another generator") from error
    if from_json(text) != entry:
        raise UserError(f"{generator}: its problems change when they are stored; choose another generator")
    return {"generator": generator, "options": options, "entry": text}


async def check_verifier(generator: str, problems: Sequence[dict[str, str]], answers: Sequence[Any]) -> None:
    """Try the verifier on a few problems. Raises UserError if it pays for a text without an answer, or does not give
    full marks to the generator's answers (None: the generator has none)."""
    for text in JUNK:
        scores = [await scored(problem, text, 30.0) for problem in problems]
        if sum(scores) > len(scores) / 2:
            paid = f"its verifier gives {sum(scores) / len(scores):.2f} of 1 on average to the text '{text}'"
            raise UserError(f"{generator}: {paid}, so a model would learn to write that; choose another generator")
    for problem, answer in zip(problems, answers, strict=True):
        if answer is not None and await scored(problem, str(answer), 30.0) < 1:
            short = " ".join(str(answer).split())[:60]
            raise UserError(f"{generator}: its verifier gives less than 1 to its own answer '{short}'; choose another")


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    known = generators()
    if options.generator is not None and options.generator not in known:
        raise UserError(
            f"--generator {options.generator}: unknown; python preprocess/reasoning_gym.py --list names them"
        )
    if options.list:
        print("\n".join(_fields(known[options.generator][1]) if options.generator else sorted(known)))
        return
    if options.generator is None or options.local_dir is None:
        raise UserError("--generator and --local_dir are needed, or --list")
    name, settings = options.generator, options_of(options.option, options.generator)
    test = entries_of(name, settings, options.test_size, 2 * options.seed)
    train = entries_of(name, settings, options.train_size, 2 * options.seed + 1)
    stored = to_json(settings)
    tried = test[:_TRIED]
    problems = [problem_of(name, stored, entry) for entry in tried]
    asyncio.run(check_verifier(name, problems, [entry["answer"] for entry in tried]))
    taken = {data_script.text_key(entry["question"]) for entry in test}
    distinct = {key: entry for entry in train if (key := data_script.text_key(entry["question"])) not in taken}
    if len(distinct) < len(train):
        print(f"train: left out {counted(len(train) - len(distinct), 'problem')} repeated or among the test problems")
    if not distinct:
        raise UserError(f"{name}: every training problem is a test problem; widen its options, or pass another --seed")
    data_script.write(
        options.local_dir,
        {
            split: [
                row_of(
                    name,
                    entry["question"] + options.instruction,
                    "" if entry["answer"] is None else str(entry["answer"]),
                    index,
                    split,
                    **{KEY: problem_of(name, stored, entry)},
                )
                for index, entry in enumerate(part)
            ]
            for split, part in (("train", distinct.values()), ("test", test))
        },
    )


def _fields(config: type) -> list[str]:
    """Return `name = default` of each option of a generator."""
    lines = []
    for field in dataclasses.fields(config):
        if field.name not in ("seed", "size"):
            factory = field.default_factory
            default = factory() if factory is not dataclasses.MISSING else field.default
            lines.append(f"{field.name} = {default}")
    return lines


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generator", help="name of the generator")
    parser.add_argument("--local_dir", type=data_script.folder, help="where train.parquet and test.parquet go")
    parser.add_argument("--train_size", type=data_script.positive, default=1000, help="default: 1000")
    parser.add_argument("--test_size", type=data_script.positive, default=100, help="default: 100")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--instruction", default=INSTRUCTION, help="text put after each problem")
    parser.add_argument("--list", action="store_true", help="print the generators, or the options of --generator")
    parser.add_argument("option", nargs="*", metavar="key=value", help="option of the generator")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(data_script.run(main))
