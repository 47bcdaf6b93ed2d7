"""Episodes of policies behind a chat API: what is sent, what the record holds, tools, memory, and no training rows."""

from __future__ import annotations

import asyncio
import json

import pytest

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.core.errors import UserError
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.batch import run_batch
from recipe.dag.episode.rows import rows_of
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.remote.connect import ApiSpec, Remotes
from recipe.dag.report.evaluation_log import episode_from
from recipe.dag.report.metrics import rollout_metrics
from recipe.dag.report.results import summarise
from recipe.dag.types.model import Api
from tests.remote.openai_server import OpenAIServer, scattered, tool_call
from tests.remote.plays import play

ONE = [{"id": "solve"}]
PARSE = """
from recipe.dag.types.context import Output
def prompt(context):
    return [{"role": "user", "content": f"{context.problem} turn {context.turn}"}]
def parse(context):
    return Output(parsed={"length": len(context.call.text)})
"""


def flow(world, server, *, agent: dict | None = None, nodes: list[dict] | None = None, api: dict | None = None, **keys):
    options = {"base_url": server.url, "model": "test", "max_wait_s": 0.02, **(api or {})}
    return world.workflow(nodes or ONE, agents=[agent or {}], policies={"main": {"api": options}}, **keys)


def calculator(world):
    return world.Tool("calc", lambda arguments, state: str(eval(arguments["code"])))


def looped(**loop) -> dict:
    return {"tools": ["calc"], "tool_loop": loop}


def test_a_call_records_what_was_sent_and_received(world):
    with OpenAIServer(lambda body: "The answer is 4.") as server:
        (episode,) = play(world, flow(world, server, files={"h.py": PARSE}, nodes=[
            {"id": "solve", "hooks": "h.py"}
        ]))  # fmt: skip
    (call,) = episode.calls
    assert call.messages == [
        {"role": "user", "content": "question turn 0"},
        {"role": "assistant", "content": "The answer is 4."},
    ]
    assert (call.text, call.parsed, call.stop_reason) == ("The answer is 4.", {"length": 16}, "stop")
    assert call.prompt_text == "user:\nquestion turn 0"
    assert call.response_ids == call.prompt_ids == []
    assert call.usage == {"requests": 1, "retries": 0, "prompt_tokens": 7, "completion_tokens": 3}
    assert episode_from(json.loads(json.dumps(episode.to_json()))).calls[0].messages == call.messages


def test_sampling_parameters_go_through_and_neutral_ones_are_left_out(world):
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "max_tokens": 9, "stop": ["END"]}
    with OpenAIServer() as server:
        play(world, flow(world, server, agent={"sampling": sampling, "validation": {"temperature": 0.0}}))
        play(
            world, flow(world, server, agent={"sampling": sampling, "validation": {"temperature": 0.0}}), validate=True
        )
    trained, validated = server.requests
    assert {key: trained[key] for key in sampling} == sampling and validated["temperature"] == 0.0
    assert trained.keys() == {*sampling, "model", "messages", "seed"}


def test_every_generation_has_its_own_seed_which_is_the_same_in_the_next_run(world):
    def seeds(seed: int) -> set[int]:
        with OpenAIServer() as server:
            play(world, flow(world, server, episode={"max_turns": 2}), n=4, seed=seed)
        return {body["seed"] for body in server.requests}

    first = seeds(0)
    assert len(first) == 8 and seeds(0) == first and not seeds(1) & first
    assert all(0 <= seed < 2**31 for seed in first)


def test_the_body_of_the_workflow_adds_and_removes_fields(world):
    with OpenAIServer() as server:
        play(world, flow(world, server, api={"body": {"seed": None, "reasoning_effort": "low"}}))
    assert server.requests[0]["reasoning_effort"] == "low" and "seed" not in server.requests[0]


def test_tool_calls_of_the_api_are_run_and_answered_by_their_ids(world):
    def answer(body):
        results = [message for message in body["messages"] if message["role"] == "tool"]
        return f"It is {results[-1]['content']}." if results else tool_call("calc", "call_x", code="6*7")

    with OpenAIServer(answer) as server:
        (episode,) = play(world, flow(world, server, agent=looped()), [calculator(world)])
    (call,) = episode.calls
    assert call.text == "It is 42." and call.generations == 2
    assert [(result.status, result.text) for result in call.tool_results] == [("success", "42")]
    assert [message["role"] for message in call.messages] == ["user", "assistant", "tool", "assistant"]
    assert call.messages[2]["tool_call_id"] == call.messages[1]["tool_calls"][0]["id"] == "call_x"
    assert server.requests[0]["tools"][0]["function"]["name"] == "calc"
    assert server.requests[1]["messages"] == call.messages[:3]
    assert call.usage is not None and call.usage["requests"] == 2


