"""The context of every sampled token: what a row puts in front of it is what the server had been sent.

Episodes of two turns with all three agents, the code agent with two actions in each. The server samples tokens that no
tokenizer would choose for its text, so a text that was decoded and encoded again shows.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.rows import rows_of
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.edits import load_edited, split_edits
from recipe.dag.types.record import Episode, Generation, ToolResult
from recipe.dag.types.row import Row
from recipe.dag.workflow.schema import Workflow
from recipe.mathchat.teacher import Teacher, program_text
from recipe.tiny.tokenizer import END_OF_TURN, build_tokenizer

WORKFLOW = Path(__file__).parents[2] / "workflows" / "workflow_mathchat.yaml"
TRAINED = ("solver", "coder", "verifier")
VERDICT = "REASONING: fair.\nPROCESS_SCORE: 7\nANSWER_CORRECT: 0"
Contexts = Counter[tuple[tuple[int, ...], int]]
"""(the ids in front of a sampled token, the token) -> how often."""


def workflow(*edits: str) -> Workflow:
    return load_edited(WORKFLOW, split_edits(["workflow.episode.max_turns=2", *edits])[1])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    teacher = Teacher(workflow(), 0)
    return build_tokenizer([lesson for problem in teacher.problems(60, 8) for lesson in teacher.teach(problem)])


class Recorder:
    """A policy's server that writes down what it is sent and what it samples: `answers[node's place]`, one byte per
    token."""

    repeats = True

    def __init__(self, tokenizer: Any, answers: Iterable[str]):
        self.tokenizer, self.answers = tokenizer, iter(answers)
        self.requests: list[tuple[list[int], list[int]]] = []

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generation:
        text = next(self.answers)
        ids = [id for character in text for id in self.tokenizer.encode(character, add_special_tokens=False)]
        ids.append(self.tokenizer.convert_tokens_to_ids(END_OF_TURN))
        self.requests.append((list(prompt_ids), ids))
        return Generation(list(ids), [-0.25] * len(ids), "stop")


class Python:
    """The code interpreter, which prints 42."""

    schema = {"type": "function", "function": {"name": "code_interpreter", "description": "", "parameters": {}}}

    async def execute(self, arguments: dict[str, Any], state: dict[str, Any]) -> ToolResult:
        return ToolResult("code_interpreter", arguments, "success", "42\n", stdout="42\n")

    async def close(self) -> None: ...


def play(flow: Workflow, clients: dict[str, Any], tokenizer: Any) -> Episode:
    endpoints = {name: PolicyEndpoint(client, tokenizer, 8192) for name, client in clients.items()}
    sample = {"prompt": [{"role": "user", "content": "Bob has 6 boxes of 7 cups. How many?"}], "ground_truth": "42"}

    async def main() -> Episode:
        tools: dict[str, Any] = {"code_interpreter": Python()}
        return await EpisodeRunner(flow, endpoints, tools, seed=0).run(sample, "u0", 0, step=0)

    return asyncio.run(main())


def in_rows(rows: Iterable[Row]) -> Contexts:
    found: Contexts = Counter()
    for row in rows:
        ids = row.prompt_ids + row.response_ids
        for position, sampled in enumerate(row.response_mask, start=len(row.prompt_ids)):
            if sampled:
                found[tuple(ids[:position]), ids[position]] += 1
    return found


def at_the_server(requests: Iterable[tuple[list[int], list[int]]]) -> Contexts:
    found: Contexts = Counter()
    for prompt, response in requests:
        ids = prompt + response
        for position in range(len(prompt), len(ids)):
            found[tuple(ids[:position]), ids[position]] += 1
    return found


def recorded(tokenizer: Any, *edits: str) -> tuple[list[Row], list[Row], Contexts, Episode]:
    """Return the merged rows, the rows of single calls, what the servers saw, and the episode."""
    answers = {
        "solver": ["Compute 6*7", "<think>again</think>Compute 7*6"],
        "coder": [program_text("6*7"), "Result: 42", program_text("7*6"), program_text("6*7")],
        "verifier": ["\\boxed{41}", "\\boxed{42}"],
        "coach": [VERDICT] * 8,
    }
    clients = {name: Recorder(tokenizer, texts) for name, texts in answers.items()}
    episode = play(workflow(*edits), clients, tokenizer)
    assert episode.fault is None and [call.agent for call in episode.calls if call.agent in TRAINED] == [
        "solver", "coder", "coder", "verifier"
    ] * 2  # fmt: skip
    rows = [[row for row in rows_of([episode], merge=merge) if row.policy in TRAINED] for merge in (True, False)]
    sent = at_the_server(request for name in TRAINED for request in clients[name].requests)
    return rows[0], rows[1], sent, episode


@pytest.mark.parametrize("memory", ["chat", "none"])
def test_the_ids_in_front_of_each_sampled_token_are_those_that_the_server_was_sent(tokenizer, memory):
    merged, single, sent, _ = recorded(tokenizer, f"workflow.agents.coder.memory={memory}")
    assert in_rows(merged) == in_rows(single) == sent
    assert len(single) == 8 and len(merged) == (5 if memory == "chat" else 8)


def test_an_actions_context_has_all_earlier_actions_and_what_their_programs_printed(tokenizer):
    _, single, _, episode = recorded(tokenizer)
    read = [tokenizer.decode(row.prompt_ids) for row in single if row.calls[0].agent == "coder"]
    assert "Compute 6*7" in read[1] and program_text("6*7") in read[1] and "<tool_response>\n42" in read[1]
    assert read[3].startswith(read[2]) and read[2].startswith(read[1]) and "Result: 42" in read[3]
    judged = [call for call in episode.calls if call.node == "coach_code"]
    assert all(text in call.prompt_text for call, text in zip(judged, ("Compute 6*7", "<tool_response>"), strict=False))


def test_the_published_context_and_texts_encoded_again_are_found_out(tokenizer):
    """An action conditioned on the action before alone, as in the published code, and one tokenised from its text."""
    _, single, sent, episode = recorded(tokenizer)
    second = next(row for row in single if row.calls[0].agent == "coder" and row.calls[0].round == 1)
    first = next(row for row in single if row.calls[0].agent == "coder")
    published = replace(second, prompt_ids=first.response_ids)
    assert in_rows([*(row for row in single if row is not second), published]) != sent
    again = tokenizer.encode(tokenizer.decode(second.response_ids), add_special_tokens=False)
    mask = [1] * len(again)
    calls = (replace(second.calls[0], end=len(again)),)
    retokenised = replace(
        second, response_ids=again, response_mask=mask, rollout_log_probs=[0.0] * len(mask), calls=calls
    )
    assert in_rows([*(row for row in single if row is not second), retokenised]) != sent


def test_the_same_with_the_server_of_the_cpu_platform(tokenizer, tmp_path):
    """Random weights, so that texts are broken, and every action in a loop that only its rounds end."""
    from recipe.dag.platform.rollout_server import RolloutServer
    from recipe.tiny.build import new_model

    new_model(tokenizer, 0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    server = RolloutServer(str(tmp_path), max_requests=4, max_len=1024, load_format="auto", trust_remote_code=False)
    requests: list[tuple[list[int], list[int]]] = []

    class Client:
        repeats = True

        async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generation:
            params = {**sampling, "max_tokens": 16, "logprobs": True, "temperature": 1.0}
            output = await server.generate(prompt_ids, params, request_id)
            requests.append((list(prompt_ids), list(output.token_ids)))
            return Generation(list(output.token_ids), list(output.log_probs or []), output.stop_reason or "stop")

    coach = Recorder(tokenizer, [VERDICT] * 8)
    clients = {**dict.fromkeys(TRAINED, Client()), "coach": coach}
    episode = play(workflow("~workflow.loops.act.until"), clients, tokenizer)
    assert episode.fault is None and len(requests) == 8
    rows = [row for row in rows_of([episode]) if row.policy in TRAINED]
    assert len(rows) == 5 and in_rows(rows) == at_the_server(requests)
    log_probs = [
        p for row in rows for p, sampled in zip(row.rollout_log_probs, row.response_mask, strict=True) if sampled
    ]
    assert all(p < 0 for p in log_probs) and json.dumps(log_probs)
