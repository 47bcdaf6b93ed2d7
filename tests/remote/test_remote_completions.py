"""API policies with a tokenizer: token ids out and, where the server returns them, token ids back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.rows import rows_of
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.remote.clients import CompletionsClient, Questions
from recipe.dag.remote.transport import Transport
from recipe.dag.types.model import Api
from tests.remote.openai_server import OpenAIServer

END = 2


def play(world, workflow, server, tools=(), **api):
    async def main():
        spec = Api(base_url=server.url, model="test", tokenizer="t", max_wait_s=0.02, **api)
        transport = Transport(spec, url=server.url, key=None, where="policy main")
        questions = Questions(spec, transport)
        client = CompletionsClient(questions, name="test", tokenizer=world.Tokenizer(), end_of_turn=END)
        endpoint = PolicyEndpoint(client, world.Tokenizer(), 4096)
        runner = EpisodeRunner(workflow, {"main": endpoint}, {tool.name: tool for tool in tools}, seed=0)
        episode = await runner.run(world.sample(), "u", 0, step=0)
        await transport.close()
        return episode

    return asyncio.run(main())


def flow(world, **agent: Any):
    policies = {"main": {"api": {"base_url": "http://x/v1", "model": "test", "tokenizer": "t"}}}
    return world.workflow([{"id": "solve"}], agents=[agent], policies=policies)


def ids_of(world, text: str, **choice: Any) -> dict[str, Any]:
    ids = world.Tokenizer().encode(text)
    return {"text": text, "finish_reason": "stop", "token_ids": ids, **choice}


def test_the_prompt_is_token_ids_and_so_is_the_answer(world):
    answer = ids_of(world, "4<|im_end|>", logprobs={"token_logprobs": [-0.1, -0.2]})
    with OpenAIServer(lambda body: answer) as server:
        episode = play(world, flow(world, sampling={"top_k": 5, "stop": ["x"]}), server)
    (call,), (body,) = episode.calls, server.requests
    assert body["prompt"] == call.prompt_ids and call.response_ids == answer["token_ids"]
    assert call.rollout_log_probs == [-0.1, -0.2] and call.text == "4" and call.stop_reason == "stop"
    assert (body["top_k"], body["stop"], body["return_token_ids"]) == (5, ["x"], True)
    assert call.usage == {"requests": 1, "retries": 0, "prompt_tokens": 7, "completion_tokens": 3}
    assert rows_of([episode]) == []


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"text": "4"}, "4<|im_end|>"),
        ({"text": "4", "finish_reason": "length"}, "4"),
        ({"text": "<a>4", "finish_reason": "stop", "stop_reason": "</a>"}, "<a>4</a>"),
        ({"text": "4", "token_ids": ["x"]}, "4<|im_end|>"),
    ],
)
def test_a_text_without_ids_is_encoded_with_what_ended_it(world, choice, text):
    with OpenAIServer(lambda body: {"finish_reason": "stop", **choice}) as server:
        episode = play(world, flow(world), server)
    (call,) = episode.calls
    assert world.text(call) == text and call.rollout_log_probs == [0.0] * len(call.response_ids)


def test_a_tool_loop_continues_the_token_ids(world):
    said = '<tool_call>{"name": "calc", "arguments": {"code": "6*7"}}</tool_call>'

    def answer(body):
        return ids_of(
            world, f"{'42' if 'tool_response' in world.Tokenizer().decode(body['prompt']) else said}<|im_end|>"
        )

    tool = world.Tool("calc", lambda arguments, state: str(eval(arguments["code"])))
    with OpenAIServer(answer) as server:
        episode = play(world, flow(world, tools=["calc"], tool_loop={}), server, [tool])
    (call,) = episode.calls
    first, second = server.requests
    assert call.text == "42" and [result.text for result in call.tool_results] == ["42"]
    assert second["prompt"][: len(first["prompt"])] == first["prompt"]
    assert call.usage is not None and call.usage["requests"] == 2 and first["seed"] != second["seed"]


@pytest.mark.parametrize("ids", [True, False])
def test_a_call_between_tags_continues_the_message_with_and_without_ids(world, ids):
    """A server without ids says which stop string it removed."""

    def answer(body):
        if "<interpreter>" in world.Tokenizer().decode(body["prompt"]):
            return ids_of(world, "42<|im_end|>")
        cut = {"text": "<code>6*7", "finish_reason": "stop", "stop_reason": "</code>"}
        return ids_of(world, "<code>6*7</code>") if ids else cut

    tool = world.Tool("calc", lambda arguments, state: str(eval(arguments["code"])))
    with OpenAIServer(answer) as server:
        episode = play(world, flow(world, tools=["calc"], tool_loop={"format": "tags"}), server, [tool])
    (call,) = episode.calls
    assert world.text(call) == "<code>6*7</code>\n<interpreter>\n42\n</interpreter>\n42<|im_end|>"
    assert all(body["stop"] == ["</code>"] and body["include_stop_str_in_output"] for body in server.requests)


def test_requests_are_repeated_by_the_client_alone(world):
    with OpenAIServer(faults=lambda number: "500") as server:
        workflow = flow(world).model_copy(update={"episode": flow(world).episode.model_copy(update={"retries": 0})})
        episode = play(world, workflow, server, retries=2)
    assert len(server.requests) == 3 and episode.fault is not None and episode.fault["infra"]
