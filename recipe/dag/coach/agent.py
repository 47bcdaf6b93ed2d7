"""The coach: an agent that scores the latest action of another node.

Invariant: a verdict is what the coach wrote, on its template's scale, or {"failed": reason}; there is no third form.
The truth is in a prompt only if the workflow declares it for the judged agent. No text that a coach is shown can end
its message: control tokens in it are broken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import Field

from recipe.dag.coach.evidence import Keep, evidence
from recipe.dag.coach.score import Score, parse
from recipe.dag.coach.template import PromptTemplate
from recipe.dag.coach.unreadable import coach_nodes, unreadable
from recipe.dag.core.errors import PromptTooLong, SkipCall, UserError
from recipe.dag.core.frozen import Frozen
from recipe.dag.core.paths import find_source, resolve_path, split_ref
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.episode.failure import NO_ROOM
from recipe.dag.loading.workflow_file import load_draft, refuse
from recipe.dag.types.agent import Agent
from recipe.dag.types.context import Context, Message, Output
from recipe.dag.types.record import Call
from recipe.dag.workflow.node import Node
from recipe.dag.workflow.parse_model import parse_piece
from recipe.dag.workflow.schema import Workflow

REFORMAT = (
    "I could not read a score in your reply. Do not judge anew: state the judgement of your reply in this form, "
    "and nothing else:\n{lines}"
)
_OPTIONS: KeyPath = ("prompt_options",)
_ARGS = "args"
Mistake = tuple[str, KeyPath, str]
"""The node with the mistake, the path of the value in the node, and the error message."""
_LINES = {"process": "PROCESS_SCORE: <a number from 0 to {scale:g}>", "outcome": "ANSWER_CORRECT: <0 or 1>"}


class Coach(Agent):
    """Judges the latest action of the node `judges`; its node comes after that one, and is in the same loop if it is
    to judge every round.

    The verdict is `parsed = {"process": 0..scale or None, "outcome": 0..1 or None, "reasoning": text}`, or
    `{"failed": reason}`.
    """

    class Options(Frozen):
        """The `prompt_options` of a coach's node."""

        judges: str
        """The id of the judged node."""
        template: str
        """The file of the prompt, in Jinja's language (template.py)."""
        truth_for: tuple[str, ...] = ()
        """The agents whose coach is shown the ground truth."""
        keep: Keep = Keep()
        scale: float = Field(default=10.0, gt=0.0, allow_inf_nan=False)
        """The highest PROCESS_SCORE."""
        feedback: bool = False
        """Show the verdicts to the agents of the same loop in the next round, and to all agents in the next turn. Nodes
        that name this one in `after` see them in any case."""
        outcome: bool | None = None
        """Ask once more if neither OUTCOME_SCORE nor ANSWER_CORRECT can be read; by default where the judged agent is
        in `truth_for`."""

    options: Options
    _judged: str
    """The judged node's id."""
    _template: PromptTemplate
    _wants_outcome: bool

    def prepare(self, workflow: Workflow, node: Node) -> None:
        """Read the template and check the options. Raises UserError."""
        for name, path, message in self.mistakes(workflow, node):
            keys = [str(part) for part in path if part not in (*_OPTIONS, _ARGS)]
            raise UserError(": ".join((f"{workflow.path}: node {name}", *keys, message)))

    def mistakes(self, workflow: Workflow, node: Node) -> Iterator[Mistake]:
        """Read the template, and yield the mistakes of the options, of the template and of the rewards."""
        options, judged = self.options, _judged_node(self.options.judges, workflow, node)
        if message := _cannot_judge(judged, workflow, node):
            yield node.id, (*_OPTIONS, "judges"), message
            return
        coach, agent = workflow.agent_of(node), workflow.agent_of(workflow.node(judged))
        if coach.policy in workflow.trained_policies():
            message = (
                f"its policy `{coach.policy}` is trained, and a coach's is not; give agent `{coach.name}` a policy"
            )
            yield node.id, (), f"{message} with `frozen: true` or `api`"
        names = [agent.name for agent in workflow.agents]
        for index, name in enumerate(options.truth_for):
            if name not in names:
                yield node.id, (*_OPTIONS, "truth_for", index), f"no agent `{name}`{did_you_mean(name, names)}"
        self.private, self._judged = not options.feedback, judged
        self._wants_outcome = agent.name in options.truth_for if options.outcome is None else options.outcome
        yield from self._mistakes_of_rewards(node.id, workflow)
        try:
            path = resolve_path(options.template, workflow.path)
            self._template = PromptTemplate(path, agent=agent.name, role=agent.role or agent.name)
        except UserError as error:
            yield node.id, (*_OPTIONS, "template"), str(error)

    def prompt(self, context: Context) -> list[Message]:
        """Return one message, the rendered template. Raises SkipCall if there is no action to judge."""
        return [{"role": "user", "content": self._rendered(context)}]

    async def parse(self, context: Context) -> Output:
        """Return the verdict; an answer that cannot be read is asked for once more, in the right form."""
        call = context.call
        if not call.generations:
            return Output(parsed={"failed": NO_ROOM})
        answer = call.text
        score = self._read(answer, call)
        if missing := self._missing(score):
            reason = unreadable(answer, call)
            try:
                answer = await context.ask(self._reformat(context, missing))
            except PromptTooLong:  # the reason is that of the first answer
                return Output(parsed={"failed": reason})
            again = self._read(answer, call)
            # what the first reply stated clearly stands: only what it lacked was asked for
            score = Score(
                again.process if score.process is None else score.process,
                again.outcome if score.outcome is None else score.outcome,
                score.reasoning,
            )
        if score.process is None and score.outcome is None:
            return Output(parsed={"failed": unreadable(answer, call)})
        return Output(parsed={"process": score.process, "outcome": score.outcome, "reasoning": score.reasoning})

    def _read(self, text: str, call: Call) -> Score:
        """Read the call's latest answer."""
        cut = call.stop_reason == "length"
        return parse(text, self.options.scale, opened=call.opened_thinking, cut=cut)

    def _rendered(self, context: Context) -> str:
        judged, options = _judged_call(context, self._judged), self.options
        values = evidence(context, judged, options.keep, truth=judged.agent in options.truth_for)
        # the whole text: a control token may also arise where a value meets another one, or the template
        return context.inert(self._template.render(values))

    def _missing(self, score: Score) -> list[str]:
        missing = ["process"] if score.process is None else []
        return [*missing, "outcome"] if self._wants_outcome and score.outcome is None else missing

    def _reformat(self, context: Context, missing: Sequence[str]) -> list[Message]:
        """Return the request for the form: the end of the prompt, which asks for it, the reply, and what it lacks."""
        lines = "\n".join(_LINES[name].format(scale=self.options.scale) for name in missing)
        return [
            {"role": "user", "content": self.options.keep.tail(self._rendered(context))},
            # servers refuse an empty message
            {"role": "assistant", "content": context.inert(self.options.keep.tail(context.call.text)) or "(no answer)"},
            {"role": "user", "content": REFORMAT.format(lines=lines)},
        ]

    def _mistakes_of_rewards(self, coach: str, workflow: Workflow) -> Iterator[Mistake]:
        """Yield what the reward nodes that score with this coach, the node `coach`, say wrong about it."""
        nodes, scale = [other.id for other in workflow.rollout_nodes], self.options.scale
        for node in coach_nodes(workflow):
            coaches = node.args.get("coaches")
            at: KeyPath = (_ARGS, "coaches")
            if not isinstance(coaches, Mapping):
                message = f"write a mapping of each coach's node to the judged one: {{{coach}: {self._judged}}}"
                yield node.id, at, message
                continue
            for name in (name for pair in coaches.items() for name in pair if name not in nodes):
                yield node.id, at, f"no node of an agent `{name}`{did_you_mean(str(name), nodes)}"
            if coach not in coaches:
                continue
            if coaches[coach] != self._judged:
                yield node.id, (*at, coach), f"{coach} judges {self._judged}, not {coaches[coach]}"
            if (written := node.args.get("scale", 10.0)) != scale:
                message = f"{coach} scores up to {scale:g}, not {written}; correct one of them"
                yield node.id, (_ARGS, "scale"), message
            loop = next((loop.nodes for loop in workflow.loops.values() if self._judged in loop.nodes), (coach,))
            if coach not in loop and not _carried_back(workflow):
                message = (
                    f"{coach} is behind the loop of {self._judged} and judges its last action only, and with these "
                    f"options {workflow.algorithm.estimator} carries no reward back; put {coach} into the loop"
                )
                yield node.id, (*at, coach), message
            yield from self._mistakes_of_weights(coach, node)

    def _mistakes_of_weights(self, coach: str, node: Node) -> Iterator[Mistake]:
        """Yield the mistakes of the weights that a reward node gives to this coach."""
        for name in ("process", "outcome"):
            weights = node.args.get(name)
            if isinstance(weights, Mapping) and coach not in weights:
                message = f"no weight for {coach}; add `{coach}: 1.0`, or 0 to leave it out"
                yield node.id, (_ARGS, name), message
        outcome = node.args.get("outcome", 0.0)
        if not self._wants_outcome and (outcome.get(coach) if isinstance(outcome, Mapping) else outcome):
            message = (
                f"{coach} is not asked for an outcome, so {self._judged} would have no reward; give each coach its "
                f"weight, {{{coach}: 0, ...}}, or set `outcome: true` in the prompt_options of {coach}"
            )
            yield node.id, (_ARGS, "outcome"), message


