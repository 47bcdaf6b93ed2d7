"""The OpenAI server over a tiny model and over a scripted one: seeds, batching, tools, token ids, errors."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

pytest.importorskip("torch")

import aiohttp
from aiohttp.test_utils import TestClient, TestServer

from recipe.dag.core.errors import UserError
from recipe.dag.episode.rehearsal import CharacterTokenizer
from recipe.dag.platform.openai_http import serve_until_signal
from recipe.dag.platform.openai_server import OpenAIServer, open_server
from recipe.dag.types.record import Generation

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CALL = '<tool_call>{"name": "calc", "arguments": {"code": "1+1"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {}}}]


class Scripted:
    """The generation server, saying `text`."""

    stop_token_ids, max_len, failure = frozenset({2}), 400, None

    def __init__(self, text: str, stop_reason: str = "stop"):
        self.text, self.stop_reason = text, stop_reason
        self.asked: list[tuple[list[int], dict[str, Any]]] = []

    async def generate(self, ids, params, request_id):
        self.asked.append((ids, params))
        sampled = CharacterTokenizer().encode(self.text) + [2] * (self.stop_reason == "stop")
        return Generation(sampled, [-0.5] * len(sampled), self.stop_reason)


def scripted(text: str, stop_reason: str = "stop", template: str = "tool_calls") -> tuple[OpenAIServer, Scripted]:
    tokenizer, model = CharacterTokenizer(), Scripted(text, stop_reason)
    tokenizer.chat_template = template  # pyright: ignore[reportAttributeAccessIssue]  # as transformers' have
    return OpenAIServer(model, tokenizer, "m"), model  # pyright: ignore[reportArgumentType]  # stands for a LocalServer


def ask(server: Any, *bodies: dict[str, Any], path: str = "/v1/chat/completions") -> list[tuple[int, Any]]:
    """Send all bodies at once; return (status, JSON) of each answer."""

    async def main():
        async with TestClient(TestServer(server.app())) as client:

            async def post(body):
                async with client.post(path, json=body) as answer:
                    return answer.status, await answer.json()

            return await asyncio.gather(*map(post, bodies))

    return asyncio.run(main())


@pytest.fixture(scope="module")
def tiny(tiny_model) -> OpenAIServer:
    return open_server(str(tiny_model), name="m", max_requests=4)


def complete(server, *bodies) -> list[dict[str, Any]]:
    answers = ask(
        server, *({"model": "m", "return_token_ids": True, **body} for body in bodies), path="/v1/completions"
    )
    assert {status for status, _ in answers} == {200}, answers
    return [answer for _, answer in answers]


def test_a_seed_gives_the_same_tokens_whatever_else_is_asked(tiny):
    alone = complete(tiny, {"prompt": [5, 6, 7], "seed": 3, "max_tokens": 12})[0]
    others = [{"prompt": [9 + k], "seed": k, "max_tokens": 3 + k} for k in range(7)]
    among = complete(tiny, *others, {"prompt": [5, 6, 7], "seed": 3, "max_tokens": 12})[-1]
    assert among["choices"] == alone["choices"]
    other_seed = complete(tiny, {"prompt": [5, 6, 7], "seed": 4, "max_tokens": 12})[0]
    assert other_seed["choices"][0]["token_ids"] != alone["choices"][0]["token_ids"]


def test_choices_differ_and_the_first_is_that_of_the_seed(tiny):
    body = {"prompt": [5, 6, 7], "seed": 3, "max_tokens": 12}
    several = complete(tiny, body | {"n": 3})[0]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in several["choices"]}) == 3
    assert several["choices"][0]["token_ids"] == complete(tiny, body)[0]["choices"][0]["token_ids"]


def test_ids_text_and_log_probs_agree_with_the_usage(tiny):
    (answer,) = complete(tiny, {"prompt": [5, 6, 7], "seed": 1, "max_tokens": 6, "logprobs": 0, "ignore_eos": True})
    (choice,) = answer["choices"]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    found = choice["logprobs"]
    assert len(choice["token_ids"]) == len(found["token_logprobs"]) == len(found["tokens"]) == 6
    assert choice["finish_reason"] == "length" and choice["prompt_token_ids"] == [5, 6, 7]
    assert all(value <= 0 for value in found["token_logprobs"])


def test_texts_and_several_prompts_are_completed():
    server, model = scripted("yes")
    (answer,) = complete(server, {"prompt": ["ab", "c"], "n": 2})
    encoded = [CharacterTokenizer().encode(text) for text in ("ab", "ab", "c", "c")]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [ids for ids, _ in model.asked] == encoded
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(k, "yes") for k in range(4)]


def test_temperature_zero_is_greedy(tiny):
    one, two = complete(tiny, *({"prompt": [5], "temperature": 0, "seed": seed, "max_tokens": 8} for seed in (1, 2)))
    assert one["choices"] == two["choices"]


def test_a_prompt_beyond_the_context_is_said_in_openais_words(tiny):
    [(status, answer)] = ask(tiny, {"model": "m", "prompt": [5] * 300}, path="/v1/completions")
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


def test_a_stop_string_ends_the_text_and_is_kept_if_asked():
    server, _ = scripted("one END two")
    [(_, cut), (_, kept)] = ask(
        server, CHAT | {"stop": "END"}, CHAT | {"stop": ["END"], "include_stop_str_in_output": True}
    )
    assert cut["choices"][0]["message"]["content"] == "one " and cut["choices"][0]["stop_reason"] == "END"
    assert kept["choices"][0]["message"]["content"] == "one END" and kept["choices"][0]["finish_reason"] == "stop"


def test_tool_calls_are_parsed_if_the_template_can_render_them_again():
    server, model = scripted(f"So {CALL}")
    [(_, answer)] = ask(server, CHAT | {"tools": TOOLS, "return_token_ids": True})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "So"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "calc", "arguments": '{"code": "1+1"}'}
    assert "calc" in CharacterTokenizer().decode(model.asked[0][0])  # the template got the tools
    assert CharacterTokenizer().decode(choice["token_ids"]) == f"So {CALL}<|im_end|>"


@pytest.mark.parametrize(
    ("body", "template", "stop_reason"),
    [({}, "tool_calls", "stop"), ({"tools": TOOLS, "tool_choice": "none"}, "tool_calls", "stop"),
     ({"tools": TOOLS}, "messages", "stop"), ({"tools": TOOLS}, "tool_calls", "length")],
)  # fmt: skip
def test_otherwise_they_stay_in_the_text(body, template, stop_reason):
    server, _ = scripted(CALL, stop_reason, template)
    [(_, answer)] = ask(server, CHAT | body)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": CALL}
    assert answer["choices"][0]["finish_reason"] == stop_reason


def test_log_probs_of_a_chat_have_openais_form():
    server, _ = scripted("ab")
    [(_, answer)] = ask(server, CHAT | {"logprobs": True})
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert [(item["token"], item["logprob"]) for item in tokens][:2] == [("a", -0.5), ("b", -0.5)]


def test_sampling_parameters_reach_the_generator():
    server, model = scripted("a")
    fields = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "presence_penalty": 0.5, "seed": 9}
    ask(server, CHAT | fields | {"max_tokens": 5, "stop": ["x"]})
    assert model.asked[0][1] == fields | {"max_tokens": 5, "stop": ["x"]}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (CHAT | {"model": "other"}, 404, "model_not_found"),
        (CHAT | {"temperature": "hot"}, 400, None),
        ({"model": "m"}, 400, None),
        (CHAT | {"messages": [{"role": "user", "content": "x" * 500}]}, 400, "context_length_exceeded"),
        (CHAT | {"messages": [{"role": "user", "content": "\ud800"}]}, 400, None),
        (CHAT | {"chat_template_kwargs": {"return_dict": False}}, 400, None),
    ],
)
def test_errors_have_openais_form(body, status, code):
    server, _ = scripted("a")
    [(answered, answer)] = ask(server, body)
    assert answered == status and answer["error"]["code"] == code and answer["error"]["message"]


def test_the_template_is_the_models(tiny):
    [(status, answer)] = ask(tiny, CHAT | {"chat_template_kwargs": {"chat_template": "{{ range(10**9) | list }}"}})
    assert status == 400 and answer["error"]["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Host": "localhost:8000"}, 200),
    ],
)
def test_web_pages_are_refused(headers, status):
    server, model = scripted("a")

    async def main():
        async with TestClient(TestServer(server.app())) as client:
            async with client.post("/v1/chat/completions", json=CHAT, headers=headers) as answer:
                return answer.status, await answer.json()

    answered, body = asyncio.run(main())
    assert answered == status and ("error" in body) == (status != 200) and len(model.asked) == (status == 200)


def test_a_prompt_that_takes_long_delays_no_other_request():
    server, _ = scripted("a")
    answered, render = threading.Event(), server._tokenizer.apply_chat_template

    def slow(*args, **kwargs):
        assert answered.wait(30)
        return render(*args, **kwargs)

    server._tokenizer.apply_chat_template = slow

    async def main():
        async with TestClient(TestServer(server.app())) as client:
            asked = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
            async with client.get("/health") as answer:
                assert answer.status == 200
            answered.set()
            async with await asked as answer:
                return answer.status

    assert asyncio.run(main()) == 200


def test_models_health_unknown_paths_and_bodies():
    server, model = scripted("a")

    async def main():
        async with TestClient(TestServer(server.app())) as client:

            async def get(path):
                async with client.get(path) as answer:
                    return answer.status, await answer.json()

            seen = [await get(path) for path in ("/health", "/v1/models", "/v1/models/m", "/v1/models/x", "/nothing")]
            async with client.post("/v1/completions", data=b"{not json") as answer:
                seen.append((answer.status, await answer.json()))
            model.failure = RuntimeError("out of memory")  # pyright: ignore[reportAttributeAccessIssue]
            return [*seen, await get("/health")]

    health, models, card, unknown, nothing, broken, failed = asyncio.run(main())
    assert health == (200, {"status": "ok"})
    assert models[1]["data"] == [card[1]] and card[1]["id"] == "m" and card[1]["max_model_len"] == 400
    assert [answer[0] for answer in (unknown, nothing, broken, failed)] == [404, 404, 400, 503]
    assert all("error" in answer[1] for answer in (unknown, nothing, broken, failed))


def test_a_client_that_has_gone_ends_its_generations():
    server, model = scripted("a")
    ended: list[str] = []

    async def main():
        started, address = asyncio.Event(), asyncio.get_running_loop().create_future()

        async def generate(ids, params, request_id):
            started.set()
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append("cancelled")

        model.generate = generate
        serving = asyncio.create_task(serve_until_signal(server.app(), "127.0.0.1", 0, address.set_result))
        async with aiohttp.ClientSession() as client:
            url = await address
            asked = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=CHAT | {"n": 2}))
            await started.wait()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            async with asyncio.timeout(30):
                while len(ended) < 2:
                    await asyncio.sleep(0.01)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(main())
    assert ended == ["cancelled", "cancelled"]


def test_a_folder_without_a_model_is_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot be loaded as a model") as error:
        open_server(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_context_beyond_the_models_is_refused(tiny_model):
    with pytest.raises(UserError, match="--max-len 9999: the model's context has 256 tokens"):
        open_server(str(tiny_model), max_len=9999)
