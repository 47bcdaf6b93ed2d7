"""The generator's log-probs are the model's own, whoever else is in the batch."""

from __future__ import annotations

import resource
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.platform import generator as module
from recipe.dag.platform.generator import Generator, Request, sample, truncate, uniform

TOLERANCE = 1e-4
MAX_LEN = 64


@pytest.fixture(scope="module")
def model(tiny_model):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="sdpa").eval()


def requests(count: int, *, first: int = 0, **keys) -> list[Request]:
    """Ragged prompts, lengths to generate and temperatures."""
    made = []
    for i in range(first, first + count):
        draw = torch.Generator().manual_seed(i)
        length = int(torch.randint(1, 20, (1,), generator=draw))
        prompt = torch.randint(2, 96, (length,), generator=draw).tolist()
        options = {"max_tokens": 1 + (7 * i) % 13, "temperature": (1.0, 0.5, 1.7, 0.0)[i % 4], "seed": i}
        made.append(Request(prompt, **options | keys))
    return made


def run(model, waiting: list[Request], *, max_requests: int, joining: int) -> list[Request]:
    """Generate all, `joining` at most at a time between two steps. Returns them as they finish."""
    generator, finished = Generator(model, max_requests=max_requests, max_len=MAX_LEN), []
    while waiting or generator.active:
        batch, waiting = waiting[: min(joining, generator.room)], waiting[min(joining, generator.room) :]
        if batch:
            finished += generator.add(batch)
        if generator.active:
            finished += generator.step()
    return finished


@torch.inference_mode()
def full_forward(model, request: Request) -> torch.Tensor:
    """[response, V] log-probs after temperature, without a cache and without a batch."""
    ids = torch.tensor([request.prompt_ids + request.response_ids[:-1]])
    logits = model(ids).logits[0, len(request.prompt_ids) - 1 :]
    return torch.log_softmax(logits / (request.temperature or 1.0), -1)


@pytest.mark.parametrize(("max_requests", "joining"), [(16, 16), (5, 2), (3, 1), (1, 1)])
def test_log_probs_equal_those_of_a_full_forward(model, max_requests, joining):
    finished = run(model, requests(16), max_requests=max_requests, joining=joining)
    assert len(finished) == 16
    worst = 0.0
    for request in finished:
        assert len(request.response_ids) == len(request.log_probs) == request.max_tokens
        expected = full_forward(model, request)[torch.arange(request.max_tokens), request.response_ids]
        worst = max(worst, (expected - torch.tensor(request.log_probs)).abs().max().item())
    assert worst < TOLERANCE


def test_requests_leave_from_the_middle_and_others_take_their_slots(model, monkeypatch):
    moves = []
    move = module.SlabCache.move
    monkeypatch.setattr(module.SlabCache, "move", lambda self, *args: (moves.append(args), move(self, *args)))
    run(model, requests(16), max_requests=5, joining=2)
    assert len(moves) > 3  # the parity above speaks of moved slots too


def test_a_request_gets_the_same_tokens_alone_and_in_a_batch(model):
    batched = run(model, requests(12, max_tokens=12), max_requests=7, joining=3)
    alone = [run(model, [request], max_requests=1, joining=1)[0] for request in requests(12, max_tokens=12)]
    tokens = {request.seed: request.response_ids for request in batched}
    assert tokens == {request.seed: request.response_ids for request in alone}
    for one in alone:
        other = next(request for request in batched if request.seed == one.seed)
        assert one.log_probs == pytest.approx(other.log_probs, abs=TOLERANCE)


def test_seeds_differ(model):
    prompt = {"prompt_ids": [5, 6, 7], "max_tokens": 12}
    finished = run(model, [Request(**prompt, seed=seed) for seed in range(8)], max_requests=8, joining=8)
    assert len({tuple(request.response_ids) for request in finished}) == 8


def test_temperature_zero_takes_the_best_token_and_reports_its_log_prob(model):
    for request in run(model, requests(6, temperature=0.0, max_tokens=9), max_requests=4, joining=4):
        log_probs = full_forward(model, request)
        assert request.response_ids == log_probs.argmax(-1).tolist()
        assert request.log_probs == pytest.approx(log_probs.max(-1).values.tolist(), abs=TOLERANCE)