def test_tool_calls_in_the_text_are_run_too_and_the_text_is_sent_back_as_it_was(world):
    said = 'So:\n<tool_call>\n{"name": "calc", "arguments": {"code": "1+1"}}\n</tool_call>'

    with OpenAIServer(lambda body: said if len(body["messages"]) == 1 else "2") as server:
        (episode,) = play(world, flow(world, server, agent=looped()), [calculator(world)])
    (call,) = episode.calls
    assert call.text == "2" and call.tool_results[0].text == "2"
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": said}


def test_an_argument_that_looks_like_a_tag_reaches_the_tool_as_it_is(world):
    code = "len('</tool_call><think>')"
    with OpenAIServer(lambda body: tool_call("calc", code=code) if len(body["messages"]) == 1 else "done") as server:
        (episode,) = play(world, flow(world, server, agent=looped()), [calculator(world)])
    assert [(r.arguments, r.text) for r in episode.calls[0].tool_results] == [({"code": code}, "19")]


def test_fenced_programs_are_run_and_answered_by_the_user(world):
    def answer(body):
        return "It is 4." if len(body["messages"]) > 1 else "```python\n2+2\n```"

    with OpenAIServer(answer) as server:
        (episode,) = play(world, flow(world, server, agent=looped(format="fenced")), [calculator(world)])
    (call,) = episode.calls
    assert call.text == "It is 4." and call.messages[2] == {"role": "user", "content": "4"}
    assert "tools" not in server.requests[0]


@pytest.mark.parametrize(
    ("loop", "tool", "stop_reason", "generations"),
    [({"max_generations": 3}, "calc", "max_generations", 3), ({"max_invalid_streak": 2}, "other", "invalid_calls", 2)],
)
def test_a_loop_of_tool_calls_ends_at_its_limit(world, loop, tool, stop_reason, generations):
    with OpenAIServer(lambda body: tool_call(tool, code="1")) as server:
        (episode,) = play(world, flow(world, server, agent=looped(**loop)), [calculator(world)])
    (call,) = episode.calls
    assert (call.generations, call.stop_reason, call.ended_in_tool_call) == (generations, stop_reason, True)
    assert len(server.requests) == generations


CALLS = tool_call("calc", "x", code="1")["tool_calls"] + tool_call("calc", "y", code="2")["tool_calls"]
UNKNOWN = tool_call("other", "x", code="1")["tool_calls"]


@pytest.mark.parametrize(
    ("loop", "choice", "first", "answers"),
    [
        ({"max_generations": 1}, {"calls": CALLS}, "max_generations", ["not run: no further turn was left"] * 2),
        ({"max_invalid_streak": 1}, {"calls": UNKNOWN}, "invalid_calls", ["unknown tool 'other'; available: calc"]),
        ({}, {"calls": CALLS, "finish_reason": "length"}, "length", ["not run: the message was cut off"] * 2),
        ({"format": "fenced"}, {"calls": CALLS}, "stop", ["not run: calls of `format: fenced` only are run"] * 2),
    ],
)
def test_every_tool_call_has_an_answer_when_the_next_turn_sends_it_again(world, loop, choice, first, answers):
    message = {"role": "assistant", "content": None, "tool_calls": choice["calls"]}
    begun = {"message": message, "finish_reason": choice.get("finish_reason", "tool_calls")}
    nodes = [{"id": "solve", "hooks": "h.py"}]
    keys = {"agent": looped(**loop) | {"memory": "chat"}, "nodes": nodes, "files": {"h.py": PARSE}}
    with OpenAIServer(lambda body: begun if len(body["messages"]) == 1 else "done", strict=True) as server:
        (episode,) = play(world, flow(world, server, **keys, episode={"max_turns": 2}), [calculator(world)])
    assert episode.fault is None, episode.fault
    call, later = episode.calls
    assert (call.stop_reason, later.text) == (first, "done")
    assert [(m["tool_call_id"], m["content"]) for m in call.messages[2:]] == [
        (asked["id"], answer) for asked, answer in zip(choice["calls"], answers, strict=True)
    ]