def _judged_call(context: Context, node: str) -> Call:
    """Return the action to judge: the node's latest call of this turn and round. Raises SkipCall."""
    call = context.upstream.get(node)
    if call is None:
        raise SkipCall(f"node {node} was skipped")
    if "failed" in call.parsed:
        raise SkipCall(f"node {node} failed: {call.parsed['failed']}")
    if not call.generations:
        raise SkipCall(f"node {node} gave no answer: its prompt did not fit")
    return call


def check_coaches(workflow: Workflow) -> None:
    """Check the options and templates of all nodes whose hooks are `Coach` itself; a subclass is checked when the run
    loads it. Raises WorkflowError."""
    coaches = [node for node in workflow.rollout_nodes if _is_coach(node.hooks, workflow)]
    if not coaches:
        return
    draft = load_draft(workflow.path, workflow.edited)
    paths: dict[str, KeyPath] = {node.id: ("nodes", index) for index, node in draft.each_node()}
    problems: list[Problem] = []
    for node in coaches:
        at, written = (*paths[node.id], *_OPTIONS), node.prompt_options
        options, wrong = parse_piece(Coach.Options, written, draft.source, at)
        problems += wrong
        if options is not None and not wrong:
            coach = Coach()
            coach.options = options
            for name, path, message in coach.mistakes(workflow, node):
                problems.append(draft.source.problem((*paths[name], *path), message))
    refuse(problems, workflow.edited)


