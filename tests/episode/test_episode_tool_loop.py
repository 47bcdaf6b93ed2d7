from __future__ import annotations

import asyncio
import json

import pytest

from recipe.dag.core.errors import SandboxFault, UserError
from recipe.dag.episode.tool_loop import requests_in, truncate
from recipe.dag.types.record import Generation, ToolResult
from recipe.dag.workflow.agent_schema import ToolLoop


def call(name: str = "calc", **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def looped(world, *, episode: dict | None = None, sampling: dict | None = None, **loop):
    agent = {"tools": ["calc"], "tool_loop": loop, "sampling": sampling or {}}
    return world.workflow([{"id": "solve"}], agents=[agent], episode=episode or {})


def replies(world, *texts):
    """A client that says `texts` one after the other."""
    client = world.Client(lambda prompt, sampling, request: texts[len(client.requests) - 1])
    return client


def calculator(world):
    return world.Tool("calc", lambda arguments, state: str(eval(arguments["code"])))


def test_the_model_calls_tools_until_it_answers(world):
    client = replies(world, "let me see " + call(code="6*7"), "and " + call(code="42+1"), "it is 43")
    got = world.play(looped(world), client, [calculator(world)]).calls[0]
    assert got.text == "it is 43" and got.generations == 3 and got.stop_reason == "stop"
    assert [(r.text, r.generation) for r in got.tool_results] == [("42", 1), ("43", 2)]
    starts = [got.start_seconds, *(r.start_seconds for r in got.tool_results), got.start_seconds + got.seconds]
    assert starts == sorted(starts) and len(set(starts)) == 4
    # The conversation as the template would have written it, out of what was sampled.
    assert world.text(got) == (
        "let me see "
        + call(code="6*7")
        + "<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nand " + call(code="42+1") + "<|im_end|>\n<|im_start|>user\n<tool_response>\n43\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\nit is 43<|im_end|>"
    )
    assert "['calc']" in got.prompt_text


def test_only_sampled_tokens_carry_mask_and_log_probs(world):
    texts = (call(code="1"), "done")
    got = world.play(looped(world), replies(world, *texts), [calculator(world)]).calls[0]
    tokens = list(zip(got.response_ids, got.response_mask, strict=True))
    sampled = [token for token, bit in tokens if bit]
    encode = world.Tokenizer().encode
    assert sampled == [*encode(texts[0] + "<|im_end|>"), *encode("done<|im_end|>")]
    expected = [-(token % 7) / 10 if bit else 0.0 for token, bit in tokens]
    assert got.rollout_log_probs == expected


def test_every_generation_continues_the_very_ids_of_the_ones_before(world):
    client = replies(world, call(code="1"), call(code="2"), "x")
    got = world.play(looped(world), client, [calculator(world)]).calls[0]
    whole = got.prompt_text + world.text(got)
    assert all(whole.startswith(prompt) for _, prompt, _ in client.requests)
    assert len({sampling["seed"] for _, _, sampling in client.requests}) == 3
    assert {request for request, _, _ in client.requests} == {"u0-0-agent0"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<tool_call>{bad json</tool_call>", "unreadable tool call"),
        ("<tool_call>[1]</tool_call>", "unreadable tool call"),
        ('<tool_call>{"name": "calc", "arguments": [1]}</tool_call>', "unreadable arguments"),
        ('<tool_call>{"name": "calc", "arguments": "{x"}</tool_call>', "unreadable arguments"),
        (call("other"), "unknown tool 'other'; available: calc"),
        ("<tool_call>" + "[" * 100_000, "unreadable tool call"),
    ],
)
def test_what_the_model_gets_wrong_is_shown_to_it(world, text, shown):
    flow = looped(world, sampling={"max_tokens": 200_000})
    episode = world.play(flow, replies(world, text, "sorry"), [calculator(world)], max_model_len=1_000_000)
    got = episode.calls[0]
    assert episode.fault is None and got.text == "sorry"
    assert got.tool_results[0].status == "invalid" and shown in got.tool_results[0].text
    assert shown in world.text(got)


def test_arguments_may_be_a_json_string_and_the_last_tag_may_be_missing():
    loop = ToolLoop()
    text = '<tool_call>{"name": "calc", "arguments": "{\\"code\\": \\"1\\"}"}'
    (request,) = requests_in(text, loop, ("calc",))
    assert (request.name, request.arguments, request.problem) == ("calc", {"code": "1"}, "")


def test_calls_of_one_message_run_at_once_up_to_the_limit(world):
    async def main():
        both = asyncio.Barrier(2)

        async def work(arguments, state):
            await both.wait()  # Deadlocks unless two run at once.
            return arguments["code"]

        made = world.runner(
            looped(world, max_parallel=2),
            replies(world, "".join(call(code=c) for c in "abc"), "x"),
            [world.Tool("calc", work)],
        )
        return await asyncio.wait_for(made.run(world.sample(), "u", 0, step=0), 20)

    got = asyncio.run(main()).calls[0]
    assert [(r.status, r.arguments["code"]) for r in got.tool_results] == [
        ("success", "a"),
        ("success", "b"),
        ("invalid", "c"),
    ]
    assert "at most 2 tool call(s)" in world.text(got)
    assert world.text(got).index("\na\n") < world.text(got).index("\nb\n")


def test_the_last_generation_may_not_call_tools_any_more(world):
    client = world.Client(lambda prompt, sampling, request: call(code="1"))
    got = world.play(looped(world, max_generations=3), client, [calculator(world)]).calls[0]
    assert (got.generations, len(got.tool_results), got.stop_reason) == (3, 2, "max_generations")
    assert got.response_mask[-1] == 1


def test_a_streak_of_invalid_calls_ends_the_agents_call(world):
    texts = (call("other"), call(code="1"), call("other"), "<tool_call>{", call(code="2"))
    got = world.play(looped(world, max_invalid_streak=2), replies(world, *texts), [calculator(world)]).calls[0]
    assert (got.stop_reason, got.generations, got.ended_in_tool_call) == ("invalid_calls", 4, True)
    assert [result.status for result in got.tool_results] == ["invalid", "success", "invalid", "invalid"]
    assert got.response_mask[-1] == 1


def test_a_generation_with_one_call_that_runs_is_no_invalid_one(world):
    client = world.Client(lambda *_: call(code="1") + call(code="2") + call("other"))
    got = world.play(looped(world, max_invalid_streak=1, max_generations=3), client, [calculator(world)]).calls[0]
    assert (got.stop_reason, got.generations) == ("max_generations", 3)


def test_a_loop_stops_where_the_context_is_full_and_ends_on_a_sampled_token(world):
    client = world.Client(lambda prompt, sampling, request: call(code="'x' * 100"))
    got = world.play(looped(world), client, [calculator(world)], max_model_len=400).calls[0]
    assert got.stop_reason == "length" and got.response_mask[-1] == 1
    assert len(got.prompt_ids) + len(got.response_ids) <= 400
    assert all(sampling["max_tokens"] + len(world.Tokenizer().encode(p)) <= 400 for _, p, sampling in client.requests)


def test_an_answer_cut_by_its_own_limit_calls_nothing(world):
    flow = looped(world, sampling={"max_tokens": len(call(code="1"))})
    got = world.play(flow, world.Client(lambda *_: call(code="1") + "."), [calculator(world)]).calls[0]
    assert (got.stop_reason, got.tool_results, got.generations) == ("length", [], 1)


def test_an_answer_that_ends_otherwise_than_its_turn_calls_nothing(world):
    ids = world.Tokenizer().encode(call(code="1"))
    client = world.Client(lambda *_: Generation(list(ids), [0.0] * len(ids), "stop"))
    got = world.play(looped(world), client, [calculator(world)]).calls[0]
    assert (got.tool_results, got.generations) == ([], 1)


def test_a_call_has_the_cached_tokens_of_its_own_prompt(world):
    texts, cached = iter([call(code="1"), "done"]), iter([7, 900])

    def answer(*_):
        ids = world.Tokenizer().encode(next(texts) + "<|im_end|>")
        return Generation(ids, [0.0] * len(ids), "stop", cached_tokens=next(cached))

    got = world.play(looped(world), world.Client(answer), [calculator(world)]).calls[0]
    assert (got.generations, got.cached_tokens) == (2, 7)
    assert world.play(looped(world), replies(world, "done"), [calculator(world)]).calls[0].cached_tokens is None


def test_fenced_code_is_a_call_of_the_first_tool_and_its_absence_the_answer(world):
    first = "try\n```python\n1+1\n```\nor\n```python\n2+2\n```"
    client = replies(world, first, "```text\nfinal\n```")
    got = world.play(looped(world, format="fenced"), client, [calculator(world)]).calls[0]
    assert [r.arguments for r in got.tool_results] == [{"code": "2+2\n"}]
    assert "<|im_end|>\n<|im_start|>user\n4<|im_end|>\n<|im_start|>assistant\n```text" in world.text(got)
    assert "calc" not in got.prompt_text


def test_a_long_result_is_cut_for_the_model(world):
    tool = world.Tool("calc", lambda arguments, state: "a" * 500 + "b" * 500)
    flow = looped(world, max_response_chars=101, truncate="middle")
    got = world.play(flow, replies(world, call(), "x"), [tool]).calls[0]
    shown = "a" * 42 + "...(truncated)..." + "b" * 42
    assert got.tool_results[0].text == shown and f"\n{shown}\n" in world.text(got)


@pytest.mark.parametrize(
    ("side", "limit", "expected"),
    [
        ("left", 20, "...(truncated)...xyz"),
        ("right", 20, "abc...(truncated)..."),
        ("middle", 20, "ab...(truncated)...z"),
        ("left", 3, "xyz"),
        ("right", 3, "abc"),
        ("middle", 3, "abc"),
        ("left", 26, "abcdefghijklmnopqrstuvwxyz"),
    ],
)
def test_truncation_keeps_to_its_limit(side, limit, expected):
    assert truncate("abcdefghijklmnopqrstuvwxyz", limit, side) == expected


def test_a_tool_that_ran_and_failed_is_shown_but_one_that_could_not_run_never_is(world):
    failed = world.Tool("calc", lambda a, s: ToolResult("calc", a, "failed", "NameError"))
    got = world.play(looped(world), replies(world, call(), "x"), [failed]).calls[0]
    assert "NameError" in world.text(got)

    def down(arguments, state):
        raise SandboxFault("connection refused")

    client = world.Client(lambda *_: call())
    episode = world.play(looped(world), client, [world.Tool("calc", down)])
    assert episode.fault["boundary"] == "sandbox" and episode.fault["infra"]
    assert episode.attempts == 2 and len(episode.faults) == 2
    assert [r.status for r in episode.calls[0].tool_results] == ["fault"]
    assert not any("connection refused" in prompt for _, prompt, _ in client.requests)


@pytest.mark.parametrize(
    ("result", "infra"),
    [
        (ValueError("bug"), False),
        (3, False),
        (ConnectionResetError("peer"), True),
        (ToolResult("calc", {}, "fault", "no sandbox"), True),
    ],
)
def test_a_tool_that_raises_is_an_error_of_the_user_and_one_that_could_not_run_is_not(world, result, infra):
    def work(arguments, state):
        if isinstance(result, Exception):
            raise result
        return result

    client = world.Client(lambda *_: call())
    spec = {"retries": 0, "on_user_error": "mask"}
    episode = world.play(looped(world, episode=spec), client, [world.Tool("calc", work)])
    assert (episode.fault["boundary"], episode.fault["infra"], episode.fault["where"]) == ("tool", infra, "tool calc")


def test_tool_state_lasts_one_episode_and_starts_afresh_with_a_retry(world):
    seen = []

    def work(arguments, state):
        state["n"] = state.get("n", 0) + 1
        seen.append(state["n"])
        if len(seen) == 2:
            raise SandboxFault("killed")
        return "x"

    client = world.Client(lambda prompt, *_: "end" if prompt.count("<tool_response>") == 2 else call())
    assert world.play(looped(world), client, [world.Tool("calc", work)]).fault is None
    assert seen == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"tools": ["calc"]}, "unknown tool calc"),
        ({"tool_loop": {}}, "needs at least one tool"),
        ({"policy": "other"}, "no server"),
    ],
)
def test_an_agent_that_cannot_work_is_refused_before_the_first_episode(world, agent, message):
    with pytest.raises(UserError, match=message):
        world.runner(world.workflow([{"id": "a"}], agents=[agent]))


