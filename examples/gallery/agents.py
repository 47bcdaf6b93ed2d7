"""Shared by the gallery's workflows: an agent that states an answer with its confidence, rewards, two environments."""

from __future__ import annotations

import re
from typing import Any

from verl_dag import Agent, Call, Context, Episode, Message, Output

_ANSWER = re.compile(r"(-?\d+)(?: \((\d+) %\))?")


class Guesser(Agent):
    """Answers with a number and, in brackets, its confidence: `42 (80 %)`."""

    def prompt(self, context: Context) -> list[Message]:
        lines = [context.problem]
        lines += [f"{node} said: {call.handed}" for node, call in context.upstream.items()]
        lines += [f"The game says: {context.obs}"] if context.obs else []
        return [{"role": "user", "content": "\n".join([*lines, "Answer with a number, and how sure you are in %."])}]

    def parse(self, context: Context) -> Output:
        match = _ANSWER.search(context.call.handed)  # with `hand_over: answer`, no number of a thought
        if match is None:
            return Output(parsed={})
        return Output(parsed={"answer": match[1], "confidence": int(match[2] or 100) / 100})


class Judge(Agent):
    """Says whether the answer of the node before it is right: `YES` or `NO`. It does not see the solution."""

    def prompt(self, context: Context) -> list[Message]:
        answers = "\n".join(call.text for call in context.upstream.values())
        question = f"{context.problem}\n\nAnswer of a student:\n{answers}\n\nIs it right? Reply YES or NO."
        return [{"role": "user", "content": question}]

    def parse(self, context: Context) -> Output:
        words = re.findall(r"\b(YES|NO)\b", context.call.text.upper())
        return Output(parsed={"right": words[-1] == "YES"} if words else {})


class Scorer(Agent):
    """Scores the answer of the node before it from 0 to 10. It does not see the solution."""

    def prompt(self, context: Context) -> list[Message]:
        answers = "\n".join(call.text for call in context.upstream.values())
        question = (
            f"{context.problem}\n\nAnswer of a student:\n{answers}\n\nHow good is it? Reply with a number, 0 to 10."
        )
        return [{"role": "user", "content": question}]

    def parse(self, context: Context) -> Output:
        scores = [int(number) for number in re.findall(r"\d+", context.call.text) if int(number) <= 10]
        return Output(parsed={"score": scores[-1]} if scores else {})


def judged(episode: Episode) -> dict[str, float | None]:
    """Return 1 for the solver if the judge says that it is right, 0 if it says that it is not; a verdict that cannot be
    read scores nothing (None). The outcome is the truth, not the verdict."""
    answer, verdict = episode.calls
    episode.outcome = _is_right(answer, episode)
    right = (verdict.parsed or {}).get("right")
    return {answer.agent: None if right is None else float(right), verdict.agent: 0.0}


def jury(episode: Episode) -> dict[str, float | None]:
    """Return the share of the judges that say that the solver is right; a verdict that is missing or cannot be read
    does not count, and without any the answer is not scored (None). The outcome is the truth, not the verdict."""
    answer, *verdicts = episode.calls
    episode.outcome = _is_right(answer, episode)
    votes = [verdict.parsed["right"] for verdict in verdicts if "right" in (verdict.parsed or {})]
    share = sum(votes) / len(votes) if votes else None
    return {answer.agent: share} | {verdict.agent: 0.0 for verdict in verdicts}


def right(episode: Episode) -> dict[str, list[float]]:
    """Return 1 for each call with a right answer, else 0. The last call decides the episode's outcome."""
    rewards: dict[str, list[float]] = {}
    for call in episode.calls:
        rewards.setdefault(call.agent, []).append(_is_right(call, episode))
    episode.outcome = rewards[episode.calls[-1].agent][-1]
    return rewards


def accuracy(episode: Episode, *, node: str | None = None) -> dict[str, float]:
    """Pay nothing, and set the outcome: whether the answer of the last call, or of the last one of `node`, is right."""
    episode.outcome = _is_right([call for call in episode.calls if node in (None, call.node)][-1], episode)
    return {}


def surer(first: Episode, second: Episode) -> float | None:
    """Return 1 if the solver was surer in the first episode, 0 if in the second, 0.5 if it was equally sure in both."""
    one, two = (episode.calls[0].parsed.get("confidence") for episode in (first, second))
    if one is None or two is None:
        return None
    return 0.5 if one == two else float(one > two)


def short(episode: Episode) -> dict[str, list[float]]:
    """Return up to 1 for each call, the more the shorter its text; used in addition to `right`."""
    rewards: dict[str, list[float]] = {}
    for call in episode.calls:
        rewards.setdefault(call.agent, []).append(max(0.0, 1.0 - len(call.text) / 200))
    return rewards


def team(episode: Episode, *, node: str | None = None) -> dict[str, float]:
    """Return the same reward for all agents: 1 if the last answer, or the last one of `node`, is right, else 0."""
    accuracy(episode, node=node)
    return {call.agent: episode.outcome or 0.0 for call in episode.calls}


def graded(episode: Episode) -> dict[str, float]:
    """Set the outcome, whether the verifier's answer is right, and pay nothing."""
    episode.outcome = next(
        (_is_right(call, episode) for call in reversed(episode.calls) if call.agent == "verifier"), 0.0
    )
    return {}


def last(episode: Episode) -> dict[str, float]:
    """Return 1 for the last agent if its answer is right, and 0 for the others, to whom the estimator propagates it."""
    final_call = episode.calls[-1]
    episode.outcome = _is_right(final_call, episode)
    return {call.agent: 0.0 for call in episode.calls} | {final_call.agent: episode.outcome}


def _is_right(call: Call, episode: Episode) -> float:
    return float((call.parsed or {}).get("answer") == str(episode.sample["ground_truth"]))


def confidence(context: Context) -> float | None:
    """Return how sure a candidate is of its answer; None without an answer. Needs no ground truth."""
    return context.call.parsed.get("confidence")


def most_sure(context: Context) -> Output:
    """Return the most confident answer of the nodes before this compute node."""
    answers = [call.parsed for call in context.upstream.values() if call.parsed]
    best = max(answers, key=lambda parsed: parsed["confidence"], default={})
    return Output(text=str(best.get("answer", "")), parsed=best)


class Higher:
    """A game in which the last agent guesses a number, and all see whether the number is higher."""

    word = "higher"

    def step(self, actions: list[str], ground_truth: Any) -> tuple[list[str], list[float], bool, dict[str, Any]]:
        """Return each agent's observation and reward, whether the game is over, and the distance as info."""
        match = _ANSWER.search(actions[-1])
        guess, number = int(match[1]) if match else 0, int(ground_truth)
        is_right = guess == number
        rewards = [0.0] * (len(actions) - 1) + [float(is_right)]
        observation = "right" if is_right else self.hint(guess, number)
        return [observation] * len(actions), rewards, is_right, {"distance": abs(guess - number)}

    def hint(self, guess: int, number: int) -> str:
        is_true = (number > guess) == (self.word == "higher")
        return self.word if is_true else f"not {self.word}"


class Lower(Higher):
    """The same game with the opposite hint."""

    word = "lower"
