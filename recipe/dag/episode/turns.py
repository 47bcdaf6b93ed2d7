"""One run of the episode's nodes on one sample: its turns, its envs, who hands what to whom.

Invariant: the record is the same whichever move ends first. Who may move is `schedule`'s to say, what it sees `view`'s;
here the moves are made and written down.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from recipe.dag.episode.branch import branch_after, branch_of
from recipe.dag.episode.call import Attempt, Caller
from recipe.dag.episode.compute import Ballot, Computation
from recipe.dag.episode.condition import holds
from recipe.dag.episode.context import Context, Output
from recipe.dag.episode.env_class import EnvClass
from recipe.dag.episode.graph import EpisodeGraph, EpisodeNode, Slot
from recipe.dag.episode.record import Call, Episode, Result, Skip, ToolResult
from recipe.dag.episode.schedule import Schedule, Task
from recipe.dag.episode.stage import Stage
from recipe.dag.episode.tasks import Work, unfold
from recipe.dag.episode.view import Memory, Reader, Turn, View, loop_reader, reader_of, remember, view
from recipe.dag.errors import HookFault
from recipe.dag.workflow.schema import Condition, EpisodeSpec

Mover = Caller | Ballot | Computation


class Rollout:
    """Plays one attempt."""

    def __init__(
        self,
        graph: EpisodeGraph,
        movers: Mapping[str, Mover],
        envs: Mapping[str, EnvClass],
        spec: EpisodeSpec,
        attempt: Attempt,
    ) -> None:
        """`movers` by node id; `envs` by the entry of env_path. Raises EnvFault where no env fits the sample."""
        self._graph, self._movers, self._spec, self._attempt = graph, movers, spec, attempt
        self._episode: Episode = attempt.episode
        self._stage = Stage(graph, envs, self._episode.sample, spec.call_timeout_s)
        self._memory = Memory()
        self._branch = ""
        """What the turns so far have decided."""
        self._transcripts: dict[tuple[int, Slot], str] = {}
        """By turn and slot: what a node's post_process returned as token ids, siiRL's way."""

    async def play(self) -> None:
        """All turns. The episode's calls are there even if it raises, those under way included."""
        episode = self._episode
        try:
            self._memory.obs = await self._stage.reset(self._attempt.seed, episode.uid)
            for number in range(self._spec.max_turns):
                turn = Turn(number)
                await self._play_turn(turn)
                self._memory = remember(self._graph, turn, self._memory)
                episode.turns, episode.done = number + 1, bool(turn.done)
                if turn.done or turn.full:
                    episode.ended_by = "done" if turn.done else "length"
                    return
            episode.ended_by = "turns"
        finally:
            # What the episode earned is known by now: counted, but no reason to lose it.
            episode.faults += [fault.record() for fault in await self._stage.close()]

    async def _play_turn(self, turn: Turn) -> None:
        schedule = Schedule(
            self._graph, self._stage.env_of, allowed=partial(self._allowed, turn), again=partial(self._again, turn)
        )

        async def do(task: Task) -> list[Work]:
            await (self._move if task.kind == "move" else self._step)(self._graph.by_id[task.node], task.round, turn)
            return [partial(do, following) for following in schedule.over(task)]

        try:
            await unfold(partial(do, task) for task in schedule.start())
        finally:
            self._write_down(turn, schedule)

    def _write_down(self, turn: Turn, schedule: Schedule) -> None:
        episode, order = self._episode, self._graph.causal
        decided = turn.number, schedule.skipped, schedule.rounds, self._branch
        for slot, call in turn.calls.items():
            call.branch = branch_of(self._graph, slot, *decided)
        self._branch = branch_after(self._graph, *decided)
        episode.calls += [turn.calls[slot] for slot in sorted(turn.calls, key=order)]
        for slot in sorted(turn.said, key=order):
            if isinstance(said := turn.said[slot], Output):
                episode.results.append(Result(slot[0], turn.number, slot[1], said.text, said.parsed))
        for slot in sorted(schedule.skipped, key=order):
            reason = schedule.skipped[slot]
            episode.skips.append(Skip(slot[0], self._agent(slot[0]), turn.number, slot[1], reason))

    def _allowed(self, turn: Turn, place: EpisodeNode, round: int) -> bool:
        when = place.node.when
        return when is None or self._holds(when, reader_of(place, round), turn)

    def _again(self, turn: Turn, loop: str, round: int) -> bool:
        if any(slot in turn.done | turn.full for slot in ((place.id, round) for place in self._graph.bodies[loop])):
            return False
        until = self._graph.loops[loop].until
        return until is None or not self._holds(until, loop_reader(self._graph, loop), turn)

    def _holds(self, condition: Condition, reader: Reader, turn: Turn) -> bool:
        seen = view(self._graph, reader, turn, self._memory)
        infos, sample = self._stage.infos(seen.infos), self._episode.sample
        return holds(condition, seen.said, infos, sample, validate=self._attempt.validate)

    async def _move(self, place: EpisodeNode, round: int, turn: Turn) -> None:
        slot, mover = (place.id, round), self._movers[place.id]
        seen = view(self._graph, reader_of(place, round), turn, self._memory)
        if isinstance(mover, Caller):
            await self._call(mover, slot, turn, seen)
            return
        context = self._context(place, round, turn, seen, partial(_no_tools, place.id))
        output = turn.said[slot] = await mover.run(context)
        if output.done:
            turn.done.add(slot)

    async def _call(self, caller: Caller, slot: Slot, turn: Turn, seen: View) -> None:
        place, agent, round = caller.place, caller.agent, slot[1]
        call = Call(place.id, agent.name, place.node.agent_group, agent.policy, turn.number, round=round)
        call.role = agent.role or agent.name
        turn.calls[slot] = call
        context = self._context(place, round, turn, seen, partial(_call_tool, caller, call, self._attempt))
        answer = await caller.move(call, context, self._attempt, self._transcript(seen))
        turn.said[slot] = call
        if call.stop_reason == "length" and not call.generations:
            turn.full.add(slot)
        if answer.output.done:
            turn.done.add(slot)
        if answer.ids is not None:
            # Special tokens stay in: the next agent's hook gets these ids again, from its own tokenizer.
            text = caller.endpoint.tokenizer.decode(answer.ids, skip_special_tokens=False)
            self._transcripts[turn.number, slot] = text

    def _context(
        self, place: EpisodeNode, round: int, turn: Turn, seen: View, call_tool: Callable[..., Awaitable[ToolResult]]
    ) -> Context:
        episode, name = self._episode, self._agent(place.id)
        calls = [*episode.calls, *seen.moves]
        obs = None
        if place.node.agent_options.obs_with_env:
            for said in seen.obs.values():
                obs = said.get(name, obs)
        return Context(
            sample=episode.sample,
            uid=episode.uid,
            episode=episode.index,
            turn=turn.number,
            max_turns=self._spec.max_turns,
            agent=name,
            node=place.id,
            upstream={node: said for node, said in seen.said.items() if isinstance(said, Call)},
            history=[call for call in calls if call.agent == name],
            obs=obs,
            validate=self._attempt.validate,
            call_tool=call_tool,
            results={node: said for node, said in seen.said.items() if isinstance(said, Output)},
            round=round,
            max_rounds=self._graph.loops[place.loop].max_rounds if place.loop else 1,
            calls=calls,
        )

    def _agent(self, node: str) -> str:
        agent = self._graph.by_id[node].agent
        return agent.name if agent else ""

    def _transcript(self, seen: View) -> str | None:
        """What the last one to speak handed over, if it did so in siiRL's way."""
        calls = [said for said in seen.said.values() if isinstance(said, Call)]
        if not calls:
            return None
        last = max(calls, key=lambda call: (call.turn, self._graph.causal((call.node, call.round))))
        return self._transcripts.get((last.turn, (last.node, last.round)))

    async def _step(self, place: EpisodeNode, round: int, turn: Turn) -> None:
        obs = await self._stage.step(place, round, turn)
        said, at = obs.get(place.agent.name), (turn.number, (place.id, round))
        if at in self._transcripts and isinstance(said, str):
            self._transcripts[at] = said


async def _call_tool(caller: Caller, call: Call, attempt: Attempt, name: str, /, **arguments: Any) -> ToolResult:
    return await caller.call_tool(call, attempt, name, arguments)


async def _no_tools(node: str, name: str, /, **arguments: Any) -> ToolResult:
    raise HookFault(f"called the tool {name!r}, but only agents have tools", where=f"node {node}")
