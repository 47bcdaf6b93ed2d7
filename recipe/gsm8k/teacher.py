"""A careless teacher for solver and checker, which also writes the transcripts of a cold start.

    python -m recipe.gsm8k.teacher --output outputs/NAME/data/sft.parquet --size 512 --test_size 64 --seed 0

Invariant: the format is always right, and the content wrong: both read the problem as `recipe/tiny/careless.py` says,
the solver errs at a fixed rate, and each often repeats the other. That leaves reinforcement learning something to
improve.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence

from recipe.dag.core.paths import shipped
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.train.data_script import check_numbers, run
from recipe.retool.teacher import transcript_parser, write_transcripts
from recipe.tiny.arithmetic import Problem
from recipe.tiny.dialogue import Demonstration, Script
from recipe.tiny.mental import MentalTeacher

WORKFLOW = shipped("workflows/workflow_gsm8k.yaml")
WRONG_FIRST, REPEATED = 0.15, 0.5
"""Rates at which a solver answers with a number of the problem, and at which an answer repeats the one before."""


class Teacher(MentalTeacher):
    """Demonstrates two turns of workflow_gsm8k."""

    nodes = ("solve", "check")

    def teach(self, problem: Problem) -> list[Demonstration]:
        turns, last = [], ""
        for _ in range(2):
            said = self.say(problem, last)
            turns.append(Script([f"\\boxed{{{said[node]}}}" for node in self.nodes]))
            last = said["check"]
        return asyncio.run(self._dialogue.demonstrate(problem, *turns))

    def say(self, problem: Problem, earlier: str = "") -> Mapping[str, str]:
        """Return the answers of one turn. `earlier`: the last one of the turn before."""
        solved = self._after(problem, earlier)
        if not earlier and self._rng.random() < WRONG_FIRST:
            solved = str(self._rng.choice(problem.operands))
        return {"solve": solved, "check": self._after(problem, solved)}

    def _after(self, problem: Problem, earlier: str) -> str:
        return earlier if earlier and self._rng.random() < REPEATED else self.reading(problem)


def main(argv: Sequence[str] | None = None) -> None:
    parser = transcript_parser(__doc__, WORKFLOW, 512, "number of episodes, of four dialogues each")
    options = parser.parse_args(argv)
    check_numbers(options)
    teacher = Teacher(load_workflow(options.workflow), options.seed)
    lessons = [
        lesson for problem in teacher.problems(options.size, options.test_size) for lesson in teacher.teach(problem)
    ]
    dialogues = [[*lesson.messages, {"role": "assistant", "content": lesson.answer}] for lesson in lessons]
    write_transcripts(options.output, dialogues, tools=[])
    print(f"{len(dialogues)} transcripts -> {options.output}")


if __name__ == "__main__":
    sys.exit(run(main))
