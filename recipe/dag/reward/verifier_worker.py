"""The process in which verifiers of the package reasoning-gym run. It may be killed at any time.

Invariant: as in `grader_worker`: one JSON object per line in, one out, in order. A verifier that raises, or returns
something other than a number from 0 to 1, gives 0: it read a model's text. No verifier evaluates that text as Python:
those that call `eval` get `ast.literal_eval`, and those that call sympy's parser, which is `eval`, get formulas only.
"""

from __future__ import annotations

import ast
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

from recipe.dag.reward.entry_json import from_json
from recipe.dag.reward.grader_worker import serve

LITERALS = {"spiral_matrix", "string_insertion", "binary_matrix", "n_queens"}
"""Generators whose verifiers call `eval` on answers, which are lists."""
FORMULAS = {"simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown"}
"""Generators whose verifiers call sympy's `parse_expr` on answers."""
_FUNCTIONS = (
    "sqrt exp log ln Abs sin cos tan cot sec csc asin acos atan acot sinh cosh tanh asinh acosh atanh Rational"
).split()
_PARTS = ast.Expression | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop | ast.Constant | ast.Name | ast.Load
_PARTS |= ast.Call


def is_formula(text: str) -> bool:
    """Return whether a text consists of numbers, names, operators, brackets and calls of mathematical functions."""
    try:
        nodes = list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in nodes:
        if isinstance(node, ast.Call):
            if node.keywords or not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS:
                return False
        elif isinstance(node, ast.Constant):
            if type(node.value) not in (int, float):
                return False
        elif not isinstance(node, _PARTS):
            return False
    return True


def load() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Import the package and return the function that scores a request {generator, options, entry, prediction}."""
    from reasoning_gym.factory import create_dataset

    @functools.lru_cache(maxsize=64)
    def dataset(generator: str, options: str) -> Any:
        instance = create_dataset(generator, **from_json(options), size=1, seed=0)
        if generator in LITERALS:
            # a global of the module hides the built-in function
            vars(sys.modules[type(instance).__module__])["eval"] = ast.literal_eval
        return instance

    def answer_to(request: dict[str, Any]) -> dict[str, Any]:
        if request["generator"] in FORMULAS and not is_formula(request["prediction"]):
            return {"score": 0.0}
        entry, verifier = from_json(request["entry"]), dataset(request["generator"], request["options"])
        try:
            score = float(verifier.score_answer(request["prediction"], entry))
        except Exception as error:
            return {"score": 0.0, "error": type(error).__name__}
        return {"score": min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0}

    return answer_to


if __name__ == "__main__":
    serve(load, "reasoning-gym")
