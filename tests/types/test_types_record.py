from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from recipe.dag.episode.reward import scratch
from recipe.dag.types.record import Call, Episode, Result, Skip, ToolResult
from recipe.dag.types.values import plain_copy


def make_call(**keys) -> Call:
    return Call("solve", "solver", 0, "main", 0, [1, 2], [3], [1], [-0.5], **keys)


class Decoding:
    """Counts how often it is asked for a text."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> str:
        self.times += 1
        return "the prompt"


def test_a_prompts_text_is_made_once_and_when_it_is_read():
    decoding = Decoding()
    call = make_call(prompt_text=decoding)
    copied = scratch(Episode("u", 0, {}, [call])).calls[0]
    assert decoding.times == 0
    assert [call.prompt_text, call.prompt_text] == ["the prompt"] * 2 and decoding.times == 1
    assert copied.prompt_text == "the prompt"


@pytest.mark.parametrize(
    "read",
    [
        lambda call: dataclasses.asdict(call)["prompt_text"],
        lambda call: dataclasses.replace(call).prompt_text,
        lambda call: copy.deepcopy(call).prompt_text,
        lambda call: pickle.loads(pickle.dumps(call)).prompt_text,
        lambda call: "the prompt" if call == make_call(prompt_text="the prompt") else repr(call),
    ],
)
def test_every_way_to_read_a_record_gives_the_text(read):
    assert read(make_call(prompt_text=lambda: "the prompt")) == "the prompt"
    assert make_call().prompt_text == ""


def test_a_scratch_copy_is_equal_and_shares_nothing():
    call = make_call(
        parsed={"a": [1, {"b": 2}]},
        env_info={"x": [1]},
        reward_parts={"n": 1.0},
        tool_results=[ToolResult("t", {"code": ["x"]}, "success", "out")],
        completion="c",
    )
    episode = Episode(
        "u",
        1,
        {"prompt": [{"role": "user"}]},
        [call],
        dropped=[make_call()],
        results=[Result("v", 0, 0, "", {"k": [1]})],
        skips=[Skip("s", "", 0, 0, "when")],
    )
    episode.info, episode.faults = {"i": [1]}, [{"m": "x"}]
    before = episode.to_json()
    copied = scratch(episode)
    assert copied.to_json() == before and isinstance(copied.calls[0], Call)
    changed = copied.calls[0]
    for values in (changed.prompt_ids, changed.response_ids, changed.response_mask, changed.rollout_log_probs):
        values.append(9)
    changed.response_ids += [8]
    changed.parsed["a"][1]["b"] = changed.env_info["x"][0] = changed.tool_results[0].arguments["code"][0] = 9
    changed.tool_results[0].text = changed.tool_results[0].name = "changed"
    changed.reward_parts["n"], changed.train = 9, False
    copied.dropped[0].response_ids.append(9)
    copied.results[0].parsed["k"].append(9)
    copied.skips[0].reason = copied.sample["prompt"][0]["role"] = "changed"
    copied.info["i"].append(9)
    copied.faults[0]["m"] = "changed"
    assert episode.to_json() == before
    assert changed.prompt_ids == [1, 2, 9] and changed.response_ids == [3, 9, 8]


class Odd(dict):
    pass


@pytest.mark.parametrize(
    "value", [{"a": [1, "x", None, 2.5, True]}, [{}], (1, [2]), Odd(a=[1]), {1: {2}}, "text", [b"x", ([],)]]
)
def test_plain_copies_are_deep_and_keep_types(value):
    copied = plain_copy(value)
    assert copied == value and type(copied) is type(value)
    if not isinstance(value, str):
        assert copied is not value
    if isinstance(value, tuple):
        assert copied[1] is not value[1]
    if isinstance(value, Odd):
        assert copied["a"] is not value["a"]
