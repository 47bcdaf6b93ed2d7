"""A careless teacher for MathChat's three agents on arithmetic problems, and transcripts of it.

    python -m recipe.mathchat.teacher --output outputs/NAME/data/sft.parquet --size 512 --test_size 64 --seed 0

Models of a million parameters learn from the teacher itself (`recipe.tiny.build`), pretrained ones from transcripts, in
which the coaches speak, too: they give the verdicts of the rule judge, which makes a small model a coach.

Invariant: all randomness comes from the seed, and no problem is in the test split. The format is right, and the content
wrong: formulas as `recipe/tiny/careless.py` says, the rest at fixed rates, in each agent independently of the others.
That leaves reinforcement learning something to improve and makes an episode's outcome a noisy signal for each of them.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.core.paths import shipped
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.train.data_script import check_numbers, run
from recipe.dag.types.context import Message
from recipe.dag.types.record import ToolResult
from recipe.dag.workflow.schema import Workflow
from recipe.mathchat.judge import judge
from recipe.retool.teacher import transcript_parser, write_transcripts
from recipe.tiny.arithmetic import Problem, splits
from recipe.tiny.careless import reading, slipped, value_of
from recipe.tiny.dialogue import Demonstration, Dialogue, Script

SLIP, OTHER_CODE, BROKEN_CODE, WRONG_RESULT, WRONG_ANSWER = 0.1, 0.25, 0.15, 0.2, 0.3
"""Rates at which the solver picks a random formula where it does not misread the problem, the code agent computes
another one, omits a bracket, states a number that its program did not print, and the verifier answers with a number of
the problem."""

WORKFLOW = shipped("workflows/workflow_mathchat.yaml")
NODES = ("solve", "code", "verify")
SYNTAX_ERROR = "SyntaxError: '(' was never closed"


class Teacher:
    """Demonstrates workflow_mathchat. Raises UserError for a workflow without the nodes solve, code and verify, or
    whose node `code` has fewer than two rounds."""

    def __init__(self, workflow: Workflow, seed: int, *, coaches: bool = False):
        """`coaches`: the workflow's other nodes, which must be coaches with `coach.txt`, speak, too."""
        self._names = [node.id for node in workflow.rollout_nodes]
        rounds = max((loop.max_rounds for loop in workflow.loops.values() if "code" in loop.nodes), default=1)
        if not set(NODES) <= set(self._names) or rounds < 2:
            needed = f"the rollout nodes {', '.join(NODES)}, and a loop of 2 rounds or more around `code`"
            raise UserError(f"{workflow.path}: this teacher needs {needed}")
        self._seed, self._rng, self._dialogue = seed, random.Random(seed), Dialogue(workflow)
        loops = {name for loop in workflow.loops.values() for name in loop.nodes}
        coach_nodes = [name for name in self._names if coaches and name not in NODES]
        self._verdicts = {name: [judge, judge] if name in loops else judge for name in coach_nodes}

    def problems(self, count: int, test_size: int) -> list[Problem]:
        return splits(self._seed, count, test_size)[0]

    def teach(self, problem: Problem) -> list[Demonstration]:
        """Return one demonstration per call of an episode: four, since the code agent always acts twice, and one per
        verdict."""
        answers = self._answers(problem) | self._verdicts
        moves: list[Any] = [answers.get(name) for name in self._names]
        script = Script(moves, run_program)
        return asyncio.run(self._dialogue.demonstrate(problem, script))

    def _answers(self, problem: Problem) -> dict[str, Any]:
        formula = reading(problem, self._rng, SLIP)
        code = slipped(problem, formula, self._rng, OTHER_CODE)
        result = str(value_of(code))
        if self._rng.random() < BROKEN_CODE:
            acts = [program_text(code, closing=""), program_text(code)]
        else:
            acts = [program_text(code), f"Result: {self._misread(problem, result, WRONG_RESULT)}"]
        answer = self._misread(problem, result, WRONG_ANSWER)
        return {"solve": f"Compute {formula}", "code": acts, "verify": f"\\boxed{{{answer}}}"}

    def _misread(self, problem: Problem, result: str, rate: float) -> str:
        return str(self._rng.choice(problem.operands)) if self._rng.random() < rate else result


def transcripts(lessons: Sequence[Demonstration]) -> Iterator[list[Message]]:
    """Yield one dialogue per conversation of an episode: the code agent's actions are one."""
    for lesson in lessons:
        if lesson.role != "code" or lesson.round:
            yield [*lesson.messages, {"role": "assistant", "content": lesson.answer}]


def program_text(code: str, closing: str = ")") -> str:
    return f"```python\nprint({code}{closing}\n```"


async def run_program(name: str, *, code: str, **options: Any) -> ToolResult:
    """Return the sandbox's result for one of this file's programs."""
    formula = code.strip().removeprefix("print(")
    if formula.count("(") == formula.count(")"):  # the opening bracket is gone, so this one is never closed
        where = f'  File "/tmp/tmp_sandbox/tmp_program.py", line 1\n    print({formula}\n         ^\n'
        return ToolResult(name, {}, "failed", where + SYNTAX_ERROR, stderr=where + SYNTAX_ERROR, return_code=1)
    output = f"{value_of(formula.removesuffix(')'))}\n"
    return ToolResult(name, {}, "success", output, stdout=output, return_code=0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = transcript_parser(__doc__, WORKFLOW, 512, "number of episodes, of eight dialogues each")
    options = parser.parse_args(argv)
    check_numbers(options)
    teacher = Teacher(load_workflow(options.workflow), options.seed, coaches=True)
    problems = teacher.problems(options.size, options.test_size)
    dialogues = [dialogue for problem in problems for dialogue in transcripts(teacher.teach(problem))]
    write_transcripts(options.output, dialogues, tools=[])
    print(f"{len(dialogues)} transcripts -> {options.output}")


if __name__ == "__main__":
    sys.exit(run(main))
