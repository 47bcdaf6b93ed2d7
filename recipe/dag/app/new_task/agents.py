"""The agents of @name@, and their reward."""

from __future__ import annotations

from verl_dag import Agent, Context, Episode, Message, Output


class Solver(Agent):
    """Answers the problem with a number."""

    def prompt(self, context: Context) -> list[Message]:
        return [{"role": "user", "content": f"{context.problem} Answer with the number."}]

    def parse(self, context: Context) -> Output:
        return Output(parsed={"answer": context.call.text.strip()})


class Checker(Solver):
    """Reads the solver's answer and gives the final one."""

    def prompt(self, context: Context) -> list[Message]:
        answer = context.upstream["solve"].parsed["answer"]
        return [{"role": "user", "content": f"{context.problem} The solver says {answer}. Answer with the number."}]


def score(episode: Episode, *, team: float = 0.5) -> dict[str, float]:
    """Return each agent's reward: 1 for a right answer, and for the solver also `team` if the checker is right.

    `episode.outcome`, from which accuracy is computed, is 1 if the checker is right.
    """
    truth = str(episode.sample["ground_truth"])
    is_right = {call.agent: float(call.parsed["answer"] == truth) for call in episode.calls}
    episode.outcome = is_right["checker"]
    return {"solver": is_right["solver"] + team * is_right["checker"], "checker": is_right["checker"]}
