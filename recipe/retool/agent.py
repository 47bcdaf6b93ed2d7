r"""The ReTool agent: a maths assistant with a code interpreter.

Invariant: an answer is only what the model wrote as its answer, in its last generation: the content of the last
<answer>...</answer>, else of the last \boxed{...} with balanced braces. Neither a tool's text, quoted or invented by
the model, nor a number outside of these is one.
"""

from __future__ import annotations

import re

from recipe.dag import Agent, Call, Context, Message, Output
from recipe.dag.reward.answer import extract_answer
from recipe.dag.reward.outcome import written_in
from recipe.dag.types.markup import prose

SYSTEM = (
    "You are a mathematics assistant with a Python code interpreter. Reason step by step. Whenever a calculation would "
    "help, call the interpreter with a complete program that prints what you need, and read its output before you go "
    "on. Programs do not share variables. When you know the result, call no tool and finish with "
    "<answer>\\boxed{your answer}</answer>."
)

_OF_TOOLS = re.compile(r"<(tool_response|interpreter|code)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
"""Results, quoted or invented, and programs between tags. Without a closing tag they extend to the end."""


class Solver(Agent):
    """Solves a problem in several turns with the interpreter. Its agent needs a `tool_loop`, in format hermes or tags.

    Sets `parsed["answer"]`, None without an answer.
    """

    def prompt(self, context: Context, *, system: str = SYSTEM, suffix: str = "") -> list[Message]:
        """Return the system message (omitted if `system` is empty) and the problem, followed by `suffix`."""
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        return [*messages, {"role": "user", "content": context.problem + suffix}]

    def parse(self, context: Context) -> Output:
        return Output(parsed={"answer": given_answer(context.call)})


def given_answer(call: Call) -> str | None:
    """Return the answer that the model gave in its last generation.

    None if it asked for a tool there, gave no answer, or was cut off inside of its answer.
    """
    if call.ended_in_tool_call:
        return None
    return answer_in(written_in(call), complete=call.stop_reason != "length")


def answer_in(text: str, *, complete: bool = True) -> str | None:
    """Return the answer in a generation without thoughts. `complete`: False if a limit cut the text off."""
    text = prose(_OF_TOOLS.sub("\n", text))
    lower = text.lower()
    if not complete and lower.rfind("<answer>") > lower.rfind("</answer>"):
        return None  # the answer that was cut off would have replaced the earlier ones
    return extract_answer(text, complete=complete, tagged=True)
