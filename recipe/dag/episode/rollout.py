"""One attempt to run an episode: its turns, its envs, and the outputs that nodes pass on.

Invariant: the record does not depend on which node finishes first. `schedule` decides which nodes run, `view` what they
see; this module runs them and records the results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from recipe.dag.core.errors import Fault, HookFault, SkipCall, UserError
from recipe.dag.core.tasks import Work, together, unfold
from recipe.dag.episode.agent_runner import AgentRunner
from recipe.dag.episode.attempt import Attempt
from recipe.dag.episode.candidates import Choice, run_candidates
from recipe.dag.episode.compute import FunctionRunner, VoteRunner
from recipe.dag.episode.env_class import EnvClass
from recipe.dag.episode.envs import EpisodeEnvs
from recipe.dag.episode.failure import NO_ROOM, describe
from recipe.dag.episode.graph import EpisodeGraph, EpisodeNode, Slot
from recipe.dag.episode.schedule import Schedule, Task
from recipe.dag.episode.view import (
    Reader,
    Turn,
    TurnState,
    View,
    carry_over,
    context_of,
    loop_reader,
    new_call,
    node_reader,
    view,
    without_private,
)
from recipe.dag.types.context import Context, Output
from recipe.dag.types.record import Call, Episode, Result, Skip, ToolResult
from recipe.dag.workflow.condition import Condition, Facts, holds
from recipe.dag.workflow.schema import EpisodeSpec

NodeRunner = AgentRunner | VoteRunner | FunctionRunner


class Rollout:
    """One attempt to run an episode."""

    def __init__(
        self,
        graph: EpisodeGraph,
        runners: Mapping[str, NodeRunner],
        envs: Mapping[str, EnvClass],
        limits: EpisodeSpec,
        attempt: Attempt,
        choices: Mapping[str, Choice] | None = None,
    ) -> None:
        """`runners` and `choices` by node id; `envs` by the entry of `env`. Raises EnvFault if no env fits the
        sample."""
        self._graph, self._runners, self._limits, self._attempt = graph, runners, limits, attempt
        self._choices = choices or {}
        agents = {name: runner for name, runner in runners.items() if isinstance(runner, AgentRunner)}
        self._private = frozenset(name for name, runner in agents.items() if runner.hooks.code.private)
        self._episode: Episode = attempt.episode
        self._envs = EpisodeEnvs(graph, envs, self._episode.sample, limits.call_timeout_s)
        self._state = TurnState()
        self._branch = ""
        """The decisions of all finished turns."""

    async def run(self) -> None:
        """Run all turns. If it raises, the episode still has all calls, including those that did not finish."""
        episode = self._episode
        try:
            self._state.obs = await self._envs.reset(self._attempt.seed, episode.uid)
            self._attempt.env_tool_state = self._envs.tool_state
            for number in range(self._limits.max_turns):
                turn = Turn(number)
                await self._run_turn(turn)
                self._state = carry_over(self._graph, turn, self._state)
                episode.turns, episode.done = number + 1, bool(turn.done)
                if turn.done or turn.too_long:
                    episode.ended_by = "done" if turn.done else "length"
                    return
            episode.ended_by = "turns"
        finally:
            # The rewards are known by now: a close that fails is counted but does not discard the episode.
            episode.faults += [fault.record() for fault in await self._envs.close()]

    async def _run_turn(self, turn: Turn) -> None:
        schedule = Schedule(
            self._graph,
            self._envs.env_of,
            should_run=partial(self._should_run, turn),
            should_repeat=partial(self._should_repeat, turn),
        )

        async def do(task: Task) -> list[Work]:
            perform = self._run_node if task.kind == "run" else self._envs.step
            await perform(self._graph.by_id[task.node], task.round, turn)
            return [partial(do, following) for following in schedule.on_finished(task)]

        try:
            await unfold(partial(do, task) for task in schedule.initial_tasks())
        finally:
            self._record(turn, schedule)

    def _record(self, turn: Turn, schedule: Schedule) -> None:
        episode, order = self._episode, self._graph.causal
        for slot, call in turn.calls.items():
            for sibling in (call, *turn.dropped.get(slot, ())):
                sibling.branch = schedule.branch_of(slot, turn.number, self._branch)
        self._branch = schedule.branch_after(turn.number, self._branch)
        episode.calls += [turn.calls[slot] for slot in sorted(turn.calls, key=order)]
        episode.dropped += [call for slot in sorted(turn.dropped, key=order) for call in turn.dropped[slot]]
        for slot in sorted(turn.outputs, key=order):
            output = turn.outputs[slot]
            if isinstance(output, Output):
                episode.results.append(Result(slot[0], turn.number, slot[1], output.text or "", output.parsed))
        for slot in sorted(schedule.skipped, key=order):
            agent = self._graph.by_id[slot[0]].agent_name
            episode.skips.append(Skip(slot[0], agent, turn.number, slot[1], schedule.skipped[slot]))

    def _should_run(self, turn: Turn, node: EpisodeNode, round_index: int) -> bool:
        when = node.spec.when
        return when is None or self._holds(when, node_reader(node, round_index), turn)

    def _should_repeat(self, turn: Turn, loop: str, round_index: int) -> bool:
        ended = turn.done | turn.too_long
        if any((node.id, round_index) in ended for node in self._graph.bodies[loop]):
            return False
        until = self._graph.loops[loop].until
        return until is None or not self._holds(until, loop_reader(self._graph, loop), turn)

    def _holds(self, condition: Condition, reader: Reader, turn: Turn) -> bool:
        seen = view(self._graph, reader, turn, self._state)
        infos, validate = self._envs.infos(seen.infos), self._attempt.validate
        return holds(condition, Facts(seen.outputs, infos, self._episode.sample, validate))

    async def _run_node(self, node: EpisodeNode, round_index: int, turn: Turn) -> None:
        slot, runner = (node.id, round_index), self._runners[node.id]
        if slot in turn.outputs:
            return  # the node has judged candidates, among them the one that was kept
        seen = self._seen_by(node, round_index, turn)
        if isinstance(runner, AgentRunner):
            await self._run_agent(runner, slot, turn, seen)
            return
        context = self._context(node, round_index, turn, seen, partial(_no_tools, node.id))
        output = turn.outputs[slot] = await runner.run(context)
        if output.done:
            turn.done.add(slot)

    def _seen_by(self, node: EpisodeNode, round_index: int, turn: Turn) -> View:
        seen = view(self._graph, node_reader(node, round_index), turn, self._state)
        return without_private(seen, node, self._private)

    async def _run_agent(self, runner: AgentRunner, slot: Slot, turn: Turn, seen: View) -> None:
        choice, call = self._choices.get(slot[0]), new_call(runner.node, runner.agent, turn.number, slot[1])
        silent = self._attempt.fork.silence(call) is not None
        if choice is not None and not silent and (count := choice.count(validate=self._attempt.validate)) > 1:
            await self._run_candidates(runner, choice, count, slot, turn, seen)
            return
        turn.calls[slot] = call
        context = self._agent_context(runner, call, turn, seen)
        self._take(runner, slot, turn, call, await self._play(runner, call, context))

    def _take(self, runner: AgentRunner, slot: Slot, turn: Turn, call: Call, output: Output) -> None:
        """Let the turn go on from a finished call."""
        turn.calls[slot] = turn.outputs[slot] = call
        if call.stop_reason == "length" and not call.generations and runner.agent.on_failure != "skip":
            turn.too_long.add(slot)
        if output.done:
            call.done = True
            turn.done.add(slot)

    async def _run_candidates(
        self, runner: AgentRunner, choice: Choice, count: int, slot: Slot, turn: Turn, seen: View
    ) -> None:
        """Run the candidates of a node, score them, and go on from one of them. An env is stepped afterwards, by the
        candidate that was kept. Raises UserError if they would share what an env lends to their tools."""
        self._check_lent(runner)
        calls = [new_call(runner.node, runner.agent, turn.number, slot[1]) for _ in range(count)]
        earlier = [call for call in (*self._episode.calls, *seen.calls) if call.candidates]
        for index, call in enumerate(calls):
            call.candidate, call.candidates = index, count
            call.parent_score = earlier[-1].score if earlier else None
        turn.calls[slot], turn.dropped[slot] = calls[0], calls[1:]  # so that an episode that fails records them all
        contexts = [self._agent_context(runner, call, turn, seen) for call in calls]
        outputs = await run_candidates(runner, calls, contexts, self._attempt)
        judged: list[Judged] = []
        if choice.judge is None:
            scores = await together(map(choice.score, contexts))
        else:
            judge = self._graph.by_id[choice.judge]
            judged = await together(self._judge(judge, slot, call, turn) for call in calls)
            scores = [choice.verdict(verdict.output.parsed) for verdict in judged]
        for call, score in zip(calls, scores, strict=True):
            call.score = score
        kept = choice.best(scores)
        turn.dropped[slot] = [call for index, call in enumerate(calls) if index != kept]
        for call in turn.dropped[slot]:
            call.unscored = call.score is None
        self._take(runner, slot, turn, calls[kept], outputs[kept])
        if judged:
            self._take_verdict((choice.spec.by, slot[1]), turn, judged, kept)

    def _check_lent(self, runner: AgentRunner) -> None:
        lent = [name for name in runner.tools.names if name in self._attempt.env_tool_state]
        if lent:
            raise UserError(
                f"node {runner.node.id}: the env gives the tool {lent[0]} a state that all candidates would share, so "
                "those that are not kept would change what the others see; remove `candidates`, or the tool"
            )

    async def _judge(self, judge: EpisodeNode, slot: Slot, candidate: Call, turn: Turn) -> Judged:
        """Run the judging node as if this candidate had been kept."""
        alone = replace(turn, outputs={**turn.outputs, slot: candidate})
        seen = self._seen_by(judge, slot[1], alone)
        runner, judge_slot = self._runners[judge.id], (judge.id, slot[1])
        if not isinstance(runner, AgentRunner):
            context = self._context(judge, slot[1], turn, seen, partial(_no_tools, judge.id))
            return Judged(await runner.run(context))
        self._check_lent(runner)
        call = new_call(judge, runner.agent, turn.number, slot[1])
        call.candidate = candidate.candidate
        turn.dropped.setdefault(judge_slot, []).append(call)
        context = self._agent_context(runner, call, turn, seen)
        return Judged(await self._play(runner, call, context), call)

    def _take_verdict(self, slot: Slot, turn: Turn, judged: Sequence[Judged], kept: int) -> None:
        """Let the turn go on from what the judging node said about the candidate that was kept. What it said about the
        others is recorded, but earns nothing, so it is not trained on."""
        verdict, runner = judged[kept], self._runners[slot[0]]
        if isinstance(runner, AgentRunner) and verdict.call is not None:
            turn.dropped[slot] = [other.call for other in judged if other.call and other.call is not verdict.call]
            for call in turn.dropped[slot]:
                call.train = False
            self._take(runner, slot, turn, verdict.call, verdict.output)
        else:
            turn.outputs[slot] = verdict.output
            if verdict.output.done:
                turn.done.add(slot)

    def _agent_context(self, runner: AgentRunner, call: Call, turn: Turn, seen: View) -> Context:
        call_tool = partial(_call_tool, runner, call, self._attempt)
        context = self._context(runner.node, call.round, turn, seen, call_tool)
        context.ask = partial(runner.ask, call, self._attempt)
        context.read_by = self._read_by
        context.inert = runner.model.inert
        context.tokens = runner.tokens(self._attempt, seen.obs)
        return context

    async def _play(self, runner: AgentRunner, call: Call, context: Context) -> Output:
        """Run the call. If the agent may fail, a failed call keeps what it holds and gets the reason."""
        if (reason := self._attempt.fork.silence(call)) is not None:
            return _failed(call, reason)
        try:
            output = await runner.run(call, context, self._attempt)
        except SkipCall as skip:
            if runner.trained:
                raise HookFault(f"skips its call ({skip}), but its policy is trained", where=skip.where) from skip
            return _failed(call, str(skip))
        except Fault as fault:
            task = asyncio.current_task()
            if not runner.may_skip(fault) or (task is not None and task.cancelling()):
                raise
            self._episode.faults.append(fault.record())
            return _failed(call, describe(fault.record()))
        if runner.agent.on_failure == "skip" and call.stop_reason == "length" and not call.generations:
            return _failed(call, NO_ROOM)
        return output

    def _read_by(self, call: Call) -> str:
        runner = self._runners[call.node]
        assert isinstance(runner, AgentRunner)  # calls are made by agents
        return runner.model.read_by(call)

    def _context(
        self,
        node: EpisodeNode,
        round_index: int,
        turn: Turn,
        seen: View,
        call_tool: Callable[..., Awaitable[ToolResult]],
    ) -> Context:
        return context_of(
            self._graph,
            node,
            seen,
            self._episode.calls,
            self._private,
            sample=self._episode.sample,
            uid=self._episode.uid,
            episode=self._episode.trunk,
            turn=turn.number,
            max_turns=self._limits.max_turns,
            validate=self._attempt.validate,
            call_tool=call_tool,
            round=round_index,
        )


@dataclass(frozen=True, slots=True)
class Judged:
    """A node's judgement of a candidate."""

    output: Output
    call: Call | None = None
    """None for a compute node."""


def _failed(call: Call, reason: str) -> Output:
    call.text, call.parsed = "", {"failed": reason}
    return Output(parsed=call.parsed)


async def _call_tool(runner: AgentRunner, call: Call, attempt: Attempt, name: str, /, **arguments: Any) -> ToolResult:
    return await runner.call_tool(call, attempt, name, arguments)


async def _no_tools(node: str, name: str, /, **arguments: Any) -> ToolResult:
    raise HookFault(f"called the tool {name!r}, but only agents have tools", where=f"node {node}")
