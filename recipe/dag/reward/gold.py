"""Whether the right answer can earn its reward: a check of the data, before a run starts.

Invariant: only rewards and envs that declare it (`earned_by`) are checked, since only they say how a ground truth is
graded. A run is refused only where none of the samples looked at can be solved.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from recipe.dag.errors import EnvFault, GraderFault, UserError
from recipe.dag.reward.answer import extract_answer
from recipe.dag.reward.grader import grade

if TYPE_CHECKING:
    from recipe.dag.workflow.schema import Workflow

GoldCheck = Callable[[str], Awaitable[bool]]
"""Ground truth -> whether an agent that knows the answer would be graded right."""
T = TypeVar("T")
SAMPLES = 16
"""Of a data set, evenly spread."""
_WORDS = 20
"""A ground truth with more is taken for a solution."""
_SOLUTION = re.compile(r"\n|####|(?<!^)\\boxed")


def earned_by(check: GoldCheck) -> Callable[[T], T]:
    """Declare of a reward function or an env class that the answer for which `check` is true earns its reward."""

    def declare(target: T) -> T:
        target.gold_check = staticmethod(check) if isinstance(target, type) else check
        return target

    return declare


async def boxed_answer_is_right(truth: str) -> bool:
    """Grade the answer that a ground truth stands for, as agents give it: in a box. Of a solution in prose that is the
    number or the box that it ends with. Raises GraderFault."""
    prose = _SOLUTION.search(truth.strip()) or len(truth.split()) > _WORDS
    answer = extract_answer(truth, strict=False) if prose else extract_answer(f"\\boxed{{{truth}}}")
    return answer is not None and await grade(answer, truth)


async def check_gold(workflow: Workflow, samples: Sequence[dict[str, Any]], what: str) -> None:
    """Raise UserError where no gold answer among `SAMPLES` of the samples earns its reward; warn where some do not.
    `what`: the key that names their file."""
    count = min(SAMPLES, len(samples))
    checked = failed = 0
    example = ""
    for sample in (samples[index * len(samples) // count] for index in range(count)):
        truth = str(sample["ground_truth"])
        for check in _checks(workflow, sample):
            try:
                earned = await check(truth)
            except GraderFault:  # says nothing about the truth
                continue
            checked += 1
            if not earned:
                failed += 1
                example = example or " ".join(truth.split())[:80]
    if not failed:
        return
    text = f"{what}: {failed} of {checked} ground truths looked at are never graded right, such as '{example}'"
    hint = "set data.answer_format, or data.label_key to the column of the answer"
    if failed == checked:
        raise UserError(f"{text}; {hint}")
    print(f"warning: {text}", file=sys.stderr)


def _checks(workflow: Workflow, sample: dict[str, Any]) -> Iterator[GoldCheck]:
    """The checks that a sample's rewards and env declare, each once."""
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
