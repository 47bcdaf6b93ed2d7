"""Agents of the gallery's teams, with their prompts, and the reward of their answers.

Invariant: agents are stateless. Answers are boxed: `parsed["answer"]` is the content of the last box, and the key is
missing without one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil

from recipe.dag.reward.gold import boxed_answer_is_right, earned_by
from recipe.dag.reward.grader import grade
from recipe.dag.reward.outcome import final_answer, ground_truth
from verl_dag import Agent, Context, Episode, Message, Output, UserError

BOX = "Finish with your answer in \\boxed{}."
_VERDICT = re.compile(r"VERDICT:\W*(CORRECT|WRONG)", re.IGNORECASE)
PART_CHARS = 2000
"""Least length of a part of a document, except its last one."""


class Solver(Agent):
    """Solves the problem; in later rounds of a loop, revises its answer by what was said about it."""

    first = f"Solve the problem step by step. {BOX}"
    later = (
        "You wrote the solution above, and a reviewer commented on it. Decide for each comment whether it is right. "
        f"Correct what is wrong, keep what is right, and write the whole solution again. {BOX}"
    )

    def prompt(self, context: Context) -> list[Message]:
        return _messages(context, self.later if context.round else self.first)

    def parse(self, context: Context) -> Output:
        answer = final_answer(context.call)
        return Output(parsed={} if answer is None else {"answer": answer})


class Aggregator(Solver):
    """Makes one answer of several (Mixture-of-Agents, arXiv 2406.04692)."""

    first = (
        "Above are answers of several people to the problem. Some of them may be wrong or incomplete, so weigh them "
        "critically: compare their steps, find out where they differ and which one is right there. Do not copy an "
        f"answer, and do not count votes; write one solution that is complete and correct. {BOX}"
    )


class Critic(Agent):
    """Finds mistakes without solving the problem (the verifier of MARTI's chain of agents)."""

    instruction = (
        "Check the solution above step by step. For each mistake say where it is, why it is one, and what to do "
        "instead, but do not write a solution or a final answer yourself. Finish with one line: VERDICT: CORRECT or "
        "VERDICT: WRONG."
    )

    def prompt(self, context: Context) -> list[Message]:
        return _messages(context, self.instruction, without=context.node)

    def parse(self, context: Context) -> Output:
        verdicts = _VERDICT.findall(context.call.text)
        return Output(parsed={"right": verdicts[-1].upper() == "CORRECT"} if verdicts else {})


class Refiner(Solver):
    """Writes the final solution from a draft and its review (the last of MARTI's chain of agents)."""

    first = (
        "Above are a draft and a review of it. The review may be wrong, too. Write the final solution: keep what the "
        f"draft has right, and correct its mistakes. {BOX}"
    )


class Reader(Agent):
    """Reads a long document part by part, one in each round of a loop, and keeps notes (Chain of Agents, arXiv
    2406.02818). The document is `extra_info.context` of the sample; there are at most as many parts as rounds."""

    def prompt(self, context: Context) -> list[Message]:
        parts = self._parts(context)
        notes = [call.text for node, call in context.upstream.items() if node == context.node]
        text = f"Question: {context.problem}\n\nNotes so far:\n{notes[-1] if notes else '(none)'}\n\n"
        text += f"Part {context.round + 1} of {len(parts)} of the document:\n{parts[context.round]}\n\n"
        text += (
            "Write the notes again, with everything in this part that may help to answer the question: facts, numbers, "
            "names, and where they contradict each other. Leave out the rest, and do not answer the question yet."
        )
        return [{"role": "user", "content": text}]

    def parse(self, context: Context) -> Output:
        return Output(parsed={"last": context.round + 1 == len(self._parts(context))})

    def _parts(self, context: Context) -> list[str]:
        """Return the document in parts of equal length, cut between words."""
        words = str((context.sample.get("extra_info") or {}).get("context") or "").split()
        length = sum(len(word) + 1 for word in words)
        size = max(PART_CHARS, ceil(length / context.max_rounds))
        parts, start = [[]], 0
        for word in words:
            if start >= size * len(parts):
                parts.append([])
            parts[-1].append(word)
            start += len(word) + 1
        return [" ".join(part) for part in parts]


class Answerer(Solver):
    """Answers from the notes alone."""

    first = f"Above are notes about a document that you cannot see. Answer the question from them. {BOX}"


@earned_by(boxed_answer_is_right)
async def right_answers(
    episode: Episode, *, final: Sequence[str], grade_timeout_s: float = 10.0
) -> dict[str, list[float]]:
    """Return 1 for each call with a right answer, else 0. The last answer of the nodes `final`, agents or votes,
    decides the outcome. Raises GraderFault if an answer cannot be graded."""
    truth = ground_truth(episode)
    moves = [*episode.calls, *episode.results]
    grades: dict[str | None, float] = {None: 0.0}  # equal answers are graded once
    for answer in dict.fromkeys(move.parsed.get("answer") for move in moves):
        if answer is not None:
            grades[answer] = float(await grade(str(answer), truth, timeout_s=grade_timeout_s))
    deciding = [move for move in moves if move.node in final]
    if not deciding:
        raise UserError(f"right_answers: none of the nodes {', '.join(final)} ran; set args.final")
    episode.outcome = grades[max(deciding, key=lambda move: (move.turn, move.round)).parsed.get("answer")]
    agents = dict.fromkeys(call.agent for call in episode.calls)
    return {agent: [grades[call.parsed.get("answer")] for call in episode.calls_of(agent)] for agent in agents}


def _messages(context: Context, instruction: str, *, without: str | None = None) -> list[Message]:
    """Return one message: the problem, the texts of the nodes before this one, the instruction. `without`: a node whose
    text is left out."""
    texts = [f"{node}:\n{call.text}" for node, call in context.upstream.items() if node != without]
    return [{"role": "user", "content": "\n\n".join([f"Problem:\n{context.problem}", *texts, instruction])}]
