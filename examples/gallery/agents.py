"""What the gallery's workflows share: an agent that says an answer and how sure it is, rewards, two environments."""

from __future__ import annotations

import re
from typing import Any

from recipe.dag import Agent, Context, Episode, Message, Output

_SAID = re.compile(r"(-?\d+)(?: \((\d+) %\))?")


class Guesser(Agent):
    """Answers with a number and, in brackets, how sure it is: `42 (80 %)`."""

    def prompt(self, context: Context) -> list[Message]:
        lines = [context.problem]
        lines += [f"{node} said: {call.text}" for node, call in context.upstream.items()]
        lines += [f"The game says: {context.obs}"] if context.obs else []
        return [{"role": "user", "content": "\n".join([*lines, "Answer with a number, and how sure you are in %."])}]

    def parse(self, context: Context) -> Output:
        found = _SAID.search(context.call.text)
        if found is None:
            return Output(parsed={})
        return Output(parsed={"answer": found[1], "confidence": int(found[2] or 100) / 100})


def right(episode: Episode) -> dict[str, list[float]]:
    """1 for each call whose answer is right. The last call's is the episode's."""
    truth, paid = str(episode.sample["ground_truth"]), {}
    for call in episode.calls:
        paid.setdefault(call.agent, []).append(float((call.parsed or {}).get("answer") == truth))
    episode.outcome = paid[episode.calls[-1].agent][-1]
    return paid


def short(episode: Episode) -> dict[str, list[float]]:
    """Up to 1 for a short answer, a reward of its own beside `right`."""
    paid: dict[str, list[float]] = {}
    for call in episode.calls:
        paid.setdefault(call.agent, []).append(max(0.0, 1.0 - len(call.text) / 200))
    return paid


def team(episode: Episode) -> dict[str, float]:
    """One and the same for all: whether the last answer is right."""
    truth, last = str(episode.sample["ground_truth"]), episode.calls[-1]
    episode.outcome = float((last.parsed or {}).get("answer") == truth)
    agents = dict.fromkeys(call.agent for call in episode.calls)
    return dict.fromkeys(agents, episode.outcome)


def last(episode: Episode) -> dict[str, float]:
    """For estimators that hand rewards on themselves: the last agent's answer is paid, and nothing else."""
    truth, call = str(episode.sample["ground_truth"]), episode.calls[-1]
    episode.outcome = float((call.parsed or {}).get("answer") == truth)
    return {other.agent: 0.0 for other in episode.calls} | {call.agent: episode.outcome}


def most_sure(context: Context) -> Output:
    """A compute node: the answer of the surest of the nodes before it."""
    said = [call.parsed for call in context.upstream.values() if call.parsed]
    best = max(said, key=lambda parsed: parsed["confidence"], default={})
    return Output(text=str(best.get("answer", "")), parsed=best)


class Higher:
    """Says after each guess whether the number is higher; over when it is right."""

    word = "higher"

    def step(self, actions: list[str], ground_truth: Any) -> tuple[list[str], list[float], bool, dict[str, Any]]:
        found = _SAID.search(actions[-1])
        guess, number = int(found[1]) if found else 0, int(ground_truth)
        done = guess == number
        told = "right" if done else self.word if (number > guess) == (self.word == "higher") else f"not {self.word}"
        rewards = [0.0] * (len(actions) - 1) + [float(done)]
        return [told] * len(actions), rewards, done, {"distance": abs(guess - number)}


class Lower(Higher):
    """The same game, told the other way round."""

    word = "lower"
