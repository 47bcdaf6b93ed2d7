"""Episodes that travel between processes."""

from __future__ import annotations

import pickle

import pytest

from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.shipment import Undecoded, pack, unpack
from recipe.dag.types.record import PROMPT_TEXT, TOKENS, Call, Episode, ToolResult


class Endpoint(PolicyEndpoint):
    """Decodes, and says how often."""

    def __init__(self):
        self.codec, self.decoded = self, 0

    def decode(self, ids, *, skip_special_tokens):
        self.decoded += 1
        return f"{ids} {skip_special_tokens}"


def episode(**changes) -> Episode:
    tokens = {
        "prompt_ids": [1, 2**40, 3],
        "response_ids": [4, 5],
        "response_mask": [1, 0],
        "rollout_log_probs": [-0.1 - 1e-17, 0.0],
    }
    call = Call("solve", "solver", 0, "main", 0, **tokens | changes, parsed={"answer": [1, None]}, reward=0.5)
    call.tool_results = [ToolResult("python", {"code": "1"}, "success", "1")]
    return Episode("u", 1, {"prompt": [], "n": 3}, [call], fault=None, info={"a": 1.5})


def travel(sent: Episode, endpoint: Endpoint) -> Episode:
    return unpack(pickle.loads(pickle.dumps(pack(sent))), {"main": endpoint})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"response_ids": [], "response_mask": [], "rollout_log_probs": []},
        {"rollout_log_probs": [0, -1.5]},  # not all floats: they stay what they are
        {"response_mask": [True, False]},
        {"rollout_log_probs": [float("-inf"), 5e-324]},
    ],
)
def test_what_arrives_is_what_was_sent(changes):
    arrived = travel(episode(**changes), Endpoint())
    assert arrived == episode(**changes)
    for name in TOKENS:
        sent, found = (getattr(e.calls[0], name) for e in (episode(**changes), arrived))
        assert type(found) is list and list(map(repr, found)) == list(map(repr, sent))


def test_token_lists_travel_as_arrays_that_are_copied_at_once():
    long = {"prompt_ids": list(range(100_000))}
    assert len(pickle.dumps(pack(episode(**long)))) < 8.1 * 100_000
    assert all(getattr(pack(episode()).calls[0], name).itemsize for name in TOKENS)


def test_a_prompt_that_has_not_been_decoded_is_decoded_where_it_is_read():
    here, there, sent = Endpoint(), Endpoint(), episode()
    sent.calls[0].prompt_text = lambda: here.decode([9], skip_special_tokens=False)
    assert isinstance(PROMPT_TEXT.raw(pack(sent).calls[0]), Undecoded)
    arrived = travel(sent, there)
    assert (here.decoded, there.decoded) == (0, 0)
    assert arrived.calls[0].prompt_text == f"{[1, 2**40, 3]} False" and (here.decoded, there.decoded) == (0, 1)


def test_a_prompt_that_was_decoded_travels_as_its_text():
    sent, there = episode(), Endpoint()
    sent.calls[0].prompt_text = "what is 1 + 1?"
    assert travel(sent, there).calls[0].prompt_text == "what is 1 + 1?" and there.decoded == 0