def test_a_prompt_that_tool_results_made_too_long_ends_the_call_with_its_results(world):
    agent = looped() | {"memory": "chat"}
    server = OpenAIServer(lambda body: tool_call("calc", code="1"), faults={1: "long"}, strict=True)
    with server:
        (episode,) = play(world, flow(world, server, agent=agent), [calculator(world)])
    (call,) = episode.calls
    assert (call.stop_reason, call.ended_in_tool_call, episode.info["prompt_too_long"]) == ("length", True, 1)
    assert [message["role"] for message in call.messages] == ["user", "assistant", "tool"]


def test_thoughts_are_recorded_and_not_sent_back(world):
    thinking = {"role": "assistant", "content": "one", "reasoning_content": "hm"}
    nodes = [{"id": "solve", "hooks": "h.py"}]
    agent, episode = {"memory": "chat"}, {"max_turns": 2}
    with OpenAIServer(lambda body: thinking) as server:
        (played,) = play(world, flow(world, server, agent=agent, nodes=nodes, files={"h.py": PARSE}, episode=episode))
    first, second = played.calls
    assert first.messages[-1]["reasoning_content"] == "hm"
    assert second.messages[: len(first.messages)] == first.messages
    assert [message["content"] for message in server.requests[1]["messages"]] == [
        *("question turn 0", "one", "question turn 1")
    ]
    assert "reasoning_content" not in server.requests[1]["messages"][1]


def test_nodes_share_a_conversation_of_messages(world):
    nodes = [{"id": "solve"}, {"id": "check", "after": ["solve"]}]
    with OpenAIServer(lambda body: f"answer {len(body['messages'])}") as server:
        (played,) = play(world, flow(world, server, agent={"memory": "shared"}, nodes=nodes))
    sent = [message["content"] for message in server.requests[1]["messages"]]
    assert sent == ["question", "answer 1", "Go on."] and played.calls[1].text == "answer 3"


def test_a_stop_string_that_the_server_removed_stays_in_the_text(world):
    choice = {"message": {"role": "assistant", "content": "a"}, "finish_reason": "stop", "stop_reason": "</a>"}
    with OpenAIServer(lambda body: choice) as server:
        (episode,) = play(world, flow(world, server, agent={"sampling": {"stop": ["</a>"]}}))
    assert episode.calls[0].text == "a</a>"


def test_a_text_that_was_cut_off_is_no_answer(world):
    for reason in ("length", "content_filter"):
        choice = {"message": {"role": "assistant", "content": "The answer is"}, "finish_reason": reason}
        with OpenAIServer(lambda body, choice=choice: choice) as server:
            (episode,) = play(world, flow(world, server))
        assert episode.calls[0].stop_reason == "length"


def test_a_prompt_beyond_the_context_ends_the_call_and_is_counted(world):
    with OpenAIServer(faults={0: "long"}) as server:
        (episode,) = play(world, flow(world, server))
    assert episode.fault is None and episode.ended_by == "length"
    assert (episode.calls[0].stop_reason, episode.info) == ("length", {"prompt_too_long": 1})


def test_a_completion_that_does_not_fit_is_asked_for_again_with_what_is_left(world):
    with OpenAIServer(faults={0: "crowded"}) as server:
        (episode,) = play(world, flow(world, server))
    assert episode.fault is None and episode.info == {} and episode.calls[0].stop_reason == "stop"
    assert [body["max_tokens"] for body in server.requests][1:] == [4]


