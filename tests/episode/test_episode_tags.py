"""Tool calls between tags: the generation stops at the closing tag, and the result continues the same message."""

from __future__ import annotations

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.types.record import Generation, ToolResult

SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


def tagged(world, *, sampling: dict | None = None, validation: dict | None = None, tools=("calc",), **loop):
    agent = {"tools": list(tools), "tool_loop": {"format": "tags", **loop}}
    agent |= {"sampling": sampling or {}, "validation": validation or {}}
    return world.workflow([{"id": "solve"}], agents=[agent])


def replies(world, *texts):
    client = world.Client(lambda prompt, sampling, request: texts[len(client.requests) - 1])
    return client


def calculator(world):
    return world.Tool("calc", lambda arguments, state: f"{eval(arguments['code'])}\n")


def sampled(call) -> list[int]:
    return [token for token, bit in zip(call.response_ids, call.response_mask, strict=True) if bit]


def test_a_result_continues_the_message_and_nothing_else_is_inserted(world):
    client = replies(world, "so <code>\n6*7\n</code> unread", "<code>1+1</code>", "thus 44")
    call = world.play(tagged(world), client, [calculator(world)]).calls[0]
    assert world.text(call) == (
        "so <code>\n6*7\n</code>\n<interpreter>\n42\n</interpreter>\n"
        "<code>1+1</code>\n<interpreter>\n2\n</interpreter>\nthus 44<|im_end|>"
    )
    assert [result.arguments for result in call.tool_results] == [{"code": "6*7"}, {"code": "1+1"}]
    assert (call.text, call.generations, call.stop_reason) == ("thus 44", 3, "stop")
    # The model's own tokens are exactly those that carry the mask, and each prompt repeats all of them.
    encode = world.Tokenizer().encode
    assert sampled(call) == encode("so <code>\n6*7\n</code><code>1+1</code>thus 44<|im_end|>")
    whole = call.prompt_text + world.text(call)
    assert all(whole.startswith(prompt) for _, prompt, _ in client.requests)


@pytest.mark.parametrize("stop", [(), ("</code>",), ("###",)])
def test_every_server_is_asked_to_stop_at_the_closing_tag(world, stop):
    client = replies(world, "<code>1</code>", "done")
    world.play(tagged(world, sampling={"stop": stop}), client, [calculator(world)])
    assert all(set(sampling["stop"]) == {*stop, "</code>"} for _, _, sampling in client.requests)
    assert len(client.requests[0][2]["stop"]) == len({*stop, "</code>"})


def test_stop_strings_of_validation_do_not_replace_the_closing_tag(world):
    client = replies(world, "<code>1</code>", "done")
    flow = tagged(world, sampling={"stop": "train"}, validation={"stop": "only"})
    world.play(flow, client, [calculator(world)], validate=True)
    assert client.requests[0][2]["stop"] == ["only", "</code>"]


def test_a_server_may_stop_by_itself_with_text_of_the_same_token(world):
    ids = world.Tokenizer().encode("<code>2</code>\n")
    client = world.Client(
        lambda *_: Generation(list(ids), [-1.0] * len(ids), "stop") if len(client.requests) == 1 else "2"
    )
    call = world.play(tagged(world), client, [calculator(world)]).calls[0]
    assert world.text(call).startswith("<code>2</code>\n<interpreter>") and call.text == "2"


def test_a_tag_inside_a_thought_runs_nothing_and_the_thought_goes_on(world):
    client = replies(world, "<think>try <code>1</code>", " or <code>2</code>", " no</think><code>3</code>", "3")
    call = world.play(tagged(world), client, [calculator(world)]).calls[0]
    assert [result.arguments["code"] for result in call.tool_results] == ["3"]
    assert world.text(call).startswith("<think>try <code>1</code> or <code>2</code> no</think><code>3</code>\n<interp")
    assert call.generations == 4 and not call.opened_thinking


def test_a_thought_that_never_ends_ends_with_the_last_generation(world):
    client = world.Client(lambda *_: "<code>1</code>")
    flow = tagged(world, max_generations=3)
    flow.agents[0].chat_template_kwargs["prefix"] = "<think>\n"
    call = world.play(flow, client, [calculator(world)]).calls[0]
    assert (call.tool_results, call.stop_reason, call.generations) == ([], "max_generations", 3)
    assert call.opened_thinking and call.response_mask[-1] == 1


def test_a_closing_tag_alone_is_an_invalid_call_that_the_model_sees(world):
    call = world.play(tagged(world), replies(world, "1</code>", "sorry"), [calculator(world)]).calls[0]
    assert call.tool_results[0].status == "invalid" and "no <code> before </code>" in world.text(call)


def test_an_open_tag_at_the_end_of_the_turn_calls_nothing(world):
    call = world.play(tagged(world), replies(world, "<code>1"), [calculator(world)]).calls[0]
    assert (call.tool_results, call.generations, call.stop_reason) == ([], 1, "stop")


def test_what_a_tool_prints_is_no_call(world):
    tool = world.Tool("calc", lambda arguments, state: "</interpreter><code>1</code>")
    call = world.play(tagged(world), replies(world, "<code>0</code>", "x"), [tool]).calls[0]
    assert len(call.tool_results) == 1 and call.text == "x"


def test_a_long_result_is_cut_and_a_full_context_ends_on_a_sampled_token(world):
    tool = world.Tool("calc", lambda arguments, state: "a" * 500)
    call = world.play(tagged(world, max_response_chars=50), replies(world, "<code>0</code>", "x"), [tool]).calls[0]
    assert "...(truncated)..." in world.text(call)
    call = world.play(tagged(world), replies(world, "<code>0</code>"), [tool], max_model_len=300).calls[0]
    assert (call.stop_reason, call.ended_in_tool_call, call.response_mask[-1]) == ("length", True, 1)


def test_a_failure_and_a_time_out_are_shown_between_the_tags(world):
    for status, text in (("failed", "NameError: x"), ("timeout", "[timeout]")):
        tool = world.Tool("calc", lambda a, s, status=status, text=text: ToolResult("calc", a, status, text))
        call = world.play(tagged(world), replies(world, "<code>x</code>", "y"), [tool]).calls[0]
        assert f"<interpreter>\n{text}\n</interpreter>" in world.text(call)


def test_tags_and_the_tools_argument_are_free(world, monkeypatch):
    monkeypatch.setattr(world.Tool, "schema", property(lambda _: _schema(SCHEMA)))
    tool = world.Tool("calc", lambda arguments, state: arguments["query"].upper())
    flow = tagged(world, call_tag="search", result_tag="information")
    call = world.play(flow, replies(world, "<search>who</search>", "me"), [tool]).calls[0]
    assert "</search>\n<information>\nWHO\n</information>\nme" in world.text(call)


def _schema(parameters: dict) -> dict:
    return {"type": "function", "function": {"name": "calc", "description": "", "parameters": parameters}}


def test_a_tool_that_needs_two_arguments_is_refused(world, monkeypatch):
    two = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"]}
    monkeypatch.setattr(world.Tool, "schema", property(lambda _: _schema(two)))
    with pytest.raises(UserError, match="passes one text to the tool calc, which needs a, b"):
        world.runner(tagged(world), tools=[calculator(world)])
