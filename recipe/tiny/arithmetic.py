"""Generate word problems, for runs that need neither a download nor a GPU.

Invariant: a family's wording determines its expression, so each text has one answer, a whole number from 0 to 999. The
same seed gives the same problems, and no training problem has the text, or the family and numbers, of a test problem.

`python recipe/tiny/arithmetic.py --local_dir data/arithmetic --train_size 2048 --test_size 64 --seed 0`
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import add, floordiv, mod, mul, sub
from pathlib import Path

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipe.dag.core.errors import UserError
from recipe.dag.train import data_script
from recipe.dag.train.problems import row_of

NAMES = ("Ann", "Bob", "Cara", "Dan", "Eve", "Finn", "Gina", "Hugo")
THINGS = ("pens", "books", "coins", "stones", "cards", "apples", "cups", "keys")
LARGE, SMALL, ANY, LITTLE = (10, 99), (2, 9), (2, 99), (2, 12)
_MAX_MISSES = 10_000


@dataclass(frozen=True, slots=True)
class Problem:
    text: str
    expression: str
    """Python code whose value is the answer."""
    answer: int
    family: str
    operands: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One wording. The operands a, b, c are drawn from `ranges` (inclusive) until `allowed` accepts them."""

    name: str
    text: str
    expression: str
    solve: Callable[..., int]
    ranges: tuple[tuple[int, int], ...]
    allowed: Callable[..., bool] = lambda *operands: True

    def draw(self, rng: random.Random) -> Problem:
        operands = self._operands(rng)
        numbers = dict(zip("abc", operands, strict=False))
        first, second, third = rng.sample(NAMES, 3)
        text = self.text.format(who=first, other=second, third=third, things=rng.choice(THINGS), **numbers)
        return Problem(text, self.expression.format(**numbers), self.solve(*operands), self.name, operands)

    def _operands(self, rng: random.Random) -> tuple[int, ...]:
        while True:
            operands = tuple(rng.randint(*bounds) for bounds in self.ranges)
            if self.allowed(*operands):
                return operands


FAMILIES = (
    Family(
        "buy",
        "{who} has {a} {things} and buys {b} more. How many now?",
        "{a} + {b}",
        lambda a, b: a + b,
        (LARGE, ANY),
    ),
    Family(
        "give",
        "{who} has {a} {things} and gives away {b}. How many are left?",
        "{a} - {b}",
        lambda a, b: a - b,
        (LARGE, ANY),
        lambda a, b: b <= a,
    ),
    Family(
        "times",
        "{who} has {a} {things}. {other} has {b} times as many. How many has {other}?",
        "{a} * {b}",
        lambda a, b: a * b,
        (LARGE, SMALL),
    ),
    Family(
        "share",
        "{who} shares {a} {things} equally among {b} friends. How many each?",
        "{a} // {b}",
        lambda a, b: a // b,
        (LARGE, SMALL),
        lambda a, b: a % b == 0,
    ),
    Family(
        "remainder",
        "{who} packs {a} {things} into full boxes of {b}. How many remain?",
        "{a} % {b}",
        lambda a, b: a % b,
        (LARGE, SMALL),
    ),
    Family(
        "boxes",
        "{who} buys {a} boxes of {b} {things}. How many {things}?",
        "{a} * {b}",
        lambda a, b: a * b,
        (LARGE, SMALL),
    ),
    Family(
        "buy_lose",
        "{who} has {a} {things}, buys {b} and loses {c}. How many now?",
        "{a} + {b} - {c}",
        lambda a, b, c: a + b - c,
        (LARGE, ANY, ANY),
        lambda a, b, c: c <= a + b,
    ),
    Family(
        "boxes_more",
        "{who} has {a} boxes of {b} {things} and {c} more {things}. How many?",
        "{a} * {b} + {c}",
        lambda a, b, c: a * b + c,
        (LARGE, SMALL, ANY),
    ),
    Family(
        "boxes_sell",
        "{who} packs {a} boxes of {b} {things} and sells {c} {things}. How many left?",
        "{a} * {b} - {c}",
        lambda a, b, c: a * b - c,
        (LARGE, SMALL, ANY),
        lambda a, b, c: c <= a * b,
    ),
    Family(
        "boxes_break",
        "{who} has {a} boxes of {b} {things}. Then {c} boxes break. How many {things}?",
        "({a} - {c}) * {b}",
        lambda a, b, c: (a - c) * b,
        (LARGE, SMALL, ANY),
        lambda a, b, c: c <= a,
    ),
    Family(
        "together",
        "{who} has {a} {things}, {other} has {b}, {third} has {c}. How many together?",
        "{a} + {b} + {c}",
        lambda a, b, c: a + b + c,
        (LARGE, ANY, ANY),
    ),
    Family(
        "level",
        "{who} has {a} {things}, {other} has {b}. They share equally. How many each?",
        "({a} + {b}) // 2",
        lambda a, b: (a + b) // 2,
        (LARGE, ANY),
        lambda a, b: (a + b) % 2 == 0,
    ),
)


