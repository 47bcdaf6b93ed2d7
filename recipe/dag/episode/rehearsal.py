"""Plays a few episodes without a model: `verl-dag validate --play`.

Invariant: every hook, env, tool and reward function that the path of an episode reaches runs, in the engine that a run
uses, and then an estimator of the user's; no model, GPU, Ray or sandbox is needed. The texts say nothing about a model.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from recipe.dag.algorithms.custom import Custom
from recipe.dag.core.errors import UserError
from recipe.dag.core.suggestion import listing
from recipe.dag.endpoint.chat import end_of_turn_id
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.listed_tools import with_stand_ins
from recipe.dag.episode.make_tools import make_tools
from recipe.dag.episode.rows import rows_of
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.episode.tool_loop import argument_between_tags
from recipe.dag.episode.toolset import REFUSED
from recipe.dag.tools.sandbox_client import FileRefused, RunResult, SandboxClient, SessionFiles
from recipe.dag.types.record import Episode, Generation
from recipe.dag.types.tool import Tool, close_tool, parameters_of
from recipe.dag.workflow.agent_schema import Agent
from recipe.dag.workflow.condition import AGREE_KEY, parts
from recipe.dag.workflow.schema import Workflow

SAMPLE = {"prompt": [{"role": "user", "content": "Which number?"}], "ground_truth": "1", "extra_info": {}}
ANSWERS = ("{right}", "The answer is \\boxed{{{right}}}.", "The answer is \\boxed{{{wrong}}}.", "")
"""The answer of every agent in each of the episodes."""
_LONGEST_TRUTH = 40
"""Characters of a ground truth that can be an answer; a longer one is data for the reward, such as tests of code."""
START, END = "<|im_start|>", "<|im_end|>"
_SPECIAL = {START: 1, END: 2}
MAX_TOKENS = 1 << 20
_TURN = re.compile(rf"{re.escape(START)}(\w+)\n(.*?)(?:{re.escape(END)}|\Z)", re.DOTALL)


class CharacterTokenizer:
    """A tokenizer of one id per character and two special tokens, with a chat template."""

    eos_token_id = _SPECIAL[END]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for piece in re.split(f"({re.escape(START)}|{re.escape(END)})", text):
            ids += [_SPECIAL[piece]] if piece in _SPECIAL else [ord(character) + 10 for character in piece]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        names = {number: "" if skip_special_tokens else name for name, number in _SPECIAL.items()}
        return "".join(names[number] if number in names else chr(number - 10) for number in ids)

    def apply_chat_template(
        self,
        conversation: Iterable[Mapping[str, Any]],
        tools: Iterable[Mapping[str, Any]] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        text = f"{START}system\n{json.dumps(list(tools), default=str)}{END}\n" if tools else ""
        for message in conversation:
            text += f"{START}{message['role']}\n{message.get('content') or ''}{END}\n"
        text += f"{START}assistant\n" if add_generation_prompt else ""
        if not tokenize:
            return text
        return {"input_ids": self.encode(text)} if return_dict else self.encode(text)

    def messages(self, ids: Iterable[int]) -> list[dict[str, str]]:
        """Return the messages of a prompt that `apply_chat_template` made. The last one is the assistant's if the model
        is to continue it."""
        turns = [{"role": role, "content": content} for role, content in _TURN.findall(self.decode(ids))]
        return turns if turns and turns[-1]["content"] else turns[:-1]


class Script:
    """A GenerationClient that first makes each tool call of `requests` and then answers."""

    def __init__(self, tokenizer: Any, answer: str, requests: Mapping[str, Sequence[str]]):
        """`requests`: tool calls, as an agent with a tool loop writes them, by agent."""
        self._tokenizer, self._answer, self._requests = tokenizer, answer, requests
        try:
            self._end = end_of_turn_id(tokenizer)
        except UserError:  # of a template that no agent may need
            self._end = tokenizer.eos_token_id
        self._asked: Counter[str] = Counter()

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generation:
        _, _, agent = request_id.split("-", 2)
        calls = [*self._requests.get(agent, ()), self._answer]
        text = calls[min(self._asked[request_id], len(calls) - 1)]
        self._asked[request_id] += 1
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._end][: sampling["max_tokens"]]
        return Generation(ids, [-1.0] * len(ids), "stop" if ids[-1] == self._end else "length")


class NoSandbox:
    """Stands for the sandbox: every program prints nothing, and a session has the files that were put there."""

    def __init__(self) -> None:
        self._sizes: dict[str, dict[str, int]] = {}

    async def run_code(self, code: str, **limits: Any) -> RunResult:
        return RunResult("success", "", "", 0, 0.0, 1)

    async def open_session(self, **limits: Any) -> str:
        session_id = str(len(self._sizes))
        self._sizes[session_id] = {}
        return session_id

    async def put(self, session_id: str, name: str, data: bytes) -> None:
        self._sizes[session_id][name] = len(data)

    async def list(self, session_id: str, *patterns: str) -> SessionFiles:
        sizes = {name: size for name, size in sorted(self._sizes[session_id].items()) if not patterns}
        return SessionFiles(sizes, dict.fromkeys(sizes, 0.0), sum(sizes.values()), 1 << 40)

    async def settle(self, session_id: str) -> Sequence[str]:
        return ()

    async def get(self, session_id: str, name: str, max_bytes: int = 0) -> bytes:
        raise FileRefused("a rehearsal has no contents")

    async def delete(self, session_id: str, name: str | None = None) -> None: ...

    async def close(self) -> None: ...


def rehearse(
    workflow: Workflow,
    sample: Mapping[str, Any] = SAMPLE,
    answers: Sequence[str] = ANSWERS,
    tokenizers: Mapping[str, Any] | None = None,
) -> list[Episode]:
    """Return one finished episode per answer, in which `{right}` is the truth and `{wrong}` is not. `tokenizers`: by
    policy; by default, a token is a character. Raises UserError for an error of the user's code, with its file and
    line."""
    by_policy = tokenizers or dict.fromkeys(workflow.policies, CharacterTokenizer())
    return asyncio.run(_rehearse(workflow, dict(sample), answers, by_policy))


def strict(workflow: Workflow) -> Workflow:
    """Return the workflow with every fault reported, whatever it does about it in a run."""
    episode = workflow.episode.model_copy(update={"on_failure": "fail", "on_user_error": "fail", "retries": 0})
    agents = tuple(agent.model_copy(update={"on_failure": "fault"}) for agent in workflow.agents)
    return workflow.model_copy(update={"episode": episode, "agents": agents})


def with_all_tokens(workflow: Workflow) -> Workflow:
    """Return the workflow with calls of any length: with a CharacterTokenizer a character is a token, and a text that
    is cut off would never call its tool."""
    agents = (
        agent.model_copy(update={"sampling": agent.sampling.model_copy(update={"max_tokens": MAX_TOKENS})})
        for agent in workflow.agents
    )
    return workflow.model_copy(update={"agents": tuple(agents)})


async def _rehearse(
    workflow: Workflow, sample: dict[str, Any], answers: Sequence[str], tokenizers: Mapping[str, Any]
) -> list[Episode]:
    workflow = with_stand_ins(with_all_tokens(strict(workflow)))
    sandbox = cast(SandboxClient, NoSandbox())
    tools = make_tools(workflow, sandbox, online=False)
    requests = {}
    for agent in workflow.agents:
        if agent.tool_loop is not None:
            written = agent.tools if agent.tool_loop.format == "hermes" else agent.tools[:1]
            requests[agent.name] = [tool_request(agent, tools[spec.key]) for spec in written]
    episodes = []
    try:
        for index, answer in enumerate(_filled(answers, sample)):
            endpoints = {
                policy: PolicyEndpoint(Script(tokenizer, answer, requests), tokenizer, MAX_TOKENS)
                for policy, tokenizer in tokenizers.items()
            }
            runner = EpisodeRunner(workflow, endpoints, tools, seed=0, sandbox=sandbox)
            episodes.append(await runner.run(sample, "rehearsal", index, step=0))
            _check_tools_ran(episodes[-1])
        await runner.finish(episodes, "rehearsal")
        _check_estimator(workflow, episodes)
    finally:
        for tool in tools.values():
            await close_tool(tool)
    return episodes


def _filled(answers: Sequence[str], sample: Mapping[str, Any]) -> list[str]:
    truth = sample.get("ground_truth")
    right = truth if isinstance(truth, str) and 0 < len(truth) <= _LONGEST_TRUTH else "1"
    return [answer.format(right=right, wrong="0" if right != "0" else "1") for answer in answers]


def _check_estimator(workflow: Workflow, episodes: Sequence[Episode]) -> None:
    """Let an estimator of the user's credit the rows, with 0 for what a critic would say. Raises UserError."""
    if not isinstance(workflow.algorithm, Custom):
        return
    import torch

    from recipe.dag.algorithms.estimate import estimate

    rows = rows_of(episodes)
    for policy in workflow.trained_policies():
        own = [row for row in rows if row.policy == policy]
        has_critic = workflow.critic_owner(policy) is not None
        values = [torch.zeros(len(row.response_ids)) for row in own] if has_critic else None
        if own:
            estimate(workflow.algorithm, own, values=values, base=workflow.path)


