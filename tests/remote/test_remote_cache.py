"""The cache of answers: what is the same request, several processes, damaged files."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipe.dag.core.errors import ModelServerFault, UserError
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.remote import cache
from recipe.dag.remote.cache import Cache, cache_key
from recipe.dag.remote.clients import ChatClient, Questions
from recipe.dag.remote.connect import Remotes
from recipe.dag.remote.transport import Transport
from recipe.dag.report.metrics import rollout_metrics
from recipe.dag.types.model import Api
from recipe.dag.types.record import Episode
from recipe.dag.workflow.agent_schema import Sampling
from tests.remote.openai_server import OpenAIServer, tool_call
from tests.remote.provider_servers import AnthropicServer, GoogleServer

ROOT = Path(__file__).parents[3]


def play(
    world, server, *, n: int = 1, uid: str = "u", temperature: float = 0.0, seed: int = 0, tools=(), agent=None, **api
):
    options = {"base_url": server.url, "model": "test", "max_wait_s": 0.02, "cache": str(world.path / "c" / "a.sqlite")}
    agents = [{"sampling": {"temperature": temperature}, **(agent or {})}]
    workflow = world.workflow([{"id": "solve"}], agents=agents, policies={"main": {"api": options | api}})

    async def main() -> list[Episode]:
        remotes = Remotes(workflow)
        runner = EpisodeRunner(workflow, remotes.endpoints, {tool.name: tool for tool in tools}, seed=seed)
        try:
            return [await runner.run(world.sample(), uid, index, step=0) for index in range(n)]
        finally:
            await remotes.close()

    return asyncio.run(main())


@pytest.fixture(params=[OpenAIServer, AnthropicServer, GoogleServer])
def server(request):
    provider = {OpenAIServer: "openai", AnthropicServer: "anthropic", GoogleServer: "google"}[request.param]
    with request.param(lambda body: "ok") as server:
        server.provider = provider
        yield server


def test_a_greedy_request_is_paid_for_once(world, server):
    price = {"input": 1.0, "output": 1.0}
    episodes = play(world, server, n=2, provider=server.provider, price=price)
    episodes += play(world, server, n=2, uid="another", provider=server.provider, price=price)
    assert len(server.requests) == 1 and {episode.calls[0].text for episode in episodes} == {"ok"}
    first, second = (episode.calls[0].usage for episode in episodes[:2])
    nothing = dict.fromkeys(("requests", "retries", "cache_hits", "prompt_tokens", "completion_tokens", "cost"), 0)
    assert first == nothing | {"requests": 1, "prompt_tokens": 7, "completion_tokens": 3, "cost": 1e-5}
    assert second == nothing | {"cache_hits": 1}
    assert rollout_metrics(episodes)["policy/main/api/cache_hits"] == 3


def ask(server, cache: Cache, *, count: int, cancel_first: bool = False, **api) -> tuple[list[Any], dict]:
    """Ask the same `count` times at once; the first is cancelled once the server has it."""
    spec = Api(base_url=server.url, model="test", max_wait_s=0.02, cache="unused", **api)
    sampling = {**Sampling(temperature=0.0).model_dump(), "stop": []}

    async def main():
        transport = Transport(spec, url=server.url, key=None, where="policy main")
        endpoint = ChatClient("test", Questions(spec, transport, cache))
        messages = [{"role": "user", "content": "hi"}]
        asked = [
            asyncio.create_task(endpoint.complete(messages, {**sampling, "seed": k}, timeout_s=20.0))
            for k in range(count)
        ]
        while cancel_first and not server.requests:
            await asyncio.sleep(0.005)
        if cancel_first:
            asked[0].cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert not endpoint.questions._under_way
        await transport.close()
        return answers, transport.account.ledger.counts("")

    return asyncio.run(main())


def test_equal_requests_at_the_same_time_are_paid_for_once_and_get_one_answer(tmp_path):
    said = iter(range(100))
    with OpenAIServer(lambda body: f"verdict {next(said)}") as server:
        answers, counts = ask(server, Cache(tmp_path / "a.sqlite", "cache"), count=6)
    assert [answer.message["content"] for answer in answers] == ["verdict 0"] * 6 and len(server.requests) == 1
    assert sorted(answer.usage["requests"] for answer in answers) == [0, 0, 0, 0, 0, 1]
    assert sum(answer.usage["prompt_tokens"] for answer in answers) == 7
    assert (counts["calls"], counts["cache_hits"], counts["failed"]) == (1, 5, 0)


def test_a_failure_is_that_of_those_who_wait_and_the_next_asks_again(tmp_path):
    cache = Cache(tmp_path / "a.sqlite", "cache")
    with OpenAIServer(faults={0: "500"}) as server:
        answers, counts = ask(server, cache, count=3, retries=0)
        assert all(isinstance(answer, ModelServerFault) for answer in answers) and len(server.requests) == 1
        assert len(set(map(id, answers))) == 3 and {answer.where for answer in answers} == {"policy main"}
        assert (counts["calls"], counts["failed"]) == (1, 3)
        answers, _ = ask(server, cache, count=1, retries=0)
        assert answers[0].message["content"] == "ok" and len(server.requests) == 2


def test_the_others_get_their_answer_if_the_first_is_cancelled(tmp_path):
    with OpenAIServer(faults={0: "hang"}) as server:
        (first, *others), counts = ask(server, Cache(tmp_path / "a.sqlite", "cache"), count=4, cancel_first=True)
    assert isinstance(first, asyncio.CancelledError) and len(server.requests) == 2
    assert [answer.message["content"] for answer in others] == ["ok"] * 3
    assert (counts["calls"], counts["cache_hits"], counts["failed"]) == (2, 2, 1)


def test_a_sampled_request_is_the_same_only_with_the_same_seed(world, server):
    for _ in range(2):  # siblings differ, and the next run of the same seed asks nothing
        play(world, server, n=3, temperature=1.0, provider=server.provider)
        assert len(server.requests) == 3
    play(world, server, n=1, temperature=1.0, seed=1, provider=server.provider)
    assert len(server.requests) == 4


def test_a_temperature_in_the_body_counts(world):
    with OpenAIServer() as server:
        play(world, server, n=2, body={"temperature": 0.7})
        assert len(server.requests) == 2  # sampled, so siblings have requests of their own
        play(world, server, n=2, temperature=1.0, body={"temperature": 0})
        assert len(server.requests) == 3


def test_another_model_prompt_option_or_server_is_another_request(world):
    with OpenAIServer() as server, OpenAIServer() as other:
        changes = [
            {},
            {"model": "m2"},
            {"body": {"reasoning_effort": "low"}},
            {"agent": {"sampling": {"max_tokens": 9}}},
        ]
        for change in changes:
            play(world, server, **change)
        play(world, other)
        assert (len(server.requests), len(other.requests)) == (4, 1)


@pytest.mark.parametrize("fault", ["empty", "nonsense"])
def test_what_cannot_be_read_is_asked_for_again_and_not_kept(world, fault):
    with OpenAIServer(faults={0: fault}) as server:
        first, second = play(world, server, n=2)
        assert (first.attempts, first.calls[0].text, second.calls[0].text) == (1, "ok", "ok")
        assert len(server.requests) == 2 and first.calls[0].usage["retries"] == 1


@pytest.mark.parametrize("key", ["none", "1"])
def test_a_dummy_key_is_left_in_the_answers(world, monkeypatch, key):
    monkeypatch.setenv("THE_KEY", key)
    with OpenAIServer(lambda body: "none of the 11") as server:
        episodes = play(world, server, n=2, key_env="THE_KEY")
    assert [episode.calls[0].text for episode in episodes] == ["none of the 11"] * 2


def test_tool_calls_come_out_of_the_cache_as_they_were(world):
    calc = world.Tool("calc", lambda arguments, state: "2")
    answer = lambda body: tool_call("calc", code="1+1") if len(body["messages"]) == 1 else "two"  # noqa: E731
    agent = {"tools": ["calc"], "tool_loop": {}, "sampling": {"temperature": 0.0}}
    with OpenAIServer(answer) as server:
        first, second = play(world, server, n=2, agent=agent, tools=[calc])
        assert len(server.requests) == 2
    assert first.calls[0].messages == second.calls[0].messages and second.calls[0].text == "two"


def test_an_answer_that_quotes_the_key_is_kept_without_it(world, monkeypatch):
    monkeypatch.setenv("THE_KEY", "sk-quite-secret-key-1234567890")
    with OpenAIServer(lambda body: "the key is sk-quite-secret-key-1234567890") as server:
        play(world, server, key_env="THE_KEY")
    assert all(b"sk-quite-secret" not in file.read_bytes() for file in (world.path / "c").iterdir())


def test_a_damaged_file_is_one_line(world, tmp_path):
    (tmp_path / "a.sqlite").write_bytes(b"not a database, but long enough to be taken for one" * 50)
    with pytest.raises(UserError, match=r"policies.main.api.cache: .*a.sqlite cannot be used as a cache") as error:
        Cache(tmp_path / "a.sqlite", "policies.main.api.cache")
    assert "\n" not in str(error.value) and "delete it" in str(error.value)


def test_a_file_that_is_damaged_later_is_one_line_too(tmp_path):
    cache = Cache(tmp_path / "a.sqlite", "policies.main.api.cache")
    asyncio.run(cache.put("k", "{}"))
    cache._database.execute("UPDATE answers SET answer = '{cut'")
    with pytest.raises(UserError, match="cannot be used as a cache .JSONDecodeError"):
        asyncio.run(cache.get("k"))
    cache.close()


def test_the_file_is_made_when_it_is_used_and_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "new" / "a.sqlite", "policies.main.api.cache")
    assert not (tmp_path / "new").exists()  # a check of the workflow writes nothing
    asyncio.run(cache.put("k", "{}"))
    assert (tmp_path / "new" / "a.sqlite").is_file()
    with pytest.raises(UserError, match="cannot be used as a cache"):
        asyncio.run(Cache(tmp_path / "file" / "a.sqlite", "policies.main.api.cache").get("k"))


def test_a_file_that_another_process_makes_at_the_same_time_is_waited_for(tmp_path, monkeypatch):
    other = sqlite3.connect(tmp_path / "a.sqlite", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")  # for which SQLite does not wait
    monkeypatch.setattr(cache._while_busy, "sleep", lambda seconds: other.execute("COMMIT"))
    asyncio.run(Cache(tmp_path / "a.sqlite", "cache").put("key", "{}"))
    assert not other.in_transaction


def test_several_processes_write_one_file(tmp_path):
    code = """