def _little(name: str, text: str, operator: str, *, fits: Callable[..., bool] = lambda a, b: True) -> Family:
    solve = {"+": add, "-": sub, "*": mul, "//": floordiv, "%": mod}[operator]
    return Family(name, text, f"{{a}} {operator} {{b}}", solve, (LITTLE, LITTLE), fits)


def _contains(a: int, b: int) -> bool:
    """Accept operands of which the second fits into the first: 4 books fill no box of 6."""
    return b <= a


MENTAL = (
    *(
        replace(family, ranges=(LITTLE, LITTLE))
        for family in FAMILIES
        if family.name in ("buy", "give", "times", "boxes", "share")
    ),
    *(replace(family, ranges=(LITTLE, LITTLE), allowed=_contains) for family in FAMILIES if family.name == "remainder"),
    _little("find", "{who} had {a} {things} and finds {b} more. How many now?", "+"),
    _little("lose", "{who} had {a} {things} and loses {b}. How many now?", "-", fits=_contains),
    _little(
        "piles", "{who} puts {a} {things} into {b} equal piles. How many in each?", "//", fits=lambda a, b: a % b == 0
    ),
    _little("over", "{who} shares {a} {things} among {b} friends. How many are left over?", "%", fits=_contains),
)
"""One operation on small numbers, each in two families: for models that calculate without a tool."""


def generate(
    seed: int,
    n: int,
    exclude: Iterable[Problem] = (),
    families: Sequence[Family] = FAMILIES,
    *,
    distinct_expressions: bool = False,
) -> list[Problem]:
    """Return `n` problems with distinct texts in random order, about equally many of each family.

    No problem has the text, or the family and operands, of one in `exclude`. Raises UserError if too few exist.
    """
    rng = random.Random(seed)
    excluded = {key for problem in exclude for key in (problem.text, (problem.family, problem.operands))}
    texts: set[str] = set()
    expressions: set[str] = set()
    problems: list[Problem] = []
    misses = 0
    while len(problems) < n:
        problem = families[len(problems) % len(families)].draw(rng)
        is_excluded = problem.text in excluded or (problem.family, problem.operands) in excluded
        is_repeated = problem.text in texts or (distinct_expressions and problem.expression in expressions)
        if is_excluded or is_repeated:
            misses += 1
            if misses > _MAX_MISSES + n:
                raise UserError(f"found only {len(problems)} of {n} distinct problems; ask for fewer")
            continue
        texts.add(problem.text)
        expressions.add(problem.expression)
        problems.append(problem)
    rng.shuffle(problems)
    return problems


def splits(seed: int, train_size: int, test_size: int, *, mental: bool = False) -> tuple[list[Problem], list[Problem]]:
    """Return (train, test) as the script writes them; seeds do not share random streams. `mental` test problems have
    distinct expressions, so that training can contain each of them in its other wording."""
    families = MENTAL if mental else FAMILIES
    test = generate(2 * seed, test_size, families=families, distinct_expressions=mental)
    return generate(2 * seed + 1, train_size, exclude=test, families=families), test


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--local_dir", required=True, type=data_script.folder, help="where train.parquet and test.parquet go"
    )
    parser.add_argument("--train_size", type=int, default=2048)
    parser.add_argument("--test_size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mental", action="store_true", help="problems with one operation on numbers from 2 to 12")
    options = parser.parse_args(argv)
    data_script.check_numbers(options)
    train, test = splits(options.seed, options.train_size, options.test_size, mental=options.mental)
    data_script.write(
        options.local_dir,
        {
            split: [
                row_of("arithmetic", p.text, str(p.answer), index, split, family=p.family, expression=p.expression)
                for index, p in enumerate(problems)
            ]
            for split, problems in (("train", train), ("test", test))
        },
    )


if __name__ == "__main__":
    sys.exit(data_script.run(main))
