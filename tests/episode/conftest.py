"""A scripted world for episodes: a tokenizer of characters with a ChatML template, clients, workflows from code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode import failure, generation
from recipe.dag.episode.rehearsal import END, START, CharacterTokenizer
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.types.record import Generation, ToolResult
from recipe.dag.workflow.node import KEYS
from recipe.dag.workflow.schema import Workflow

KINDS = {*KEYS}
"""The keys that give a node a kind."""


class Tokenizer(CharacterTokenizer):
    """With the names of tools alone in its template, and tool results as a user's message."""

    def apply_chat_template(
        self,
        conversation,
        tools=None,
        tokenize=True,
        add_generation_prompt=False,
        return_dict=True,
        prefix="",
        **kwargs,
    ):
        text = f"{START}system\n{[tool['function']['name'] for tool in tools]}{END}\n" if tools else ""
        for message in conversation:
            content = message["content"]
            role = message["role"]
            if role == "tool":
                role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            text += f"{START}{role}\n{content}{END}\n"
        text += f"{START}assistant\n{prefix}" if add_generation_prompt else ""
        if not tokenize:
            return text
        return {"input_ids": self.encode(text)} if return_dict else self.encode(text)


@dataclass
class Client:
    """Answers with what `script(prompt text, sampling, request id)` says; the end-of-turn token is added."""

    script: Callable[[str, dict, str], str | Generation | Awaitable] = lambda prompt, sampling, request: "ok"
    requests: list[tuple[str, str, dict]] = field(default_factory=list)
    weight_version: int = 0

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generation:
        prompt = Tokenizer().decode(prompt_ids)
        self.requests.append((request_id, prompt, dict(sampling)))
        answer = self.script(prompt, sampling, request_id)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if not isinstance(answer, str):
            return answer
        ids = Tokenizer().encode(answer + END)[: sampling["max_tokens"]]
        stop = "stop" if ids[-1] == 2 else "length"
        return Generation(ids, [-(token % 7) / 10 for token in ids], stop, self.weight_version)


@dataclass
class Tool:
    """Runs `work(arguments, state)`."""

    name: str
    work: Callable[[dict, dict], Any]

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name, "description": "", "parameters": {}}}

    async def execute(self, arguments: dict[str, Any], state: dict[str, Any]) -> ToolResult:
        result = self.work(arguments, state)
        if asyncio.iscoroutine(result):
            result = await result
        return ToolResult(self.name, arguments, "success", result) if isinstance(result, str) else result

    async def close(self) -> None: ...


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch):
    monkeypatch.setattr(generation, "BACKOFF_S", 0.0)
    monkeypatch.setattr(failure, "BACKOFF_S", 0.0)


@pytest.fixture
def world(tmp_path: Path) -> SimpleNamespace:
    """`workflow(nodes, files)`, whose nodes without a kind are those of the first agent; `runner(workflow, client,
    tools)`, `play(...)`."""

    def workflow(
        nodes: list[dict], *, agents: list[dict] | None = None, files: dict[str, str] | None = None, **keys: Any
    ) -> Workflow:
        for name, code in (files or {}).items():
            (tmp_path / name).write_text(code)
        numbers = [int(node.get("agent", "agent0").removeprefix("agent")) for node in nodes] if agents is None else ()
        agents = agents or [{} for _ in range(1 + max(numbers, default=0))]
        agents = [{"name": f"agent{k}", "policy": "main", **agent} for k, agent in enumerate(agents)]
        nodes = [node if KINDS & node.keys() else {"agent": agents[0]["name"], **node} for node in nodes]
        policies = keys.pop("policies", {"main": {"model": {"path": "m"}}})
        path = tmp_path / "workflow.yaml"
        path.touch()
        return Workflow(path=str(path), dag_id="test", agents=agents, policies=policies, nodes=nodes, **keys)

    def runner(
        flow: Workflow,
        client: Any = None,
        tools: list[Tool] = (),
        *,
        max_model_len: int = 4096,
        max_response_length: int | None = None,
        seed: int = 0,
    ) -> EpisodeRunner:
        endpoint = PolicyEndpoint(client or Client(), Tokenizer(), max_model_len, max_response_length)
        return EpisodeRunner(flow, dict.fromkeys(flow.policies, endpoint), {t.name: t for t in tools}, seed=seed)

    def sample(text: str = "question", **keys: Any) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": text}], "ground_truth": "4", **keys}

    def play(flow: Workflow, client: Any = None, tools: list[Tool] = (), *, validate: bool = False, **keys: Any):
        """One episode, and the check that it leaves no task behind."""

        async def main():
            made = runner(flow, client, tools, **keys)
            episode = await made.run(sample(), "u0", 0, step=0, validate=validate)
            assert asyncio.all_tasks() == {asyncio.current_task()}
            return episode

        return asyncio.run(main())

    def text(call) -> str:
        return Tokenizer().decode(call.response_ids)

    return SimpleNamespace(
        workflow=workflow,
        runner=runner,
        sample=sample,
        play=play,
        text=text,
        Tokenizer=Tokenizer,
        Client=Client,
        Tool=Tool,
        path=tmp_path,
    )
