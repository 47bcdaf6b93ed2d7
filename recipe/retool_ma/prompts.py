"""Prompts of each role, and the rendering of templates.

Invariant: rendering replaces each `{field}` of the role's known fields once and changes nothing else: LaTeX (braces,
backslashes, `$`) is kept as written, and inserted values are not searched for fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from recipe.dag.core.errors import UserError

PLANNER_SYSTEM = "You plan how to solve mathematics problems with a short Python program. You never write the program."
EXECUTOR_SYSTEM = "You turn plans into correct Python programs."
VERIFIER_SYSTEM = "You check the work of others and give the final answer to mathematics problems."
SOLVER_SYSTEM = "You solve mathematics problems and use Python where it helps."
REASONER_SYSTEM = "You solve mathematics problems."

_PLAN_FORMAT = """\
Reply with one JSON object and nothing else. It has three keys, each with a string:
- "reasoning": the idea behind the solution, in a few sentences;
- "code_plan": the steps of the program in order, with the modules and functions to use;
- "expected_output": what the program will print, or "" if you cannot tell."""

PLANNER = f"""\
Plan a Python program that solves this problem. Someone else will write it from your plan alone.

Problem:
{{problem}}

{_PLAN_FORMAT}"""

PLANNER_AGAIN = f"""\
Your plan for this problem did not lead to an answer. Plan again.

Problem:
{{problem}}

Your last plan:
{{planner_plan}}

What its program did:
{{execution_log}}

What has to change:
{{feedback}}

{_PLAN_FORMAT}"""

PLANNER_NEXT = f"""\
The plan did not lead to an answer. Plan again, with the change that was asked for.

{_PLAN_FORMAT}"""
"""The prompts *_NEXT are for a conversation that contains what the role answers to."""

_PROGRAM = """\
Follow the plan. Import every module that you use, such as math or sympy. Print the result and nothing else.
Reply with a single ```python block."""

EXECUTOR = (
    """\
Write the Python program that this plan describes.

Problem:
{problem}

Plan:
{planner_plan}

"""
    + _PROGRAM
)

EXECUTOR_NEXT = f"Write the Python program that the plan describes.\n\n{_PROGRAM}"

_LOG = """\
Execution log:
{execution_log}

Compare plan, code and output, and name everything that does not fit together. Where the output is wrong or missing,
find the answer yourself."""

_REVIEW = (
    """\
A planner and a programmer worked on this problem.

Problem:
{problem}

Plan:
{planner_plan}

"""
    + _LOG
)

_ANSWER = """
Finish with this line:
FINAL ANSWER: \\boxed{value}"""

_OR_REVISE = """
If there can be no answer before the plan changes, finish with this line instead:
REVISE: what to change in the plan"""

VERIFIER, VERIFIER_NEXT = _REVIEW + _ANSWER, _LOG + _ANSWER
VERIFIER_MAY_REVISE, VERIFIER_NEXT_MAY_REVISE = VERIFIER + _OR_REVISE, VERIFIER_NEXT + _OR_REVISE

SOLVER = """\
Solve this problem.

{problem}

To run Python, write one ```python block that prints what you want to know, and stop there; its output is shown to you.
Once you know the answer, write no more code and finish with this line:
FINAL ANSWER: \\boxed{value}"""

REASONER = """\
Solve this problem step by step.

{problem}

Finish with this line:
FINAL ANSWER: \\boxed{value}"""

_ROLES = ("user", "assistant")
_FIELD = re.compile(r"(\{+)([A-Za-z_]\w*)(\}+)")
_LATEX_BEFORE = re.compile(r"(?:\\[A-Za-z]+\*?|[\^_\]])\Z")


def render(template: str, fields: Mapping[str, str], where: str = "prompt") -> str:
    """Return `template` with each `{name}` in `fields` replaced by its value.

    A LaTeX argument such as `\\boxed{value}` or `x_{max}` is kept unless its name is a field. Raises UserError for any
    other `{name}` and for a field in doubled braces; `where` is the option that the message names.
    """
    parts = _parse(template, tuple(fields), where)
    return "".join(fields[part] if is_field else part for part, is_field in parts)


def exchanges(examples: Sequence[Mapping[str, str]], where: str = "examples") -> list[dict[str, str]]:
    """Return few-shot `examples`, each `{user, assistant}`, as messages; fields are not replaced. Raises UserError."""
    if isinstance(examples, str) or not isinstance(examples, Sequence):
        raise UserError(f"{where}: must be a list of {{user: ..., assistant: ...}}")
    for index, example in enumerate(examples):
        texts = example if isinstance(example, Mapping) else {}
        if set(texts) != set(_ROLES) or not all(isinstance(text, str) for text in texts.values()):
            raise UserError(f"{where}[{index}]: must be {{user: ..., assistant: ...}}, two texts")
    return [{"role": role, "content": example[role]} for example in examples for role in _ROLES]


@lru_cache(maxsize=256)
def _parse(template: str, names: tuple[str, ...], where: str) -> tuple[tuple[str, bool], ...]:
    """Split the template into (literal text, False) and (field name, True) parts, in order."""
    parts: list[tuple[str, bool]] = []
    end, latex_end = 0, -1
    for match in _FIELD.finditer(template):
        opened, name, closed = match.groups()
        if name in names:
            if len(opened) > 1 and len(closed) > 1:
                raise UserError(f"{where}: {match.group()} has doubled braces; write {{{name}}}")
            # only the innermost pair of braces is the field's; further ones are literal
            parts.append((template[end : match.end(1) - 1], False))
            parts.append((name, True))
            end = match.start(3) + 1
        # an argument right after a LaTeX argument is one too, as in \frac{a}{b}
        elif match.start() == latex_end or _LATEX_BEFORE.search(template, 0, match.start()):
            latex_end = match.end()
        else:
            known = ", ".join(f"{{{field}}}" for field in names)
            raise UserError(f"{where}: unknown field {match.group()}; the fields here are {known}")
    parts.append((template[end:], False))
    return tuple(parts)
