"""The coach: an agent that scores the latest action of another node.

Invariant: a verdict is what the coach wrote, on its template's scale, or {"failed": reason}; there is no third form.
The truth is in a prompt only if the workflow declares it for the judged agent. No text that a coach is shown can end
its message: control tokens in it are broken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from recipe.dag.coach.evidence import Keep, evidence
from recipe.dag.coach.score import Score, parse
from recipe.dag.coach.template import PromptTemplate
from recipe.dag.coach.unreadable import coach_nodes, unreadable
from recipe.dag.core.errors import PromptTooLong, SkipCall, UserError
from recipe.dag.core.frozen import Frozen
from recipe.dag.core.paths import find_source, resolve_path, split_ref
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.episode.failure import NO_ROOM
from recipe.dag.types.agent import Agent
from recipe.dag.types.context import Context, Message, Output
from recipe.dag.types.record import Call

if TYPE_CHECKING:
    from recipe.dag.workflow.schema import Node, Workflow

REFORMAT = (
    "I could not read a score in your reply. Do not judge anew: state the judgement of your reply in this form, "
    "and nothing else:\n{lines}"
)
_LINES = {"process": "PROCESS_SCORE: <a number from 0 to {scale:g}>", "outcome": "ANSWER_CORRECT: <0 or 1>"}


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
    """Ask once more if neither OUTCOME_SCORE nor ANSWER_CORRECT can be read; by default where the judged agent is in
    `truth_for`."""


class Coach(Agent):
    """Judges the latest action of the node `judges`; its node comes after that one, and is in the same loop if it is
    to judge every round.

    The verdict is `parsed = {"process": 0..scale or None, "outcome": 0..1 or None, "reasoning": text}`, or
    `{"failed": reason}`.
    """

    _options: Options
    _judges: str
    """The judged node's id."""
    _template: PromptTemplate
    _wants_outcome: bool

    def prepare(self, workflow: Workflow, node: Node) -> None:
        """Read the template and check the options. Raises UserError."""
        where = f"{workflow.path}: node {node.node_id}: prompt_options"
        self._options = options = _read_options(node.agent_options.pre_process_kwargs, where)
        self._judges = _judged_node(options.judges, workflow, node, where)
        coach = workflow.agent_of(node)
        if coach.policy in workflow.trained_policies():
            raise UserError(
                f"{workflow.path}: node {node.node_id}: its policy `{coach.policy}` is trained, and a coach's is not; "
                f"give agent `{coach.name}` a policy with `frozen: true` or `api`"
            )
        names = [agent.name for agent in workflow.agents]
        for name in options.truth_for:
            if name not in names:
                raise UserError(f"{where}.truth_for: no agent `{name}`{did_you_mean(name, names)}")
        judged_agent = workflow.agent_of(workflow.node(self._judges))
        judged = judged_agent.name
        self.private = not options.feedback
        self._wants_outcome = judged in options.truth_for if options.outcome is None else options.outcome
        _check_rewards(node.node_id, self._judges, options.scale, workflow, with_outcome=self._wants_outcome)
        try:
            path = resolve_path(options.template, workflow.path)
        except UserError as error:
            raise UserError(f"{where}.template: {error}") from error
        self._template = PromptTemplate(path, agent=judged, role=judged_agent.role or judged)

    def prompt(
        self,
        context: Context,
        *,
        judges: str,
        template: str,
        truth_for: Sequence[str] = (),
        keep: Mapping[str, int] | None = None,
        scale: float = 10.0,
        feedback: bool = False,
        outcome: bool | None = None,
    ) -> list[Message]:
        """Return one message, the rendered template. Raises SkipCall if there is no action to judge. The options are
        those of `Options`, which `prepare` has read; they are listed here for the checks of the workflow file."""
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
        return parse(text, self._options.scale, opened=call.opened_thinking, cut=cut)

    def _rendered(self, context: Context) -> str:
        judged, options = _judged_call(context, self._judges), self._options
        values = evidence(context, judged, options.keep, truth=judged.agent in options.truth_for)
        # the whole text: a control token may also arise where a value meets another one, or the template
        return context.inert(self._template.render(values))

    def _missing(self, score: Score) -> list[str]:
        missing = ["process"] if score.process is None else []
        return [*missing, "outcome"] if self._wants_outcome and score.outcome is None else missing

    def _reformat(self, context: Context, missing: Sequence[str]) -> list[Message]:
        """Return the request for the form: the end of the prompt, which asks for it, the reply, and what it lacks."""
        lines = "\n".join(_LINES[name].format(scale=self._options.scale) for name in missing)
        return [
            {"role": "user", "content": self._options.keep.tail(self._rendered(context))},
            # servers refuse an empty message
            {
                "role": "assistant",
                "content": context.inert(self._options.keep.tail(context.call.text)) or "(no answer)",
            },
            {"role": "user", "content": REFORMAT.format(lines=lines)},
        ]


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
    loads it. Raises UserError."""
    for node in workflow.rollout_nodes:
        ref = node.agent_options.process_path
        if ref is None or split_ref(ref)[1] != Coach.__name__:
            continue
        try:
            is_coach = find_source(ref, workflow.path) == Path(__file__).resolve()
        except UserError:
            continue
        if is_coach:
            Coach().prepare(workflow, node)


def _check_rewards(coach: str, judged: str, scale: float, workflow: Workflow, *, with_outcome: bool) -> None:
    """Check what the reward nodes that score with this coach say about it. Raises UserError."""
    for node in coach_nodes(workflow):
        coaches, where = node.executable_kwargs.get("coaches"), f"{workflow.path}: node {node.node_id}"
        if not isinstance(coaches, Mapping):
            raise UserError(
                f"{where}: coaches is a mapping of each coach's node to the judged one: {{{coach}: {judged}}}"
            )
        nodes = [other.node_id for other in workflow.rollout_nodes]
        for name in (name for pair in coaches.items() for name in pair if name not in nodes):
            raise UserError(f"{where}: coaches: no node of an agent `{name}`{did_you_mean(str(name), nodes)}")
        if coach not in coaches:
            continue
        if coaches[coach] != judged:
            raise UserError(f"{where}: coaches: {coach} judges {judged}, not {coaches[coach]}")
        if (written := node.executable_kwargs.get("scale", 10.0)) != scale:
            raise UserError(f"{where}: scale: {coach} scores up to {scale:g}, not {written}; correct one of them")
        loop = next((loop.nodes for loop in workflow.loops.values() if judged in loop.nodes), (coach,))
        if coach not in loop and not _carried_back(workflow):
            raise UserError(
                f"{where}: {coach} is behind the loop of {judged} and judges its last action only, and with "
                f"these options {workflow.algorithm.estimator} carries no reward back; put {coach} into the loop"
            )
        _check_weights(coach, judged, node, where, with_outcome=with_outcome)


def _check_weights(coach: str, judged: str, node: Node, where: str, *, with_outcome: bool) -> None:
    """Check the weights that a reward node gives to a coach. Raises UserError."""
    for name in ("process", "outcome"):
        weights = node.executable_kwargs.get(name)
        if isinstance(weights, Mapping) and coach not in weights:
            raise UserError(f"{where}: {name}: no weight for {coach}; add `{coach}: 1.0`, or 0 to leave it out")
    outcome = node.executable_kwargs.get("outcome", 0.0)
    if not with_outcome and (outcome[coach] if isinstance(outcome, Mapping) else outcome):
        raise UserError(
            f"{where}: outcome: {coach} is not asked for an outcome, so {judged} would have no reward; give each "
            f"coach its weight, {{{coach}: 0, ...}}, or set `outcome: true` in the prompt_options of {coach}"
        )


def _carried_back(workflow: Workflow) -> bool:
    """Return whether a call is credited with its agent's later rewards, by the estimator, by sharing or by shaping."""
    algorithm, nodes = workflow.algorithm, workflow.reward_nodes
    is_shaped = any(node.executable_kwargs.get("shaping") is not None for node in nodes)
    return algorithm.carries_back or algorithm.share_reward_in_agent or is_shaped


