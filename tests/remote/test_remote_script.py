"""`provider: mock`: a function answers in this process, by the rules of a server."""

from __future__ import annotations

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.types.record import Episode
from tests.remote import plays
from tests.remote.openai_server import tool_call

SCRIPT = """
import asyncio, time
from recipe.dag.core.errors import PromptTooLong
from recipe.dag.core.errors import ModelServerFault, UserError
seen = []
def plain(messages):
    seen.append(messages)
    messages[0]["content"] = "changed"
    return f"answer {len(seen)}"
async def coroutine(messages):
    await asyncio.sleep(0)
    return {"role": "assistant", "content": "awaited"}
def flaky(messages):
    seen.append(messages)
    if len(seen) < 3:
        raise ConnectionError("lost")
    return "back"
def dead(messages):
    raise ConnectionError("lost")
def hangs(messages):
    seen.append(messages)
    if len(seen) == 1:
        time.sleep(30)
    return "awake"
def too_long(messages):
    error = PromptTooLong("too long")
    error.room = 0
    raise error
def refuses(messages):
    raise UserError("no such judge")
def wrong(messages):
    return messages[0]["text"]
def number(messages):
    return 4
def crowd(messages):
    raise ModelServerFault("overloaded")
def completion(messages):
    choice = {"message": {"role": "assistant", "content": "cut"}, "finish_reason": "length"}
    return {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 20}}
"""


def play(
    world, name: str, tools=(), *, n: int = 1, agent: dict | None = None, code: str = SCRIPT, **api
) -> list[Episode]:
    options = {"script": f"judge.py:{name}", "max_wait_s": 0.02, **api}
    workflow = world.workflow(
        [{"id": "solve"}],
        agents=[agent or {}],
        policies={"main": {"api": options}},
        files={"judge.py": code},
        episode={"retries": 0, "on_user_error": "mask"},
    )
    return plays.play(world, workflow, tools, n=n, check=True)


def test_a_function_answers_its_own_copy_of_the_messages(world):
    (episode,) = play(world, "plain", price={"input": 1.0, "output": 10.0})
    (call,) = episode.calls
    assert call.text == "answer 1" and call.messages[0] == {"role": "user", "content": "question"}
    assert call.usage == {"requests": 1, "retries": 0, "prompt_tokens": 1, "completion_tokens": 2, "cost": 21e-6}


def test_a_coroutine_may_return_a_message_and_anything_a_completion(world):
    (awaited,), (cut,) = play(world, "coroutine"), play(world, "completion")
    assert awaited.calls[0].text == "awaited"
    assert (cut.calls[0].text, cut.calls[0].stop_reason) == ("cut", "length")
    assert cut.calls[0].usage is not None and cut.calls[0].usage["completion_tokens"] == 20


def test_tool_calls_of_a_script_are_run(world):
    asked = tool_call("calc", code="6*7")
    code = f"def ask(messages):\n    return {asked!r} if len(messages) == 1 else messages[-1]['content']\n"
    calc = world.Tool("calc", lambda arguments, state: str(eval(arguments["code"])))
    (episode,) = play(world, "ask", [calc], agent={"tools": ["calc"], "tool_loop": {}}, code=code)
    assert episode.calls[0].text == "42"


def test_a_lost_connection_and_a_hang_are_repeated_as_a_servers_are(world):
    (flaky,), (awake,) = play(world, "flaky"), play(world, "hangs", timeout_s=0.3)
    assert flaky.calls[0].text == "back" and flaky.calls[0].usage is not None and flaky.calls[0].usage["requests"] == 3
    assert awake.calls[0].text == "awake"


def test_a_dead_script_opens_the_circuit(world):
    episodes = play(world, "dead", n=4, retries=8, failures_to_open=3, probe_after_s=30.0)
    for fault in (episode.fault for episode in episodes):
        assert fault is not None and fault["infra"] and "no request is sent after 3 failures" in fault["message"]


@pytest.mark.parametrize(
    ("name", "boundary", "infra", "message"),
    [
        ("crowd", "model", True, "overloaded"),
        ("wrong", "hook", False, "KeyError: 'text'"),
        ("number", "hook", False, "returned int 4, not a text or a message"),
    ],
)
def test_what_a_script_raises_or_returns_decides_the_fault(world, name, boundary, infra, message):
    (episode,) = play(world, name)
    assert episode.fault is not None and message in episode.fault["message"]
    assert (episode.fault["boundary"], episode.fault["infra"]) == (boundary, infra)
    assert ("judge.py:" in episode.fault["source"]) == (name == "wrong")


def test_a_prompt_that_a_script_calls_too_long_ends_the_call(world):
    (episode,) = play(world, "too_long")
    assert episode.fault is None and episode.calls[0].stop_reason == "length"


def test_a_user_error_of_a_script_ends_the_run(world):
    with pytest.raises(UserError, match="no such judge"):
        play(world, "refuses")


def test_a_name_that_is_no_function_is_one_line(world):
    with pytest.raises(UserError, match="judge.py: defines no `absent`"):
        play(world, "absent")
    with pytest.raises(UserError, match=r"policies.main.api.script: judge.py:seen is not a function"):
        play(world, "seen")
