r"""A careless teacher for the ReTool agent on arithmetic problems, for models of a million parameters.

    python -m recipe.retool.teacher --output outputs/NAME/data/sft.parquet --size 768 --test_size 64 --seed 0

Invariant: all randomness comes from the seed; no problem is in the test split. The base model's lessons are plain text
of the task, whose program's output the model invents, and have no tool call. The transcripts of the SFT cold start have
real outputs in the workflow's own prompts; their format is right, and their content wrong: formulas as
`recipe/tiny/careless.py` says, the rest at fixed rates. That leaves reinforcement learning something to improve.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recipe.dag.core.errors import UserError
from recipe.dag.core.paths import shipped
from recipe.dag.episode.make_tools import make_tools
from recipe.dag.episode.toolset import Toolset
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.train.data_script import check_numbers, run
from recipe.dag.types.context import Message
from recipe.dag.types.record import ToolResult
from recipe.dag.workflow.schema import Workflow
from recipe.tiny.arithmetic import Problem, splits
from recipe.tiny.careless import reading, right_formula, value_of
from recipe.tiny.dialogue import Demonstration, Dialogue, Script

SLIP, BROKEN_CODE, WRONG_READING, NO_TOOL = 0.1, 0.08, 0.04, 0.06
"""Rates at which a transcript's program has a random formula where the problem is not misread, or lacks a bracket (then
a second one repairs it), its answer is not the output, or it guesses without a program."""
TOOL_RATE = 0.1
"""Share of the base model's lessons with a tool call; in the others it invents the output."""

WORKFLOW = shipped("workflows/workflow_retool.yaml")
TOOL = "code_interpreter"


class Teacher:
    """Teaches the base model, and writes transcripts. Raises UserError for a workflow that is not one agent with the
    interpreter in a tool loop of the format hermes."""

    def __init__(self, workflow: Workflow, seed: int):
        nodes = workflow.rollout_nodes
        agent = workflow.agent_of(nodes[0])
        names = [str(tool) for tool in agent.tools]
        if len(nodes) != 1 or agent.tool_loop is None or agent.tool_loop.format != "hermes" or names != [TOOL]:
            problem = f"this teacher needs one rollout node, whose agent has `tools: [{TOOL}]` and `tool_loop` hermes"
            raise UserError(f"{workflow.path}: {problem}")
        self._seed, self._rng, self._dialogue = seed, random.Random(seed), Dialogue(workflow)
        self.tools: list[dict[str, Any]] = Toolset(agent, make_tools(workflow, _NO_SANDBOX)).schemas

    @property
    def segments(self) -> tuple[str, ...]:
        """Texts of the tool protocol, each of which becomes one token: the base model has never seen them."""
        schemas = [json.dumps(schema, ensure_ascii=False) for schema in self.tools]
        return (*schemas, CALL_START, *CALL_ENDS, *ERROR_PARTS, *ANSWER_PARTS, "tools\n", "tool\n")

    def problems(self, count: int, test_size: int) -> list[Problem]:
        return splits(self._seed, count, test_size)[0]

    def teach(self, problem: Problem) -> list[Demonstration]:
        """Return a lesson of the base model: a session whose output is part of the text, or rarely a tool call and,
        after its result, the answer."""
        code, answer = right_formula(problem), answer_text(problem.answer)
        if self._rng.random() >= TOOL_RATE:
            return self._demonstrate(problem, f">>> {code}\n{problem.answer}\n{answer}")
        lessons = self._demonstrate(problem, f"{CALL_START}{code}{CALL_ENDS[0]}", answer)
        return [replace(lesson, role=role) for lesson, role in zip(lessons, ("call", "read"), strict=True)]

    def _demonstrate(self, problem: Problem, *generations: str) -> list[Demonstration]:
        async def call_tool(name: str, **arguments: Any) -> ToolResult:
            return ToolResult(name, arguments, "success", f"{problem.answer}\n")

        lessons = asyncio.run(self._dialogue.demonstrate(problem, Script([generations], call_tool)))
        return [replace(lesson, tools=()) for lesson in lessons]  # the base model is not shown the tool

    def transcript(self, problem: Problem) -> list[Message]:
        """Return one dialogue with tool calls and their outputs."""
        return [*self._demonstrate(problem, "")[0].messages, *self._turns(problem)]

    def _turns(self, problem: Problem) -> Iterator[Message]:
        if self._rng.random() < NO_TOOL:
            yield {"role": "assistant", "content": answer_text(self._rng.choice(problem.operands))}
            return
        code = reading(problem, self._rng, SLIP)
        output = value_of(code)
        if self._rng.random() < BROKEN_CODE:
            yield from _tool_turn(f"print({code}", syntax_error(code))
        yield from _tool_turn(f"print({code})", f"{output}\n")
        misread = self._rng.random() < WRONG_READING
        yield {"role": "assistant", "content": answer_text(self._rng.choice(problem.operands) if misread else output)}


_NO_SANDBOX: Any = object()
"""In place of a sandbox's client: the teacher reads the schema of a tool and never calls it."""

CALL_START = f'<tool_call>\n{{"name": "{TOOL}", "arguments": {{"code": "print('
CALL_ENDS = (')"}}\n</tool_call>', '"}}\n</tool_call>')
ERROR_PARTS = (
    '  File "/tmp/tmp_sandbox/tmp_program.py", line 1\n    print(',
    "\n         ^\nSyntaxError: '(' was never closed\n",
)
ANSWER_PARTS = ("<answer>\\boxed{", "}</answer>")


def syntax_error(code: str) -> str:
    """Return the sandbox's text for the program `print(CODE` without its closing bracket."""
    return code.join(ERROR_PARTS)


def answer_text(number: int) -> str:
    return str(number).join(ANSWER_PARTS)


def _tool_turn(code: str, output: str) -> Iterator[Message]:
    """Yield a call of the interpreter and its result."""
    function = {"name": TOOL, "arguments": json.dumps({"code": code})}
    yield {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    yield {"role": "tool", "name": TOOL, "content": output}


def write_transcripts(output: Path, transcripts: Sequence[Sequence[Message]], tools: list[dict[str, Any]]) -> None:
    """Write one row per transcript: `messages`, and `tools` as JSON text. The file appears only when it is complete."""
    rows = [{"messages": list(messages), "tools": json.dumps(tools)} for messages in transcripts]
    partial = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), partial)
        os.replace(partial, output)
    except OSError as error:
        raise UserError(f"{output}: cannot write: {error.strerror or error}; pass another --output") from error
    finally:
        partial.unlink(missing_ok=True)


def transcript_parser(doc: str | None, workflow: Path, size: int, counts: str) -> argparse.ArgumentParser:
    """Return the options of a script that writes transcripts. `counts`: what --size counts."""
    parser = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", required=True, type=Path, help="the parquet file")
    parser.add_argument("--workflow", type=Path, default=workflow)
    parser.add_argument("--size", type=int, default=size, help=counts)
    parser.add_argument("--test_size", type=int, default=64, help="size of the test split, whose problems are left out")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = transcript_parser(__doc__, WORKFLOW, 768, "number of transcripts")
    options = parser.parse_args(argv)
    check_numbers(options)
    teacher = Teacher(load_workflow(options.workflow), options.seed)
    transcripts = [teacher.transcript(problem) for problem in teacher.problems(options.size, options.test_size)]
    write_transcripts(options.output, transcripts, teacher.tools)
    print(f"{len(transcripts)} transcripts -> {options.output}")


if __name__ == "__main__":
    sys.exit(run(main))
