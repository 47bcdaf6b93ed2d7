"""Plays a teacher's answers through a workflow, which yields the prompts and answers that a tiny model learns first.

Invariant: every prompt is built by the workflow's agents, envs and tools from the earlier calls of the same dialogue,
so the warm start sees exactly the prompts that reinforcement learning will.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeGuard, cast

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.episode.conversation import Conversation, Key, conversation_of, prompt_of
from recipe.dag.episode.env_class import load_envs
from recipe.dag.episode.envs import EpisodeEnvs
from recipe.dag.episode.graph import EpisodeNode, Slot, episode_graph
from recipe.dag.episode.hooks import load_hooks
from recipe.dag.episode.listed_tools import with_stand_ins
from recipe.dag.episode.make_tools import make_tools
from recipe.dag.episode.tool_loop import argument_between_tags, between_tags, requests_in, run_requests
from recipe.dag.episode.toolset import Toolset
from recipe.dag.episode.view import (
    Turn,
    TurnState,
    carry_over,
    context_of,
    loop_reader,
    new_call,
    node_reader,
    view,
    without_private,
)
from recipe.dag.tools.sandbox_client import SandboxClient
from recipe.dag.types.context import Message
from recipe.dag.types.record import Call, ToolResult
from recipe.dag.workflow.agent_schema import ToolLoop
from recipe.dag.workflow.condition import Facts, holds
from recipe.dag.workflow.schema import Workflow


class Problem(Protocol):
    """A question and its answer, which becomes the sample's ground truth, such as `recipe.tiny.arithmetic.Problem`."""

    @property
    def text(self) -> str: ...

    @property
    def answer(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One training example: a chat prompt and its answer. `role`: the node's id; `turn`, `round` and `generation` (of a
    tool loop) count from 0."""

    role: str
    messages: tuple[Message, ...]
    answer: str
    turn: int = 0
    round: int = 0
    generation: int = 0
    tools: tuple[dict[str, Any], ...] = ()
    """The schemas that the chat template shows."""
    begun: tuple[str, ...] = ()
    """The texts that the answer's message already contains: with `format: tags`, earlier generations and results."""
    goes_on: bool = False
    """A tool's result continues the answer's message, so the answer does not end the turn."""


Answer = str | Callable[[list[Message]], str]
Move = Answer | Sequence[Answer]
"""What a node says in one call; a sequence: the generations of its tool loop."""


@dataclass(frozen=True, slots=True)
class Script:
    """A teacher's answers in one turn.

    `answers` has one entry per rollout node, in the workflow's order: a text; a function of the prompt; for a node with
    a tool loop a list of these, one per generation; or None for a node that is skipped. For a node in a loop, it is a
    list with one of these per round; rounds after the loop's `until` holds are not played. `call_tool` replaces the
    agents' tools.
    """

    answers: Sequence[Move | None | Sequence[Move | None]]
    call_tool: Callable[..., Awaitable[ToolResult]] | None = None


class Teacher(Protocol):
    """Constructed with (workflow, seed); raises UserError for a workflow that it cannot demonstrate.

    An optional attribute `segments` lists texts that are to be one token each although no demonstration contains them.
    """

    def problems(self, count: int, test_size: int) -> Sequence[Any]:
        """Return the first `count` problems of the training split that belongs to a test split of `test_size`."""
        ...

    def teach(self, problem: Any) -> list[Demonstration]:
        """Return one demonstration for each answer of a rollout node, for one of `problems`."""
        ...


@dataclass(slots=True)
class _Episode:
    """The state of one dialogue."""

    sample: dict[str, Any]
    envs: EpisodeEnvs
    state: TurnState = field(default_factory=TurnState)
    calls: list[Call] = field(default_factory=list)
    """Of all earlier turns."""
    conversations: dict[Key, Conversation] = field(default_factory=dict)
    """As those of an attempt (episode/attempt.py)."""
    histories: dict[int, list[Message]] = field(default_factory=dict)
    """The messages of each conversation, by the `id` of the call that ends it."""
    tool_states: dict[str, dict[str, Any]] = field(default_factory=dict)


