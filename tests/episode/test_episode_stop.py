"""Stop strings end generations, whatever the server does, and no token of them is touched."""

from __future__ import annotations

import json

import pytest

from recipe.dag.episode.generation import cut_at_stop
from recipe.dag.types.record import Generation

CALL = "<tool_call>" + json.dumps({"name": "calc", "arguments": {}}) + "</tool_call>"


class Pairs:
    """Two characters to a token, so that a stop string can end within one."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(token // 256) + chr(token % 256) for token in ids)


def pairs(text: str) -> list[int]:
    return [ord(a) * 256 + ord(b) for a, b in zip(text[::2], text[1::2], strict=True)]


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("abcdefgh", ["cd"], "abcd"),
        ("abcdefgh", ["bc"], "abcd"),
        ("abcdefgh", ["gh", "ef"], "abcdef"),
        ("abcdefgh", ["x"], "abcdefgh"),
        ("abcdefgh", [], "abcdefgh"),
        ("abcdefgh", ["gh"], "abcdefgh"),
    ],
)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_generation_ends_with_the_token_that_completes_a_stop_string(text, stop, kept, reason):
    ids = pairs(text)
    made = Generation(list(ids), [-float(k) for k in range(len(ids))], reason, weight_version=3)
    cut, stopped = cut_at_stop(made, Pairs(), stop)
    assert stopped == any(string in text for string in stop)
    assert (cut.response_ids, cut.weight_version) == (ids[: len(kept) // 2], 3)
    assert cut.log_probs == [-float(k) for k in range(len(kept) // 2)]
    assert cut.stop_reason == ("stop" if stopped else reason)


def play(world, *texts: str, validate: bool = False, **agent):
    client = world.Client(lambda *_: texts[len(client.requests) - 1])
    flow = world.workflow([{"id": "solve"}], agents=[{"tools": ["calc"], **agent}])
    call = world.play(flow, client, [world.Tool("calc", lambda *_: "4")], validate=validate).calls[0]
    return call, client.requests


def test_what_comes_after_a_stop_string_is_not_part_of_the_call(world):
    call, requests = play(world, "first. second.", sampling={"stop": "."})
    assert (call.text, call.stop_reason, requests[0][2]["stop"]) == ("first.", "stop", ["."])
    assert len(call.response_ids) == len(call.response_mask) == len(call.rollout_log_probs) == len("first.")


def test_validation_may_stop_elsewhere(world):
    agent = {"sampling": {"stop": "."}, "validation": {"stop": [";"], "min_p": 0.1, "repetition_penalty": 1.1}}
    call, requests = play(world, "a.b;c", validate=True, **agent)
    options = requests[0][2]
    assert (call.text, options["stop"], options["min_p"], options["repetition_penalty"]) == ("a.b;", [";"], 0.1, 1.1)


def test_a_tool_loop_goes_on_after_a_stop_string_as_the_template_has_it(world):
    stop = {"sampling": {"stop": ["</tool_call>"]}}
    call, requests = play(world, f"{CALL} and nonsense", "done", tool_loop={}, **stop)
    assert call.text == "done" and [result.text for result in call.tool_results] == ["4"]
    behind = "<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert world.text(call) == f"{CALL}{behind}done<|im_end|>"
    assert requests[1][1].endswith(f"{CALL}{behind}")
    # The end of the turn was put there, not sampled.
    assert sum(call.response_mask) == len(CALL) + len("done") + 1