def test_arguments_that_are_no_json_are_an_invalid_call_and_are_not_sent_back(world):
    broken = {"id": "a", "type": "function", "function": {"name": "calc", "arguments": '{"code": '}}
    texts = [{"role": "assistant", "content": None, "tool_calls": [broken]}, "done"]
    with OpenAIServer(lambda body: texts[len(body["messages"]) > 1]) as server:
        (episode,) = play(world, flow(world, server, agent=looped()), [calculator(world)])
    (call,) = episode.calls
    assert [result.status for result in call.tool_results] == ["invalid"]
    assert call.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"code": '
    assert server.requests[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_a_lost_server_is_a_fault_and_never_a_reward(world):
    nodes = [*ONE, {"id": "pay", "after": ["solve"], "reward": "r.py:pay"}]
    files = {"r.py": "def pay(episode):\n    episode.outcome = 1.0\n    return {'agent0': 1.0}"}
    keys = {"nodes": nodes, "files": files, "api": {"retries": 1}, "episode": {"retries": 0}}
    with OpenAIServer(faults=scattered({"500": 1.0}, seed=0)) as server:
        (episode,) = play(world, flow(world, server, **keys))
    assert episode.fault is not None and (episode.fault["boundary"], episode.fault["infra"]) == ("model", True)
    assert episode.outcome is None and episode.calls[0].reward is None
    assert rows_of([episode]) == []


def test_a_wrong_key_stops_the_run_in_one_line(world, monkeypatch):
    monkeypatch.setenv("THE_KEY", "sk-wrong-key-000000000000")
    with OpenAIServer(key="right") as server, pytest.raises(UserError, match="refuses the key in THE_KEY") as error:
        play(world, flow(world, server, api={"key_env": "THE_KEY"}), n=4)
    assert "sk-wrong" not in str(error.value) and "\n" not in str(error.value)


def test_a_refused_request_stops_the_run_unless_such_episodes_are_masked(world):
    with OpenAIServer(faults=lambda number: "400") as server:
        with pytest.raises(UserError, match="the server refuses the request .HTTP 400"):
            play(world, flow(world, server))
        (episode,) = play(world, flow(world, server, episode={"on_user_error": "mask"}))
    assert episode.fault is not None and len(server.requests) == 2


def test_no_call_of_an_api_becomes_a_training_row(world):
    nodes = [{"id": "help", "agent": "agent0"}, {"id": "solve", "agent": "agent1", "after": ["help"]}]
    with OpenAIServer(lambda body: "a hint") as server:
        api = {"base_url": server.url, "model": "test"}
        policies = {"outside": {"api": api}, "main": {"model": {"path": "m"}}}
        agents = [{"policy": "outside"}, {"policy": "main"}]
        workflow = world.workflow(nodes, agents=agents, policies=policies)

        async def main():
            remotes, client = Remotes(workflow), world.Client(lambda prompt, *_: "4" if "a hint" in prompt else "?")
            local = PolicyEndpoint(client, world.Tokenizer(), 4096)
            runner = EpisodeRunner(workflow, {**remotes.endpoints, "main": local}, {}, seed=0)
            episode = await runner.run(world.sample(), "u", 0, step=0)
            await remotes.close()
            return episode

        episode = asyncio.run(main())
    assert [call.text for call in episode.calls] == ["a hint", "4"]
    for call in episode.calls:
        call.reward = 1.0
    rows = rows_of([episode], keep_unsampled_rewarded=True)
    assert [(row.policy, len(row.response_ids)) for row in rows] == [("outside", 0), ("main", 2)]
    assert [row.policy for row in rows_of([episode])] == ["main"]


def test_what_was_consumed_is_counted_with_its_price_over_all_attempts(world):
    api = {"retries": 1, "price": {"input": 1.0, "output": 10.0}}
    faults = {0: "500", 2: "500", 3: "500"}  # the second call of the first attempt fails
    with OpenAIServer(faults=faults) as server:
        (episode,) = play(world, flow(world, server, api=api, episode={"max_turns": 2}))
    assert episode.attempts == 2 and episode.fault is None
    cost = pytest.approx(3 * (7 * 1.0 + 3 * 10.0) / 1e6)
    expected = {"requests": 4, "retries": 1, "prompt_tokens": 21, "completion_tokens": 9, "cost": cost}
    assert episode.usage == {"main": expected}
    assert summarise([episode])["api_usage"] == {"main": expected}
    metrics = rollout_metrics([episode])
    assert metrics["policy/main/api/requests"] == 4 and metrics["policy/main/api/cost"] == cost


def test_hooks_on_token_ids_need_a_tokenizer(world):
    hook = "def pre_process(tokenizer, prompt_ids, obs, *, context=None):\n    return prompt_ids\n"
    nodes = [{"id": "solve", "hooks": "h.py"}]
    with OpenAIServer() as server, pytest.raises(UserError, match="h.py:pre_process works on token ids.*tokenizer"):
        play(world, flow(world, server, nodes=nodes, files={"h.py": hook}))


def test_a_key_that_is_not_set_is_named_but_a_key_in_its_place_is_not_repeated(monkeypatch):
    monkeypatch.delenv("THE_KEY", raising=False)
    api = Api(base_url="http://localhost:1/v1", model="m", key_env="THE_KEY")
    with pytest.raises(UserError, match=r"policies.main.api.key_env: environment variable THE_KEY is not set"):
        ApiSpec("main", api).endpoint()
    pasted = api.model_copy(update={"key_env": "hf_abcdefghijklmnop0123456789"})
    with pytest.raises(UserError, match="is not set") as error:
        ApiSpec("main", pasted).endpoint()
    assert "hf_abc" not in str(error.value)


def test_processes_share_the_limits(world):
    with OpenAIServer() as server:
        limits = {"max_concurrent": 10, "requests_per_minute": 60.0}
        whole = Remotes(flow(world, server, api=limits)).specs["main"]
    parts = [whole.share(index, 4).api for index in range(4)]
    assert [part.max_concurrent for part in parts] == [3, 3, 2, 2]
    assert {part.requests_per_minute for part in parts} == {15.0}
    assert whole.share(0, 1) == whole


def test_calls_between_tags_need_token_ids(world):
    with OpenAIServer() as server, pytest.raises(UserError, match="format: tags.*which policy main cannot.*tokenizer"):
        play(world, flow(world, server, agent=looped(format="tags")), [calculator(world)])


ASKS = """
from recipe.dag.types.agent import Agent
from recipe.dag.types.context import Output
class Asks(Agent):
    async def prompt(self, context):
        hint = await context.ask([{"role": "user", "content": f"hint {context.turn}"}])
        return [{"role": "user", "content": f"solve {context.turn} with {hint}"}]
    async def parse(self, context):
        return Output(parsed={"sure": await context.ask([{"role": "user", "content": f"sure {context.turn}?"}])})
"""


def test_what_hooks_ask_is_recorded_and_no_part_of_the_conversation(world):
    nodes = [{"id": "solve", "hooks": "h.py:Asks"}]
    with OpenAIServer(lambda body: body["messages"][-1]["content"].upper()) as server:
        chat = {"memory": "chat"}
        flow_ = flow(world, server, agent=chat, nodes=nodes, files={"h.py": ASKS}, episode={"max_turns": 2})
        (episode,) = play(world, flow_)
    first, second = episode.calls
    talk = [["solve 0 with HINT 0", "SOLVE 0 WITH HINT 0"], ["solve 1 with HINT 1", "SOLVE 1 WITH HINT 1"]]
    recorded = [[message["content"] for message in call.messages] for call in episode.calls]
    assert recorded == [
        ["hint 0", "HINT 0", *talk[0], "sure 0?", "SURE 0?"],
        ["hint 1", "HINT 1", *talk[0], *talk[1], "sure 1?", "SURE 1?"],
    ]
    assert [[message["content"] for message in call.conversation] for call in episode.calls] == [
        talk[0],
        [*talk[0], *talk[1]],
    ]
    sent = [[message["content"] for message in request["messages"]] for request in server.requests]
    assert sent == [["hint 0"], talk[0][:1], ["sure 0?"], ["hint 1"], [*talk[0], talk[1][0]], ["sure 1?"]]
    assert second.prompt_text == "user:\n" + "\n\nassistant:\n".join(talk[0]) + f"\n\nuser:\n{talk[1][0]}"


def test_a_first_prompt_that_does_not_fit_ends_in_no_tool_call_whatever_was_asked_before(world):
    nodes, files = [{"id": "solve", "hooks": "h.py:Asks"}], {"h.py": ASKS.partition("    async def parse")[0]}
    with OpenAIServer(faults={1: "long"}) as server:
        (episode,) = play(world, flow(world, server, nodes=nodes, files=files))
    (call,) = episode.calls
    assert (call.stop_reason, call.ended_in_tool_call, episode.info) == ("length", False, {"prompt_too_long": 1})


def test_a_fork_repeats_calls_of_an_api_without_requests(world):
    nodes = [{"id": "advise"}, {"id": "solve", "agent": "agent1", "after": ["advise"]}]
    with OpenAIServer(lambda body: "Try 4.") as server:
        api = {"api": {"base_url": server.url, "model": "test", "max_wait_s": 0.02}}
        workflow = world.workflow(
            nodes,
            agents=[{}, {"policy": "own"}],
            policies={"main": api, "own": {"model": {"path": "m"}}},
            algorithm=make_algorithm("counterfactual", alternatives=3),
        )

        async def main():
            remotes = Remotes(workflow)
            endpoints = remotes.endpoints | {"own": PolicyEndpoint(world.Client(), world.Tokenizer(), 4096)}
            runner = EpisodeRunner(workflow, endpoints, {}, seed=0)
            try:
                return await run_batch(runner, [(world.sample(), "u")], 1, step=0, forked=["own"])
            finally:
                await remotes.close()

        episodes = asyncio.run(main())
        assert len(server.requests) == 1
    assert [episode.fault for episode in episodes] == [None] * 3
    assert [call.text for episode in episodes for call in episode.calls] == ["Try 4.", "ok"] * 3
    assert [episode.calls[0].replayed for episode in episodes] == [False, True, True]
    assert rollout_metrics(episodes, workflow)["policy/main/api/requests"] == 1