class Dialogue:
    """Plays a teacher's answers through a workflow's rollout nodes, turn by turn, with its envs and tools."""

    def __init__(self, workflow: Workflow, sandbox: SandboxClient | None = None):
        """`sandbox`: for the envs and tools that run programs. Raises UserError for files that cannot be loaded, and
        for agents that read vote or compute nodes, which are not played."""
        self._workflow, self._graph = with_stand_ins(workflow), episode_graph(workflow)
        unplayed = {node.id for node in self._graph.nodes if node.agent is None}
        for node in self._graph.nodes:
            if node.agent is not None and (read := unplayed.intersection(node.after)):
                problem = f"node {node.id} reads {min(read)}, and a teacher plays no vote or compute nodes"
                raise UserError(f"{workflow.path}: {problem}; start from a pretrained model")
        self._hooks = {node.id: load_hooks(node, workflow) for node in workflow.rollout_nodes}
        self._private = frozenset(name for name, hooks in self._hooks.items() if hooks.code.private)
        self._envs = load_envs(workflow, sandbox or _no_sandbox("an env", "pass `sandbox` to Dialogue"))
        advice = "answer its calls with `call_tool` of Script, or pass `sandbox` to Dialogue"
        tools = make_tools(self._workflow, sandbox or _no_sandbox("a tool", advice), online=False)
        self._tools = {agent.name: Toolset(agent, tools) for agent in self._workflow.agents}
        self._played = 0

    async def demonstrate(
        self, problem: Problem, *turns: Script, sample: Mapping[str, Any] | None = None
    ) -> list[Demonstration]:
        """Return one demonstration for each answer, in causal order: loops round by round, tool loops generation by
        generation.

        `sample`: the data row, if hooks, envs or tools read more of it than the problem's text and answer. Raises
        UserError for an answer that the episode would not reach, except turns after an env ended it, which are not
        played; Faults of hooks, envs and tools.
        """
        if sample is None:
            sample = {"prompt": [{"role": "user", "content": problem.text}], "ground_truth": str(problem.answer)}
        envs = EpisodeEnvs(self._graph, self._envs, dict(sample), self._workflow.episode.call_timeout_s)
        episode = _Episode(dict(sample), envs)
        demonstrations: list[Demonstration] = []
        self._played += 1
        try:
            episode.state.obs = await envs.reset(0, str(self._played))
            for number, script in enumerate(turns):
                turn = Turn(number)
                demonstrations += await self._play(script, turn, episode)
                if number + 1 == len(turns):
                    break  # nothing reads what an env says to the last answers
                await self._step_envs(turn, episode)
                if turn.done and turn.done <= turn.infos.keys():
                    break  # an env ended it, which the teacher could not know
                if turn.done or number + 1 == self._workflow.episode.max_turns:
                    spoken = counted(len(turns), "turn")
                    end = f"the episode ends after turn {number}, and the teacher speaks in {spoken}"
                    raise UserError(f"teacher: {end}; see `max_turns`, and what ends it (`done`)")
                episode.state = carry_over(self._graph, turn, episode.state)
                episode.calls += turn.calls.values()
        finally:
            await envs.close()
        return demonstrations

    async def _play(self, script: Script, turn: Turn, episode: _Episode) -> list[Demonstration]:
        demonstrations: list[Demonstration] = []
        rounds: dict[str, int] = {}
        ended: set[str] = set()
        for slot, move in self._slots(script, turn.number):
            await self._step_envs(turn, episode)
            loop, round_index = self._graph.by_id[slot[0]].loop, slot[1]
            if loop is not None:
                if rounds.setdefault(loop, 0) < round_index and self._ends(loop, turn, episode):
                    ended.add(loop)
                rounds[loop] = round_index
            if loop not in ended:
                demonstrations += await self._answer(slot, move, script, turn, episode)
        return demonstrations

    def _slots(self, script: Script, turn: int) -> list[tuple[Slot, Move]]:
        """Return the script's answers with their nodes and rounds, in causal order. Raises UserError."""
        nodes = [self._graph.by_id[node.id] for node in self._workflow.rollout_nodes]
        if len(script.answers) != len(nodes):
            wanted = f"give one per rollout node ({', '.join(node.id for node in nodes)}), None for one that is skipped"
            raise UserError(f"teacher: turn {turn} has {counted(len(script.answers), 'answer')}; {wanted}")
        slots: list[tuple[Slot, Move]] = []
        for node, entry in zip(nodes, script.answers, strict=True):
            # cast: which kind of list it is follows from the workflow
            rounds: list[Move | None] = list(entry) if node.loop and _is_list(entry) else [cast(Move | None, entry)]
            most = self._graph.max_rounds(node)
            if len(rounds) > most:
                raise UserError(
                    f"teacher: turn {turn} has {len(rounds)} answers of node '{node.id}', which has "
                    f"{counted(most, 'round')}"
                )
            if any(map(_is_list, rounds)) and self._loop_of(node) is None:
                wanted = "give one text" + (" per round" if node.loop else "")
                raise UserError(
                    f"teacher: turn {turn} has a list for node '{node.id}', which has no tool loop; {wanted}"
                )
            slots += [((node.id, index), move) for index, move in enumerate(rounds) if move is not None]
        return sorted(slots, key=lambda entry: self._graph.causal(entry[0]))

    def _loop_of(self, node: EpisodeNode) -> ToolLoop | None:
        return self._workflow.agent_of(node.spec).tool_loop

    async def _step_envs(self, turn: Turn, episode: _Episode) -> None:
        """Step the envs whose nodes have answered. As late as possible: a step can cost more than all else, and nothing
        reads what follows the last answer."""
        for slot in turn.calls:
            if slot[0] in episode.envs.env_of and slot not in turn.infos:
                await episode.envs.step(self._graph.by_id[slot[0]], slot[1], turn)

    def _ends(self, loop: str, turn: Turn, episode: _Episode) -> bool:
        """Return whether the loop ends after its latest round."""
        until = self._graph.loops[loop].until
        if any(slot[0] in self._graph.loops[loop].nodes for slot in turn.done):
            return True
        seen = view(self._graph, loop_reader(self._graph, loop), turn, episode.state)
        infos = episode.envs.infos(seen.infos)
        return until is not None and holds(until, Facts(seen.outputs, infos, episode.sample, validate=False))

    async def _answer(
        self, slot: Slot, move: Move, script: Script, turn: Turn, episode: _Episode
    ) -> list[Demonstration]:
        """Build the node's prompt, answer it, and record the call in `turn`."""
        node, hooks = self._graph.by_id[slot[0]], self._hooks[slot[0]]
        seen = without_private(view(self._graph, node_reader(node, slot[1]), turn, episode.state), node, self._private)
        call = new_call(node, self._workflow.agent_of(node.spec), turn.number, slot[1])
        call.stop_reason = "stop"
        run = partial(self._run_tool, node, script, episode)
        context = context_of(
            self._graph,
            node,
            seen,
            episode.calls,
            self._private,
            sample=episode.sample,
            uid="",
            episode=0,
            turn=turn.number,
            max_turns=self._workflow.episode.max_turns,
            validate=False,
            call_tool=partial(_call_for_hook, run, call),
            round=slot[1],
        )
        conversation = conversation_of(self._workflow.agent_of(node.spec), context, episode.conversations)
        # cast: a prompt of token ids would need the tokenizer, which is built from these messages
        prompt = cast(list[Message], await prompt_of(hooks, context, conversation))
        if conversation is not None and conversation.last is not None:
            prompt = [*episode.histories[id(conversation.last)], *prompt]
        demonstrations = await self._generations(node, move, prompt, call, run)
        last = demonstrations[-1]
        reply = {"role": "assistant", "content": "".join(last.begun) + last.answer}
        if conversation is not None:
            conversation.keep(call, episode.conversations)
            episode.histories[id(call)] = [*last.messages, reply]
        context.call = call
        output = await hooks.parse(context)
        call.text, call.parsed = call.text if output.text is None else output.text, output.parsed
        turn.calls[slot] = turn.outputs[slot] = call
        if output.done:
            turn.done.add(slot)
        return demonstrations

    async def _generations(
        self, node: EpisodeNode, move: Move, prompt: list[Message], call: Call, run: Callable[..., Any]
    ) -> list[Demonstration]:
        """Answer a prompt; in a tool loop, run the calls of each generation as the engine does. Raises UserError."""
        loop, tools = self._loop_of(node), self._tools[node.agent_name]
        answers: list[Answer] = list(move) if _is_list(move) else [cast(Answer, move)]
        schemas = tuple(tools.schemas) if loop is not None and loop.format == "hermes" else ()
        argument = "code"
        if loop is not None and loop.continues_message:
            argument = argument_between_tags(next(iter(tools.tools.values())), f"agent {node.agent_name}")
        call.prompt_text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in prompt)
        demonstrations: list[Demonstration] = []
        begun: tuple[str, ...] = ()
        invalid_streak = 0
        for answer in answers:
            prefix: list[Message] = [{"role": "assistant", "content": "".join(begun)}] if begun else []
            text = answer if isinstance(answer, str) else answer([*prompt, *prefix])
            call.text = text
            requests = [] if loop is None else requests_in(text, loop, tools.names, argument=argument)
            goes_on = bool(requests) and loop is not None and loop.continues_message
            position = (call.turn, call.round, call.generations, schemas, begun, goes_on)
            demonstrations.append(Demonstration(node.id, tuple(prompt), text, *position))
            call.generations += 1
            if loop is None or not requests or call.generations == loop.max_generations:
                call.ended_in_tool_call = bool(requests)
                break
            earlier = len(call.tool_results)
            results = await run_requests(requests, loop, run, call.tool_results)
            ran = any(result.status != "invalid" for result in call.tool_results[earlier:])
            invalid_streak = 0 if ran else invalid_streak + 1
            if invalid_streak == loop.max_invalid_streak:
                call.ended_in_tool_call = True
                break
            if goes_on:
                begun += (text, "".join(between_tags(message, loop, text) for message in results))
            else:
                prompt = [*prompt, {"role": "assistant", "content": text}, *results]
        else:
            raise UserError(f"{_where(call)} ends with a tool call; add the generation that reads its result")
        if len(demonstrations) < len(answers):
            reason = "reaches a limit of tool_loop" if call.ended_in_tool_call else "calls no tool"
            count = f"the teacher gives {counted(len(answers), 'generation')}"
            raise UserError(f"{_where(call)}: generation {call.generations} {reason} and is the last, but {count}")
        return demonstrations

    async def _run_tool(
        self,
        node: EpisodeNode,
        script: Script,
        episode: _Episode,
        name: str,
        arguments: dict[str, Any],
        keep: Callable[[ToolResult], None],
        *,
        by_model: bool = True,
    ) -> ToolResult:
        if script.call_tool is not None:
            result = await script.call_tool(name, **arguments)
            keep(result)
            return result
        tools, added = self._tools[node.agent_name], episode.envs.tool_state
        known = tools.name_of(name)
        if known is None:
            raise UserError(f"node {node.id}: calls the tool {name!r}, which agent {node.agent_name} does not declare")
        states, sample = episode.tool_states, episode.sample
        return await tools.call(known, arguments, sample, states, keep, by_model=by_model, added=added.get(known))


def _is_list(entry: Any) -> TypeGuard[Sequence[Any]]:
    return not (entry is None or isinstance(entry, str) or callable(entry))


def _where(call: Call) -> str:
    return f"teacher: turn {call.turn}, node '{call.node}'"


async def _call_for_hook(run: Callable[..., Any], call: Call, name: str, /, **arguments: Any) -> ToolResult:
    return await run(name, arguments, call.tool_results.append, by_model=False)


def _no_sandbox(what: str, advice: str) -> SandboxClient:
    """Return a client that raises UserError when it is used."""

    class NoSandbox:
        def __getattr__(self, name: str) -> Any:
            raise UserError(f"teacher: {what} of the workflow uses the sandbox, and there is none; {advice}")

    return cast(SandboxClient, NoSandbox())