def _is_coach(ref: str | None, workflow: Workflow) -> bool:
    if ref is None or split_ref(ref)[1] != Coach.__name__:
        return False
    try:
        return find_source(ref, workflow.path) == Path(__file__).resolve()
    except UserError:
        return False


def _carried_back(workflow: Workflow) -> bool:
    """Return whether a call is credited with its agent's later rewards, by the estimator, by sharing or by shaping."""
    algorithm, nodes = workflow.algorithm, workflow.reward_nodes
    is_shaped = any(node.args.get("shaping") is not None for node in nodes)
    return algorithm.carries_back or algorithm.share_reward_in_agent or is_shaped


def _judged_node(judges: str, workflow: Workflow, node: Node) -> str:
    """Return the id of the judged node, in a sub-workflow with its prefix."""
    inside = f"{node.id.rpartition('__')[0]}__{judges}"
    return inside if any(other.id == inside for other in workflow.rollout_nodes) else judges


def _cannot_judge(judged: str, workflow: Workflow, node: Node) -> str | None:
    """Return the error message unless `judged` is an agent's node that this one waits for."""
    rollouts = [other.id for other in workflow.rollout_nodes if other.id != node.id]
    if judged not in rollouts:
        return f"no node of an agent `{judged}`{did_you_mean(judged, rollouts)}"
    awaited, pending = set[str](), list(node.after)
    while pending:
        name = pending.pop()
        if name not in awaited:
            awaited.add(name)
            pending += workflow.node(name).after
    return None if judged in awaited else f"this node does not wait for {judged}; add `after: {judged}`"
