"""What the agents of @name@ are asked, how their answers are read, and what they earn."""

from __future__ import annotations

from recipe.dag import Agent, Context, Episode, Message, Output


class Solver(Agent):
    def prompt(self, context: Context) -> list[Message]:
        return [{"role": "user", "content": f"{context.problem} Answer with the number."}]

    def parse(self, context: Context) -> Output:
        return Output(parsed={"answer": context.call.text.strip()})


class Checker(Solver):
    """Sees what the solver said."""

    def prompt(self, context: Context) -> list[Message]:
        said = context.upstream["solve"].parsed["answer"]
        return [{"role": "user", "content": f"{context.problem} The solver says {said}. Answer with the number."}]


def score(episode: Episode, *, team: float = 0.5) -> dict[str, float]:
    """Pay each agent 1 for a right answer, and the solver `team` for a right decision of the checker. The checker's
    answer is the episode's, from which accuracy is computed."""
    truth = str(episode.sample["ground_truth"])
    right = {call.agent: float(call.parsed["answer"] == truth) for call in episode.calls}
    episode.outcome = right["checker"]
    return {"solver": right["solver"] + team * right["checker"], "checker": right["checker"]}
