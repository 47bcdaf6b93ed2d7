"""The process in which math-verify runs. It may be killed at any time.

Invariant: one JSON object per line in, one out, in order; the first line out says whether the library was loaded.
Nothing evaluates text: only math-verify's LaTeX grammar is used, not its expression parser, which calls eval.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import resource
import sys
from collections.abc import Callable
from typing import Any

_MEMORY_BYTES = 4 << 30


def load() -> Callable[[str, str], bool]:
    """Import math-verify and return the function equal(prediction, truth)."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.ERROR)
    config = [LatexExtractionConfig(boxed_match_priority=0)]

    def parsed(text: str) -> list:
        text = re.sub(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi ", text.replace("**", "^"))
        # without its own time limits: they are signals, which a C loop never handles; the parent kills this process
        unlimited: Any = None
        return parse(f"\\boxed{{{text}}}", extraction_config=config, parsing_timeout=unlimited)

    truth_parsed = functools.lru_cache(maxsize=256)(parsed)

    def equal(prediction: str, truth: str) -> bool:
        return bool(verify(truth_parsed(truth), parsed(prediction), timeout_seconds=None))

    equal("\\frac{1}{2}", "0.5")  # warm-up: deferred imports must not count against a time limit
    return equal


def bound_cpu(seconds: float) -> None:
    """Limit CPU time, so that the kernel ends this process if the parent dies during an endless comparison."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + seconds) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def serve(load: Callable[[], Callable[[dict[str, Any]], dict[str, Any]]], package: str) -> None:
    """Answer the requests on stdin with the function that `load` returns; `package` is what it imports."""
    # the protocol keeps the real stdout; anything that a library prints goes to stderr
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(
        resource.RLIMIT_AS, (_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MEMORY_BYTES, hard), hard)
    )
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        answer_to = load()
    except ImportError as error:
        print(json.dumps({"ready": False, "error": str(error), "package": package}), file=out)
        return
    print(json.dumps({"ready": True}), file=out)
    for line in sys.stdin:
        request = json.loads(line)
        bound_cpu(2 * request["timeout_s"] + 5)
        print(json.dumps(answer_to(request)), file=out)


def main() -> None:
    def load_answers() -> Callable[[dict[str, Any]], dict[str, Any]]:
        equal = load()

        def answer_to(request: dict[str, Any]) -> dict[str, Any]:
            try:
                return {"equal": equal(request["prediction"], request["truth"])}
            except Exception as error:
                # an answer that math-verify cannot parse is wrong
                return {"equal": False, "error": type(error).__name__}

        return answer_to

    serve(load_answers, "math-verify")


if __name__ == "__main__":
    main()