import asyncio, sys
from recipe.dag.remote.cache import Cache
async def main():
    cache = Cache(sys.argv[1], "cache")
    await asyncio.gather(*(cache.put(f"key {k}", '{"by": "%s"}' % sys.argv[2]) for k in range(200)))
asyncio.run(main())
"""
    path = tmp_path / "a.sqlite"
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(k)], cwd=ROOT, stderr=subprocess.PIPE)
        for k in range(4)
    ]
    assert [process.communicate()[1] for process in started] == [b""] * 4

    async def kept() -> list[dict | None]:
        cache = Cache(path, "cache")
        return [await cache.get(f"key {k}") for k in range(200)]

    assert all(answer is not None and answer["by"] in "0123" for answer in asyncio.run(kept()))


def test_a_key_depends_on_each_part_and_not_on_the_order_of_fields():
    parts = ("openai", "http://h/v1", "/chat/completions", {"a": 1, "b": [1, 2]}, 3)
    key = cache_key(*parts)
    assert key == cache_key(*parts[:3], {"b": [1, 2], "a": 1}, 3)
    others = [("google", *parts[1:]), (parts[0], "http://i/v1", *parts[2:]), (*parts[:2], "/c", *parts[3:])]
    others += [(*parts[:3], {"a": 1, "b": [2, 1]}, 3), (*parts[:4], None), (*parts[:4], 4)]
    assert len({key, *(cache_key(*other) for other in others)}) == 7