def test_a_stop_token_ends_a_request_and_stays_in_the_answer(model):
    free = run(model, requests(1, first=1, max_tokens=10), max_requests=1, joining=1)[0]
    stop = free.response_ids[4]
    cut = free.response_ids.index(stop) + 1
    asked = requests(1, first=1, max_tokens=10, stop_token_ids=frozenset({stop}))
    stopped = run(model, asked, max_requests=1, joining=1)[0]
    assert (stopped.response_ids, stopped.stop_reason) == (free.response_ids[:cut], "stop")
    assert free.stop_reason == "length"


def test_the_context_length_ends_a_request(model):
    request = Request([7] * 60, max_tokens=100, seed=3)
    finished = run(model, [request], max_requests=1, joining=1)
    assert finished == [request] and request.stop_reason == "length"
    assert len(request.prompt_ids) + len(request.response_ids) == MAX_LEN


def test_one_token_is_finished_when_it_joins(model):
    generator = Generator(model, max_requests=2, max_len=MAX_LEN)
    short, long = Request([5], max_tokens=1), Request([6], max_tokens=3)
    assert generator.add([short, long]) == [short]
    assert generator.active == [long] and generator.room == 1


def test_drop_all_aborts_and_leaves_a_clean_generator(model):
    generator = Generator(model, max_requests=4, max_len=MAX_LEN)
    generator.add(dropped := requests(4, max_tokens=20))
    generator.step()
    assert generator.drop_all() == dropped and generator.room == 4
    assert all(r.stop_reason == "abort" and len(r.response_ids) == len(r.log_probs) == 2 for r in dropped)
    again = requests(3, first=4)
    finished = generator.add(again)
    while generator.active:
        finished += generator.step()
    expected = run(model, requests(3, first=4), max_requests=3, joining=3)
    assert {r.seed: r.response_ids for r in finished} == {r.seed: r.response_ids for r in expected}


# ---- distributions, by enumeration ----

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, 0.0, -3.0])


def enumerate_tokens(monkeypatch, request: Request, *, count: int = 4000) -> tuple[list[float], dict[int, float]]:
    """How much of [0, 1) leads to each token, and the log-probs reported: one request for each of `count` evenly spaced
    random numbers."""
    monkeypatch.setattr(module, "uniform", lambda seeds, positions: (np.arange(count) + 0.5) / count)
    tokens, log_probs = sample(LOGITS.expand(count, -1), [deepcopy(request) for _ in range(count)])
    return (np.bincount(tokens, minlength=len(LOGITS)) / count).tolist(), dict(zip(tokens, log_probs, strict=True))


def test_sampling_follows_the_softmax(monkeypatch):
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(LOGITS / temperature, -1)
        shares, log_probs = enumerate_tokens(monkeypatch, Request([1], 1, temperature))
        assert shares == pytest.approx(expected.tolist(), abs=1e-3)
        for token, log_prob in log_probs.items():
            assert log_prob == pytest.approx(expected[token].log().item(), abs=1e-5)


def test_top_k_keeps_the_k_best_in_proportion_and_reports_log_probs_from_before(monkeypatch):
    probs = torch.softmax(LOGITS, -1)
    expected = torch.where(torch.tensor([True, False, True, True, False, False]), probs, 0.0)
    shares, log_probs = enumerate_tokens(monkeypatch, Request([1], 1, top_k=3))
    assert shares == pytest.approx((expected / expected.sum()).tolist(), abs=1e-3)
    assert log_probs[0] == pytest.approx(probs[0].log().item(), abs=1e-5)


def test_top_p_keeps_the_smallest_set_that_reaches_p(monkeypatch):
    probs = torch.softmax(LOGITS, -1)  # 0.51, 0.31, 0.11, 0.07, ...: the first two fall short of 0.85
    assert probs[0] + probs[3] < 0.85 < probs[0] + probs[3] + probs[2]
    expected = torch.where(torch.tensor([True, False, True, True, False, False]), probs, 0.0)
    shares, _ = enumerate_tokens(monkeypatch, Request([1], 1, top_p=0.85))
    assert shares == pytest.approx((expected / expected.sum()).tolist(), abs=1e-3)
    assert enumerate_tokens(monkeypatch, Request([1], 1, top_p=1e-6))[0][0] == 1.0


def test_repetition_penalty_weakens_what_was_seen(monkeypatch):
    request = Request([0, 0, 1], 9, repetition_penalty=2.0, response_ids=[4])
    penalised = LOGITS.clone()
    penalised[0], penalised[1], penalised[4] = 1.0, -2.0, 0.0  # positive halved, negative doubled
    shares, _ = enumerate_tokens(monkeypatch, request)
    assert shares == pytest.approx(torch.softmax(penalised, -1).tolist(), abs=1e-3)


