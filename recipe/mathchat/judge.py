r"""A coach by rule, for runs without a model that can judge: `verl-dag serve --script recipe/mathchat/judge.py:judge`.

Invariant: pure. A score depends on the text of the request alone, which is `coach.txt` rendered for one action: on the
form of the action, on whether its formula uses the problem's numbers and the operations that the problem's words
suggest, on what the programs printed, and on the ground truth, which is there for the verifier only. These rules are as
fallible as a coach is: `(a - c) * b` and `a * b - c` have the same operations, and only the outcome tells them apart.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import NamedTuple

from recipe.dag.coach.sections import sections
from recipe.dag.reward.answer import extract_answer
from recipe.dag.types.markup import python_blocks
from recipe.mathchat.prompts import CODER_TASK

TEMPLATE = "recipe/mathchat/coach.txt"
HEADINGS = (
    "Problem",
    "Agent",
    "What the agent had read",
    "What the agent wrote",
    "What its programs printed",
    "Ground truth",
    "Your score",
)
CUES = (
    (r"\d+ more\b|\bbuys \d+ (?:more|and)\b|\btogether\b|has \d+\. They share", "+"),
    (r"\bgives away\b|\bloses\b|\bsells\b|\bbreak\b", "-"),
    (r"\btimes as many\b|(?<!full )\bboxes of \d+", "*"),
    (r"\bequally\b", "//"),
    (r"\bremain\b|\bleft over\b", "%"),
)
"""Words of a problem, and the operation that they suggest."""

_EXPRESSION = re.compile(r"[(\d](?:[\d\s()]|//|[-+*%])*[)\d]")
_OPERATOR = re.compile(r"//|[-+*%]")
_NUMBER = re.compile(r"\d+")
_FAILED = re.compile(r"\b\w*(?:Error|Exception)\b|\[timeout\]|\[execution error\]|\[unreadable|\[no stdout\]")


class Verdict(NamedTuple):
    process: float
    """From 0 to 10."""
    reasoning: str
    correct: bool | None = None
    """Whether the answer is right; None for an agent that gives none."""


def judge(messages: list[dict[str, str]]) -> str:
    """Return the verdict on the action in the last message, in the lines that `coach.txt` asks for. Raises ValueError
    for a request that is not `coach.txt`."""
    request = sections(messages[-1]["content"], HEADINGS, TEMPLATE)
    judges = {"solver": judge_solver, "coder": judge_coder, "verifier": judge_verifier}
    verdict = judges[request["Agent"]](request)
    lines = [f"REASONING: {verdict.reasoning}", f"PROCESS_SCORE: {verdict.process:g}"]
    if verdict.correct is not None:
        lines.append(f"ANSWER_CORRECT: {int(verdict.correct)}")
    return "\n".join(lines)


def judge_solver(request: Mapping[str, str]) -> Verdict:
    """Score the method: 1 for a formula, and 9 for one that fits the problem."""
    formula = last_formula(request["What the agent wrote"])
    if formula is None:
        return Verdict(0.0, "There is no formula that the coder could compute.")
    fit = fitness(formula, request["Problem"])
    return Verdict(round(1.0 + 9.0 * fit, 1), f"{formula} {'fits' if fit == 1.0 else 'does not fit'} the problem.")


def judge_coder(request: Mapping[str, str]) -> Verdict:
    """Score a program by whether it ran (3) and what it computes (7), a statement by whether a program printed it."""
    wrote, printed = request["What the agent wrote"], request["What its programs printed"]
    earlier = _response(request["What the agent had read"])
    blocks = python_blocks(wrote)
    if not blocks:
        return _judge_statement(wrote, earlier)
    if _FAILED.search(printed) or not _NUMBER.search(printed):
        return Verdict(1.0, "The program printed no result.")
    if earlier and not _FAILED.search(earlier):
        return Verdict(4.0, "A program had printed a result; another one was not needed.")
    computed, asked = last_formula(blocks[-1]), last_formula(_solution(request["What the agent had read"]))
    if computed is None:
        return Verdict(3.0, "The program computes nothing.")
    if computed == asked:
        return Verdict(10.0, "It ran, and computes what the solver wrote.")
    fit = fitness(computed, request["Problem"])
    return Verdict(round(3.0 + 7.0 * fit, 1), f"It ran, but computes {computed}, which the solver did not write.")


def judge_verifier(request: Mapping[str, str]) -> Verdict:
    """Score the answer: right 10; wrong, but what the last program printed 4; wrong otherwise 1; none 0."""
    answer, truth = extract_answer(request["What the agent wrote"]), request["Ground truth"]
    if answer is None:
        return Verdict(0.0, "There is no answer in a box.", correct=False)
    if answer == truth:
        return Verdict(10.0, f"{answer} is right.", correct=True)
    repeats = answer in _NUMBER.findall(request["What the agent had read"].rpartition("program printed:")[2])
    return Verdict(4.0 if repeats else 1.0, f"{answer} is wrong.", correct=False)


def last_formula(text: str) -> str | None:
    """Return the last arithmetic expression with an operator, in Python's own spelling; None without one."""
    for match in reversed(_EXPRESSION.findall(text)):
        try:
            formula = ast.unparse(ast.parse(match.strip(), mode="eval"))  # read, never evaluated
        except (SyntaxError, RecursionError, MemoryError, ValueError):  # too deep, or a number of too many digits
            continue
        if _OPERATOR.search(formula):
            return formula
    return None


def suggested(problem: str) -> set[str]:
    """Return the operations that the words of a problem suggest."""
    return {operator for words, operator in CUES if re.search(words, problem)}


def fitness(formula: str, problem: str) -> float:
    """Return how well a formula fits a problem, from 0 to 1: 0.2 if it uses all numbers, and 0.8 times the square of
    the share of operations that its words suggest, since a method that fits half is of little use."""
    missing = set(_NUMBER.findall(problem)) - set(_NUMBER.findall(formula))
    used, wanted = set(_OPERATOR.findall(formula)), suggested(problem)
    share = len(used & wanted) / len(used | wanted)
    return (0.0 if missing else 0.2) + 0.8 * share**2


def _judge_statement(wrote: str, earlier: str) -> Verdict:
    stated, printed = _NUMBER.findall(wrote), _NUMBER.findall(earlier)
    if not stated:
        return Verdict(0.0, "There is neither a program nor a result.")
    if not earlier or _FAILED.search(earlier):
        return Verdict(1.0, "No program printed this result.")
    if printed and stated[-1] == printed[-1]:
        return Verdict(10.0, "It states what the program printed.")
    return Verdict(1.0, f"The program printed {printed[-1] if printed else 'no number'}.")


def _solution(read: str) -> str:
    """Return the solver's text in what the coder had read."""
    return read.partition("The problem solver wrote:\n")[2].partition("\n\n")[0]


def _response(read: str) -> str:
    """Return what the coder's last programs printed; "" if it had run none. What other agents wrote is before the
    coder's task, and what the coder itself wrote is before the last response."""
    _, mark, response = read.rpartition(CODER_TASK)[2].rpartition("<tool_response>\n")
    return response.partition("\n</tool_response>")[0] if mark else ""
