"""What losses need of jagged columns is what verl computes, and no value of it is read on a GPU."""

from __future__ import annotations

from functools import partial

import torch
from tensordict import TensorDict
from verl.workers.utils.padding import no_padding_2_padding, response_from_nested

from recipe.dag.policy.jagged import make, padded_responses, pinned_to, responses_of

PROMPTS, RESPONSES = (1, 5, 2), (4, 1, 3)


def batch() -> tuple[TensorDict, torch.Tensor]:
    def column(lengths) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.ones(length) for length in lengths], layout=torch.jagged)

    both = column(map(sum, zip(PROMPTS, RESPONSES, strict=True)))
    columns = {"prompts": column(PROMPTS), "responses": column(RESPONSES), "response_mask": column(RESPONSES)}
    return TensorDict(columns | {"input_ids": both}, batch_size=[3]), both.offsets()


def test_responses_and_their_gradients_are_those_of_verl():
    data, offsets = batch()
    found = []
    for pad, cut in ((no_padding_2_padding, response_from_nested), (padded_responses, responses_of)):
        values = torch.arange(1.0, 17.0, requires_grad=True)
        output = make(values, offsets, (5, 6))
        padded, jagged = pad(output, data), cut(output, data["response_mask"])
        (gradient,) = torch.autograd.grad((padded**2).sum() + (jagged.values() ** 3).sum(), values)
        found.append((padded, jagged.values(), jagged.to_padded_tensor(-1.0), gradient))
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(theirs, ours)


def test_nothing_is_read_where_values_cannot_be(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    meta = torch.device("meta")  # a tensor there has no values
    data = batch()[0].apply(partial(pinned_to, meta), device=meta)
    output = make(torch.empty(16, device=meta), data["input_ids"].offsets(), (5, 6))
    data["old_log_probs"] = responses_of(output, data["response_mask"])
    padded = data.select("old_log_probs", "response_mask").to_padded_tensor()
    assert (
        padded["old_log_probs"].shape == padded["response_mask"].shape == padded_responses(output, data).shape == (3, 4)
    )
