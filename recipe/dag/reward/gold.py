"""Check before a run that the ground truths of its data earn their reward.

Invariant: only rewards and envs with a declared check (`earned_by`) are checked, since only these define how a ground
truth is graded. A run is refused only if none of the checked samples can be solved.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from recipe.dag.core.errors import EnvFault, GraderFault, UserError
from recipe.dag.reward.answer import extract_answer
from recipe.dag.reward.grader import grade

if TYPE_CHECKING:
    from recipe.dag.workflow.schema import Workflow

GoldCheck = Callable[[str], Awaitable[bool]]
"""Returns True for a ground truth if an agent that answers with it is graded as right."""
T = TypeVar("T")
SAMPLES = 16
"""Number of samples of a data set to check, evenly spaced."""
_WORDS = 20
"""A ground truth with more words is treated as a solution in prose."""
_SOLUTION = re.compile(r"\n|####|(?<!^)\\boxed")


def earned_by(check: GoldCheck) -> Callable[[T], T]:
    """Declare for a reward function or an env class that an answer earns its reward if `check` is true for it."""

    def declare(target: T) -> T:
        # a plain function in a class would become a method
        declared = staticmethod(check) if isinstance(target, type) else check
        target.gold_check = declared  # pyright: ignore[reportAttributeAccessIssue]  # a new attribute
        return target

    return declare


async def boxed_answer_is_right(truth: str) -> bool:
    """Grade the answer in a ground truth, boxed as agents write it; for a solution in prose, the box or number that it
    ends with. Raises GraderFault."""
    prose = _SOLUTION.search(truth.strip()) or len(truth.split()) > _WORDS
    answer = extract_answer(truth, strict=False) if prose else extract_answer(f"\\boxed{{{truth}}}")
    return answer is not None and await grade(answer, truth)


async def check_gold(workflow: Workflow, samples: Sequence[dict[str, Any]], what: str) -> None:
    """Raise UserError if no ground truth among `SAMPLES` of the samples earns its reward; print a warning if some do
    not. `what`: the configuration key of their file."""
    count = min(SAMPLES, len(samples))
    checked = failed = 0
    example = ""
    for sample in (samples[index * len(samples) // count] for index in range(count)):
        truth = str(sample["ground_truth"])
        for check in _checks(workflow, sample):
            try:
                earned = await check(truth)
            except GraderFault:  # says nothing about the ground truth
                continue
            checked += 1
            if not earned:
                failed += 1
                example = example or " ".join(truth.split())[:80]
    if not failed:
        return
    text = f"{what}: {failed} of {checked} ground truths that were checked are never graded right, such as '{example}'"
    hint = "set data.answer_format, or set data.label_key to the column of the answer"
    if failed == checked:
        raise UserError(f"{text}; {hint}")
    print(f"warning: {text}", file=sys.stderr)


def _checks(workflow: Workflow, sample: dict[str, Any]) -> Iterator[GoldCheck]:
    """Yield the checks that a sample's rewards and env declare, each once."""
    from recipe.dag.episode.env_class import choose_env, load_env
    from recipe.dag.episode.reward import load_rewards

    targets: list[Any] = [node.function for node in load_rewards(workflow)]
    for node in workflow.rollout_nodes:
        try:
            name = choose_env(node, sample)
        except EnvFault:
            continue
        if name is not None:
            targets.append(load_env(name, workflow).cls)
    checks = [getattr(target, "gold_check", None) for target in targets]
    yield from dict.fromkeys(check for check in checks if check is not None)
