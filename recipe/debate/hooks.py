"""Agents and reward of a debate: each agent answers in a box and is paid for a right answer.

Invariant: agents are stateless; a prompt consists of the problem, the texts of earlier nodes and an instruction.
`parsed["answer"]` is the content of the last box; without a box the key is missing, so that agents without an answer do
not count as agreeing.
"""

from __future__ import annotations

from recipe.dag import Agent, Context, Episode, Message, Output
from recipe.dag.reward.gold import boxed_answer_is_right, earned_by
from recipe.dag.reward.grader import grade
from recipe.dag.reward.outcome import final_answer, ground_truth, last_call

BOX = "Finish with your answer in \\boxed{}."


class _Speaker(Agent):
    """Follows an instruction and answers in a box."""

    instruction: str

    def prompt(self, context: Context, *, instruction: str | None = None) -> list[Message]:
        """Return the prompt; `instruction` replaces the built-in one."""
        return _messages(context, self.instruction if instruction is None else instruction)

    def parse(self, context: Context) -> Output:
        answer = final_answer(context.call)
        return Output(parsed={} if answer is None else {"answer": answer})


class Solver(_Speaker):
    """Solves the problem."""

    instruction = f"Solve the problem step by step. {BOX}"


class Judge(_Speaker):
    """Reads the whole debate and decides."""

    instruction = f"Weigh what was said and decide which answer is right. {BOX}"


class Debater(_Speaker):
    """Defends the answer of one of the solvers."""

    def prompt(
        self,
        context: Context,
        *,
        mine: str,
        instruction: str = "Look for mistakes in what was said, then defend the answer of {mine} unless it is wrong.",
    ) -> list[Message]:
        """Return the prompt. `mine`: the node whose answer is defended, for `{mine}` in the instruction."""
        return _messages(context, f"{instruction.replace('{mine}', mine)} {BOX}")


@earned_by(boxed_answer_is_right)
async def right_answers(
    episode: Episode, *, judge: str = "judge", grade_timeout_s: float = 10.0
) -> dict[str, list[float]]:
    """Return 1.0 for each call with a right answer, else 0.0. The last answer of node `judge` sets the outcome.

    Raises GraderFault if an answer cannot be graded.
    """
    truth = ground_truth(episode)
    grades: dict[str | None, float] = {None: 0.0}  # equal answers are graded once
    for answer in dict.fromkeys(call.parsed.get("answer") for call in episode.calls):
        if answer is not None:
            grades[answer] = float(await grade(answer, truth, timeout_s=grade_timeout_s))
    decision = last_call(episode, "node", judge, "right_answers", "judge").parsed.get("answer")
    episode.outcome = grades[decision]
    episode.info.update(answer=decision or "", rounds=1 + max(call.round for call in episode.calls))
    agents = dict.fromkeys(call.agent for call in episode.calls)
    return {agent: [grades[call.parsed.get("answer")] for call in episode.calls_of(agent)] for agent in agents}


def _messages(context: Context, instruction: str) -> list[Message]:
    """Return one message: the problem, this turn's texts of earlier nodes, the instruction."""
    calls = {node: call for node, call in context.upstream.items() if call.turn == context.turn}
    parts = [context.problem]
    if context.continues:
        # `memory: chat`: the conversation already has the rest; only the other side's reply is new
        calls = {node: call for node, call in calls.items() if call.agent == context.agent and node != context.node}
        parts = []
    parts += [f"{node} said:\n{call.text}" for node, call in calls.items()]
    return [{"role": "user", "content": "\n\n".join([*parts, instruction])}]