def test_presence_and_frequency_penalties_count_the_response_alone(monkeypatch):
    request = Request([3, 3], 9, presence_penalty=0.5, frequency_penalty=0.25, response_ids=[0, 0, 4])
    penalised = LOGITS.clone()
    penalised[0], penalised[4] = 2.0 - 0.5 - 2 * 0.25, 0.0 - 0.5 - 0.25
    shares, log_probs = enumerate_tokens(monkeypatch, request)
    assert shares == pytest.approx(torch.softmax(penalised, -1).tolist(), abs=1e-3)
    assert log_probs[0] == pytest.approx(torch.log_softmax(penalised, -1)[0].item(), abs=1e-5)


def test_min_p_leaves_out_what_is_far_less_probable_than_the_best(monkeypatch):
    probs = torch.softmax(LOGITS, -1)
    expected = torch.where(probs >= 0.2 * probs.max(), probs, 0.0)
    assert 0 < int((expected == 0).sum()) < len(LOGITS) - 1
    shares, log_probs = enumerate_tokens(monkeypatch, Request([1], 1, min_p=0.2))
    assert shares == pytest.approx((expected / expected.sum()).tolist(), abs=1e-3)
    assert log_probs[0] == pytest.approx(probs[0].log().item(), abs=1e-5)


def test_a_stop_string_ends_a_request_and_its_last_token_stays_in_the_answer(model):
    (whole,) = run(model, [Request([5, 6], 12, seed=1)], max_requests=1, joining=1)
    stopped = Request([5, 6], 12, seed=1, stopped=lambda ids: len(ids) == 3)
    (cut,) = run(model, [stopped], max_requests=1, joining=1)
    assert len(whole.response_ids) == 12
    assert (cut.response_ids, cut.stop_reason) == (whole.response_ids[:3], "stop")
    assert cut.log_probs == pytest.approx(whole.log_probs[:3], abs=TOLERANCE)


def test_each_request_of_a_batch_keeps_its_own_sampling():
    batch = [Request([1], 1, top_k=1), Request([1], 1), Request([0], 1, temperature=0.0, repetition_penalty=9.0)]
    alone = [sample(LOGITS[None], [deepcopy(request)]) for request in batch]
    tokens, log_probs = sample(LOGITS.expand(3, -1), batch)
    assert tokens == [ids[0] for ids, _ in alone] and tokens[0] == 0 and tokens[2] == 3
    assert log_probs == pytest.approx([values[0] for _, values in alone])


@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=12),
    st.integers(-1, 14),
    st.floats(0.01, 1.0),
    st.integers(0, 2**64 - 1),
)
def test_a_token_outside_the_kept_set_is_never_drawn(logits, top_k, top_p, seed):
    request = Request([0], 1, top_k=top_k, top_p=top_p, seed=seed)
    probs = torch.log_softmax(torch.tensor([logits]), -1).double().exp()
    kept = truncate(probs, [request])[0] > 0
    assert 1 <= int(kept.sum()) <= (top_k if top_k > 0 else len(logits))
    tokens, _ = sample(torch.tensor([logits]), [request])
    assert kept[tokens[0]]


def test_random_numbers_are_a_function_of_seed_and_position_and_look_uniform():
    seeds, positions = np.meshgrid(np.arange(64, dtype=np.uint64), np.arange(64, dtype=np.uint64))
    numbers = uniform(seeds.ravel(), positions.ravel())
    assert (numbers == uniform(seeds.ravel(), positions.ravel())).all()
    assert numbers.min() >= 0 and numbers.max() < 1 and len(set(numbers)) == 4096
    assert np.bincount((numbers * 8).astype(int)) == pytest.approx([512] * 8, rel=0.15)
    grid = numbers.reshape(64, 64)
    for neighbour in (grid[1:], grid[:, 1:]):
        own = grid[: neighbour.shape[0], : neighbour.shape[1]]
        assert abs(np.corrcoef(own.ravel(), neighbour.ravel())[0, 1]) < 0.06
    assert uniform(np.array([2**64 - 1], dtype=np.uint64), np.array([0], dtype=np.uint64)) < 1


def test_the_cache_takes_no_memory_for_tokens_that_no_request_has(model):
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    before = resident()
    cache = module.SlabCache(model.config, 4096, 8192, torch.float32)
    assert cache.keys.nbytes >= 1 << 30 and not cache.keys[0, -1, :, -1].any()
    assert resident() - before < 64 << 20
