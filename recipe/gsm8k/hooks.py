"""A solver and a checker, usually of different models, who exchange texts.

Invariant: agents are stateless; a prompt consists of the problem, the other's latest text (in later turns also the
agent's own) and an instruction. Texts are made inert for the model that reads them, whose control tokens differ from
the writer's.
"""

from __future__ import annotations

from recipe.dag import Agent, Context, Episode, Message, Output
from recipe.dag.reward.gold import boxed_answer_is_right, earned_by
from recipe.dag.reward.outcome import final_answer
from recipe.debate.hooks import BOX, right_answers


class _Speaker(Agent):
    def parse(self, context: Context) -> Output:
        answer = final_answer(context.call)
        return Output(parsed={} if answer is None else {"answer": answer})


class Solver(_Speaker):
    """Solves the problem, and after a check solves it again."""

    def prompt(self, context: Context) -> list[Message]:
        if not context.upstream:
            return _messages(context, f"Solve the problem step by step. {BOX}")
        return _messages(context, f"Correct your solution, or repeat it if it is right. {BOX}")


class Checker(_Speaker):
    """Checks the solution of this turn, and gives the right answer."""

    def prompt(self, context: Context) -> list[Message]:
        return _messages(context, f"Look for mistakes in the solution. {BOX}", this_turn=True)


@earned_by(boxed_answer_is_right)
async def team_answers(episode: Episode, *, judge: str = "check") -> dict[str, list[float]]:
    """Return for each call the number of right answers in its turn; the last answer of `judge` sets the outcome."""
    own = await right_answers(episode, judge=judge)
    calls = {agent: episode.calls_of(agent) for agent in own}
    turns: dict[int, float] = {}
    for agent, rewards in own.items():
        for call, reward in zip(calls[agent], rewards, strict=True):
            turns[call.turn] = turns.get(call.turn, 0.0) + reward
    return {agent: [turns[call.turn] for call in calls[agent]] for agent in own}


def _messages(context: Context, instruction: str, *, this_turn: bool = False) -> list[Message]:
    calls = [call for call in context.upstream.values() if call.turn == context.turn or not this_turn]
    said = [f"{call.agent} wrote:\n{context.inert(call.text)}" for call in calls]
    return [{"role": "user", "content": "\n\n".join([context.problem, *said, instruction])}]
