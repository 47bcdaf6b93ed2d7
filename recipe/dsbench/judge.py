"""A coach by rule, for runs without a model that can judge: `verl-dag serve --script recipe/dsbench/judge.py:judge`.

Invariant: pure. A score depends on the text of the request alone, which is `coach.txt` rendered for one action: on the
files that the action left, on the validation score that its program printed, and on the form of the predictions. The
limits are those of `coach.txt`. It has no truth, and a validation score is as fallible as an estimate on a few rows is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from recipe.dag.coach.sections import sections

TEMPLATE = "recipe/dsbench/coach.txt"
HEADINGS = (
    "Task",
    "Agent",
    "What the agent had read",
    "Its earlier actions",
    "The action that you score",
    "What the folder answered to it",
    "Files",
    "Your score",
)
NEEDS = {"engineer": (), "modeler": ("X_train.pkl", "y_train.pkl"), "analyst": ("X_test.pkl", "model.pkl")}
"""Agent -> the files that it starts from."""
FORMS = (("AUC", "probability"), ("accuracy", "label"))
"""Words of a task's metric, and the form of the predictions that it asks for; any other metric asks for values."""
GOOD_SKILL = 0.75
"""The share of the way from guessing to perfect that counts as all that can be reached."""

ACCURACY_LIMITS = ((0.85, 9.0), (0.75, 8.0), (0.65, 6.0), (0.55, 4.0))
RMSE_LIMITS = ((10.0, 9.0), (25.0, 8.0), (50.0, 6.0))
LOWEST_LIMIT = 3.0
"""Limits of the analyst's score in `coach.txt`: (accuracy at least, limit), (RMSE in percent of the range below,
limit), and the one without a validation score."""

_DECIMAL = r"(\d+(?:\.\d+)?)"
_ACCURACY = re.compile(rf"validation: accuracy {_DECIMAL} \(guessing: {_DECIMAL}\)")
_RMSE = re.compile(rf"validation: rmse {_DECIMAL}% of the range \(guessing: {_DECIMAL}%\)")
_FORM = re.compile(r"^submission\.csv: .* form (\w+)$", re.MULTILINE)


class Validation(NamedTuple):
    """A validation score as the kit prints it."""

    skill: float
    """The way from guessing (0) to perfect (1)."""
    limit: float
    """The highest score of an analyst who uses this model."""


class Verdict(NamedTuple):
    process: float
    """From 0 to 10."""
    reasoning: str


def judge(messages: list[dict[str, str]]) -> str:
    """Return the verdict on the action in the last message, in the lines that `coach.txt` asks for. Raises ValueError
    for a request that is not `coach.txt`."""
    verdict = _verdict(sections(messages[-1]["content"], HEADINGS, TEMPLATE))
    return f"REASONING: {verdict.reasoning}\nPROCESS_SCORE: {verdict.process:g}"


def _verdict(request: Mapping[str, str]) -> Verdict:
    agent, answer = request["Agent"], request["What the folder answered to it"]
    files = dict(line.split(": ", 1) for line in request["Files"].splitlines())
    missing = files["still missing of this agent's"]
    if missing != "none":
        blocked = [name for name in NEEDS[agent] if name not in files["after this action"]]
        if blocked:
            return Verdict(4.0, f"It could not work without {', '.join(blocked)}.")
        return Verdict(1.0, f"It did not make {missing}.")
    read = _validations(request["What the agent had read"])
    if agent == "analyst":
        return _analyst(request["Task"], answer, read[-1].limit if read else LOWEST_LIMIT)
    printed = _validations(answer)
    if not printed:
        return Verdict(4.0, "Its program printed no validation score.")
    # a model is measured by what the features allow, which the engineer's summary says
    reachable = GOOD_SKILL if agent == "engineer" or not read else max(read[0].skill, 0.05)
    reached = min(1.0, max(0.0, printed[-1].skill / reachable))
    return Verdict(round(1.0 + 9.0 * reached, 1), f"It reaches {reached:.0%} of what can be reached here.")


def _analyst(task: str, answer: str, limit: float) -> Verdict:
    forms = _FORM.findall(answer)
    evaluation = next((line for line in task.splitlines() if line.startswith("Evaluation:")), "")
    wanted = next((form for word, form in FORMS if word in evaluation), "value")
    if not forms or forms[-1] != wanted:
        return Verdict(2.0, f"The metric asks for the form {wanted}.")
    return Verdict(limit, "The submission has the form that the metric asks for.")


def _validations(text: str) -> list[Validation]:
    """Return the validation scores in a text, in order."""
    validations = []
    for line in text.splitlines():
        if match := _ACCURACY.search(line):
            value, guess = float(match[1]), float(match[2])
            limit = next((limit for least, limit in ACCURACY_LIMITS if value >= least), LOWEST_LIMIT)
            validations.append(Validation((value - guess) / max(1 - guess, 1e-9), limit))
        elif match := _RMSE.search(line):
            value, guess = float(match[1]), float(match[2])
            limit = next((limit for most, limit in RMSE_LIMITS if value < most), 4.0)
            validations.append(Validation((guess - value) / max(guess, 1e-9), limit))
    return validations