def _read_options(values: Mapping[str, Any], where: str) -> Options:
    try:
        return Options.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        keys, hint = [str(key) for key in problem["loc"]], ""
        if problem["type"] == "extra_forbidden":
            in_keep = keys[0] == "keep"
            hint = did_you_mean(keys[-1], Keep.model_fields if in_keep else Options.model_fields)
            hint += "" if in_keep else "; a subclass with more options overrides `prepare`"
        raise UserError(f"{where}.{'.'.join(keys)}: {problem['msg']}{hint}") from error


def _judged_node(judges: str, workflow: Workflow, node: Node, where: str) -> str:
    """Return the id of the judged node, in a sub-workflow with its prefix. Raises UserError unless it is an agent's and
    this node waits for it."""
    rollouts = [other.node_id for other in workflow.rollout_nodes if other.node_id != node.node_id]
    inside = f"{node.node_id.rpartition('__')[0]}__{judges}"
    judged = inside if inside in rollouts else judges
    if judged not in rollouts:
        raise UserError(f"{where}.judges: no node of an agent `{judged}`{did_you_mean(judged, rollouts)}")
    awaited, pending = set[str](), list(node.dependencies)
    while pending:
        name = pending.pop()
        if name not in awaited:
            awaited.add(name)
            pending += workflow.node(name).dependencies
    if judged not in awaited:
        raise UserError(f"{where}.judges: this node does not wait for {judged}; add `after: {judged}`")
    return judged
