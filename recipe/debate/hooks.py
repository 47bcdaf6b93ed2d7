"""The hooks and the reward of a debate: everybody answers in a box, and is paid for a right answer.

Invariant: a hook is stateless; it shows the problem, what the nodes before it said, and what to do. `parsed["answer"]`
is what stands in the last box, and absent where there is none, so that an empty answer agrees with nobody.
"""

from __future__ import annotations

from recipe.dag import Agent, Context, Episode, Message, Output, UserError
from recipe.dag.reward.gold import boxed_answer_is_right, earned_by
from recipe.dag.reward.grader import grade
from recipe.dag.reward.outcome import final_answer, ground_truth

BOX = "Finish with your answer in \\boxed{}."


class _Speaker(Agent):
    instruction: str

    def prompt(self, context: Context, *, instruction: str | None = None) -> list[Message]:
        """`instruction` replaces the built-in one."""
        return _messages(context, self.instruction if instruction is None else instruction)

    def parse(self, context: Context) -> Output:
        answer = final_answer(context.call)
        return Output(parsed={} if answer is None else {"answer": answer})


class Solver(_Speaker):
    instruction = f"Solve the problem step by step. {BOX}"


class Judge(_Speaker):
    instruction = f"Weigh what was said and decide which answer is right. {BOX}"


class Debater(_Speaker):
    """Speaks for one of the solvers."""

    def prompt(
        self,
        context: Context,
        *,
        mine: str,
        instruction: str = "Look for mistakes in what was said, then defend the answer of {mine} unless it is wrong.",
    ) -> list[Message]:
        """`mine`: the node whose answer it defends."""
        return _messages(context, f"{instruction.replace('{mine}', mine)} {BOX}")


@earned_by(boxed_answer_is_right)
async def right_answers(
    episode: Episode, *, judge: str = "judge", grade_timeout_s: float = 10.0
) -> dict[str, list[float]]:
    """1.0 for every call whose answer is right, 0.0 for the others; what the node `judge` answers last is the outcome.
    Raises GraderFault."""
    truth = ground_truth(episode)
    verdicts: dict[str | None, float] = {None: 0.0}
    for answer in dict.fromkeys(call.parsed.get("answer") for call in episode.calls):
        if answer is not None:
            verdicts[answer] = float(await grade(answer, truth, timeout_s=grade_timeout_s))
    decided = [call for call in episode.calls if call.node == judge]
    if not decided:
        names = ", ".join(dict.fromkeys(call.node for call in episode.calls)) or "none"
        raise UserError(
            f"right_answers: node '{judge}' made no call; nodes that did: {names}; set executable_kwargs.judge"
        )
    episode.outcome = verdicts[decided[-1].parsed.get("answer")]
    episode.info.update(answer=decided[-1].parsed.get("answer") or "", rounds=1 + max(c.round for c in episode.calls))
    agents = dict.fromkeys(call.agent for call in episode.calls)
    return {a: [verdicts[call.parsed.get("answer")] for call in episode.calls_of(a)] for a in agents}


def _messages(context: Context, instruction: str) -> list[Message]:
    """Where the conversation goes on (`memory: chat`), the other side's reply stands for all that was said before."""
    calls = {node: call for node, call in context.upstream.items() if call.turn == context.turn}
    if context.continues:
        calls = {node: call for node, call in calls.items() if call.agent == context.agent and node != context.node}
    problem = [] if context.continues else [context.problem]
    said = [f"{node} said:\n{call.text}" for node, call in calls.items()]
    return [{"role": "user", "content": "\n\n".join([*problem, *said, instruction])}]