def unseen_keys(workflow: Workflow, episodes: Sequence[Episode]) -> list[str]:
    """Return a line for each entry of an agent's `parsed` that a condition or a vote reads and no episode had."""
    seen: dict[str, set[str]] = {}
    for call in (call for episode in episodes for call in episode.all_calls):
        seen.setdefault(call.node, set()).update(call.parsed)
    where = [(f"loops.{name}.until", loop.until) for name, loop in workflow.loops.items() if loop.until is not None]
    where += [(f"node {node.id}: when", node.when) for node in workflow.nodes if node.when is not None]
    read = [
        (location, node, part.key or AGREE_KEY)
        for location, condition in where
        for _, part in parts(condition, ())
        for node in (part.agree or ((part.node,) if part.node is not None and part.key is not None else ()))
    ]
    read += [
        (f"node {node.id}: vote", voter, node.vote.key)
        for node in workflow.nodes
        if node.vote is not None
        for voter in node.after
    ]
    return [
        f"{location}: reads `{key}` of {node}, which no played episode has in `parsed` "
        f"({listing(sorted(seen[node])) or 'it is empty'})"
        for location, node, key in dict.fromkeys(read)
        if node in seen and key not in seen[node]
    ]


def paid_alike(episodes: Sequence[Episode]) -> list[str]:
    """Return a line for each node that pays an agent the same for every answer, and more than nothing."""
    paid: dict[tuple[str, str], list[float]] = {}
    for episode in episodes:
        parts: dict[tuple[str, str], float] = {}
        for call in episode.calls:
            for node, reward in call.reward_parts.items():
                parts[node, call.agent] = parts.get((node, call.agent), 0.0) + reward
        for part, reward in parts.items():
            paid.setdefault(part, []).append(reward)
    return [
        f"node {node}: pays {agent} {rewards[0]:g} for any text: the same for {len(episodes)} different answers, "
        "one of them empty; `verl-dag audit` tries more"
        for (node, agent), rewards in paid.items()
        if len(rewards) == len(episodes) and len(set(rewards)) == 1 and rewards[0] > 0.0
    ]


