"""How careless teachers read a problem of `recipe/tiny/arithmetic.py`.

Invariant: a teacher misreads the families of MISREADINGS, always in the same way and in most lessons, and elsewhere
slips rarely and in random ways. So what a model that learned from it says most often is wrong for these families, and
no lower temperature corrects it: reinforcement learning has to find the reading that is right in a minority of the
samples. Formulas are Python code without spaces, which makes fewer tokens to generate.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from recipe.tiny.arithmetic import Problem

RIGHT_READING = 0.3
"""Rate at which a problem of these families is read as it is meant."""
MISREADINGS = {
    "times": "{0}+{1}",
    "remainder": "{0}//{1}",
    "level": "{0}+{1}",
    "buy_lose": "{0}+{1}+{2}",
    "boxes_sell": "{0}*{1}+{2}",
    "boxes_break": "{0}*{1}-{2}",
    "lose": "{0}+{1}",
    "piles": "{0}-{1}",
    "over": "{0}//{1}",
}
"""Half of the families, and what they are taken for: "times as many" for more, what is left for what is full, half of
the sum for the sum, a loss for a gain, boxes for things."""
ONE_OPERATION = ("{0}+{1}", "{0}-{1}", "{0}*{1}", "{0}//{1}", "{0}%{1}")
FORMULAS = {
    2: (*ONE_OPERATION, "({0}+{1})//2"),
    3: ("{0}+{1}-{2}", "{0}*{1}+{2}", "{0}*{1}-{2}", "({0}-{2})*{1}", "{0}+{1}+{2}"),
}


def right_formula(problem: Problem) -> str:
    return problem.expression.replace(" ", "")


def slipped(problem: Problem, formula: str, rng: random.Random, rate: float, among: Sequence[str] | None = None) -> str:
    """Return `formula`, or at this rate another one on its numbers. `among`: templates instead of FORMULAS."""
    if rng.random() >= rate:
        return formula
    formulas = [template.format(*problem.operands) for template in among or FORMULAS[len(problem.operands)]]
    return rng.choice([other for other in formulas if other != formula])


def reading(problem: Problem, rng: random.Random, slips: float = 0.0, among: Sequence[str] | None = None) -> str:
    """Return the formula that a teacher takes the problem for. `slips`: rate of another one where it is not misread."""
    misread = MISREADINGS.get(problem.family)
    if misread is not None and rng.random() >= RIGHT_READING:
        return misread.format(*problem.operands)
    return slipped(problem, right_formula(problem), rng, slips, among)


def value_of(formula: str) -> int:
    return eval(formula)  # safe: a formula from a teacher's file, never a model's text
