"""The process in which verifiers of the package reasoning-gym run. It may be killed at any time.

Invariant: as in `grader_worker`: one JSON object per line in, one out, in order. A verifier that raises, or returns
something other than a number from 0 to 1, gives 0: it read a model's text.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from recipe.dag.reward.entry_json import from_json
from recipe.dag.reward.grader_worker import serve


def load() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Import the package and return the function that scores a request {generator, options, entry, prediction}."""
    from reasoning_gym.factory import create_dataset

    @functools.lru_cache(maxsize=64)
    def dataset(generator: str, options: str) -> Any:
        return create_dataset(generator, **from_json(options), size=1, seed=0)

    def answer_to(request: dict[str, Any]) -> dict[str, Any]:
        entry, verifier = from_json(request["entry"]), dataset(request["generator"], request["options"])
        try:
            score = float(verifier.score_answer(request["prediction"], entry))
        except Exception as error:
            return {"score": 0.0, "error": type(error).__name__}
        return {"score": min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0}

    return answer_to


if __name__ == "__main__":
    serve(load, "reasoning-gym")