def _check_tools_ran(episode: Episode) -> None:
    """Raise UserError for a tool that its own schema kept from running."""
    for result in (result for call in episode.all_calls for result in call.tool_results):
        if result.status == "invalid" and result.text.startswith(REFUSED):
            advice = "give the arguments in its schema a `default` that is valid"
            raise UserError(f"tool {result.name}: was not run, since {result.text}; {advice}")


def tool_request(agent: Agent, tool: Tool, program: str = "print(1)") -> str:
    """Return a call of the tool as the agent's model would write it: with `program` if the tool takes code, and with
    arguments that fit its schema."""
    loop, arguments = agent.tool_loop, _arguments(tool)
    assert loop is not None
    if loop.format == "fenced":
        return f"```python\n{program}\n```"
    if loop.format == "tags":
        argument = argument_between_tags(tool, f"agent {agent.name}")
        value = program if argument == "code" else arguments.get(argument, "1")
        return f"<{loop.call_tag}>{value}</{loop.call_tag}>"
    arguments |= {"code": program} if "code" in arguments else {}
    call = {"name": tool.schema["function"]["name"], "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _arguments(tool: Tool) -> dict[str, Any]:
    parameters = parameters_of(tool)
    properties = parameters.get("properties") or {}
    return {name: _value(properties.get(name) or {}) for name in parameters.get("required") or properties}


def _value(schema: Mapping[str, Any]) -> Any:
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    if "minimum" in schema:
        return schema["minimum"]
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    return {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}, "null": None}.get(kind, "1")