def test_a_template_that_cannot_show_tool_results_is_refused(world, monkeypatch):
    def template(self, conversation, **kwargs):
        raise ValueError("roles must alternate")

    monkeypatch.setattr(world.Tokenizer, "apply_chat_template", template)
    with pytest.raises(UserError, match="policy main: the chat template cannot render the roles user, assistant"):
        world.runner(looped(world), tools=[calculator(world)])


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\n1\n```", "1\n"),
        ("```py\n1\n```", "1\n"),
        ("```python3\n1\n```", "1\n"),
        ("```Python\n1\n```", "1\n"),
        ("``` python\n1\n```", "1\n"),
        ("- so:\n  ```python\n  if 1:\n      2\n  ```\n", "if 1:\n    2\n"),
        ("```python\n1\n", "1\n"),
        ("```python\n1", "1"),
        ("```pytorch\n1\n```", None),
        ("```\n1\n```", None),
        ("say ```python\n1\n```", None),
    ],
)
def test_a_fence_may_be_written_as_models_write_it(text, code):
    requests = requests_in(text, ToolLoop(format="fenced"), ("calc",))
    assert [request.arguments["code"] for request in requests] == ([] if code is None else [code])


@pytest.mark.parametrize("form", ["fenced", "hermes", "tags"])
@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("{}", False),
        ("hm {} so</think>done", False),
        ("hm</think>{}", True),
        ("hm</think>a<think>{}", False),
        ("<think>hm</think>{}", False),  # the inner thought ends, not the one that the prompt opened
    ],
)
def test_a_thought_that_the_prompt_opened_calls_nothing(form, text, runs):
    block = {"fenced": "\n```python\n1\n```\n", "hermes": call(code="1"), "tags": "<code>1</code>"}[form]
    found = requests_in(text.replace("{}", block), ToolLoop(format=form), ("calc",), opened_thinking=True)
    assert bool(found) is runs


@pytest.mark.parametrize("form", ["fenced", "hermes"])
@pytest.mark.parametrize(
    ("thought", "runs"),
    [
        ("<think>{}</think>done", False),
        ("<think>{}", False),
        ("<think>a<think>b</think>\n{}\n</think>done", False),
        ("{}\n</think>done", False),
        ("<think>a</think>\n{}", True),
        ("\n{}\n<think>a", True),
    ],
)
def test_what_the_model_only_thinks_of_calling_is_not_called(form, thought, runs):
    block = "\n```python\n1\n```\n" if form == "fenced" else call(code="1")
    assert bool(requests_in(thought.replace("{}", block), ToolLoop(format=form), ("calc",))) is runs
