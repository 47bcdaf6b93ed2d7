from __future__ import annotations

import asyncio
import math

import pytest
from verl.workers.rollout.replica import TokenOutput

from recipe.dag.episode.record import Generation
from recipe.dag.errors import ModelServerFault
from recipe.dag.policy.servers import ServerClient

SAMPLING = {"temperature": 0.8, "max_tokens": 3, "seed": 11, "ignore_eos": False}


class Balanced:
    """verl's load-balanced client: answers with `answer`, or raises it, and keeps what it was asked."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.asked.append((request_id, prompt_ids, sampling_params))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def output(ids=(4, 5), log_probs=(-0.1, -0.2), reason="stop", **extra) -> TokenOutput:
    values = None if log_probs is None else list(log_probs)
    return TokenOutput(token_ids=list(ids), log_probs=values, stop_reason=reason, extra_fields=extra)


def ask(answer, *, seeded: bool = True, **sampling) -> Generation:
    client = ServerClient(Balanced(answer), "main", seeded=seeded)
    return asyncio.run(client.generate("r", [1, 2], {**SAMPLING, **sampling}))


def test_an_answer_becomes_a_generation_with_its_version():
    assert ask(output(global_steps=7)) == Generation([4, 5], [-0.1, -0.2], "stop", 7)
    assert ask(output()).weight_version == 0


@pytest.mark.parametrize(
    ("said", "meant"), [("completed", "stop"), (None, "stop"), ("stop", "stop"), ("length", "length")]
)
def test_stop_reasons_have_one_name_each(said, meant):
    assert ask(output(reason=said)).stop_reason == meant


def test_an_answer_that_ran_to_its_end_without_stop_tokens_is_of_full_length():
    full = output((4, 5, 6), (-1.0, -1.0, -1.0), "completed")
    assert ask(full, ignore_eos=True).stop_reason == "length"
    assert ask(full).stop_reason == "stop"


def test_an_answer_without_tokens_is_an_answer():
    assert ask(output((), None, "length")).response_ids == []


@pytest.mark.parametrize("seeded", [True, False])
def test_what_the_server_is_asked(seeded):
    balanced = Balanced(output())
    sampling = dict(SAMPLING)
    asyncio.run(ServerClient(balanced, "main", seeded=seeded).generate("r", [1, 2], sampling))
    expected = {**SAMPLING, "logprobs": True}
    if not seeded:
        del expected["seed"]
    assert balanced.asked == [("r", [1, 2], expected)] and sampling == SAMPLING


@pytest.mark.parametrize(
    "answer",
    [
        output(reason="abort"),
        output(reason="aborted"),
        output(log_probs=None),
        output(log_probs=(-0.1,)),
        output(log_probs=(-0.1, math.nan)),
        output(log_probs=(-0.1, -math.inf)),
        RuntimeError("actor died"),
        TimeoutError("no answer"),
        object(),
    ],
    ids=["abort", "aborted", "no log-probs", "too few", "nan", "inf", "died", "timeout", "nonsense"],
)
def test_an_unusable_answer_is_the_servers_fault(answer):
    with pytest.raises(ModelServerFault) as caught:
        ask(answer)
    assert caught.value.infra and caught.value.where == "main"


def test_cancelling_is_no_fault():
    with pytest.raises(asyncio.CancelledError):
        ask(asyncio.CancelledError())
