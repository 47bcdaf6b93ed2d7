"""Prompts of MathChat's agents.

Invariant: each names the chain of the three agents, the reader's place in it and its token limit. They show to an agent
only what the agents before it handed over; the ground truth is never part of one.
"""

from __future__ import annotations

CHAIN = (
    "Three agents solve a mathematics problem one after the other: a problem solver reasons, a code agent computes "
    "with Python, a verifier gives the answer. The team succeeds only if the verifier's answer is right."
)
LIMIT = "Your response may have at most {tokens} tokens, thoughts included; a longer one is cut off."

SOLVER_SYSTEM = f"{CHAIN} You are the problem solver, the first of them. {LIMIT}"
CODER_SYSTEM = f"{CHAIN} You are the code agent, the second of them. {LIMIT}"
VERIFIER_SYSTEM = f"{CHAIN} You are the verifier, the last of them. {LIMIT}"

SOLVER_TASK = "Work out how to solve it, and write down the formulas that have to be computed."
CODER_TASK = (
    "Check this by computation. Write a complete program in one ```python block that prints what you need, and stop "
    "there; you then read its output. When no program is needed any more, write none and state the result."
)
VERIFIER_TASK = "Check all of it, find the answer yourself where something is wrong, and finish with \\boxed{answer}."

PROBLEM, SOLUTION = "Problem:", "The problem solver wrote:"
CODE, OUTPUT = "The code agent wrote:", "Its last program printed:"
FEEDBACK = "A coach wrote about it:"
MORE = "You may write another program, or state the result."
LAST = "State the result; if another program is needed, the verifier reads its output, and you do not."


def section(title: str, text: str) -> str:
    return f"{title}\n{text}"
