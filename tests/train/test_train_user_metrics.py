"""Metrics of users: how their function is loaded, asked and refused, and that the servers' own log-probs reach it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from recipe.dag.core.errors import UserError
from recipe.dag.platform.rollout_server import RolloutServer
from recipe.dag.policy import scorer
from recipe.dag.policy.scorer import ServerScorer
from recipe.dag.train.user_metrics import UserMetrics

CODE = """
async def count(policies, state):
    state["calls"] = state.get("calls", 0) + 1
    return {"calls": state["calls"], "policies": len(policies)}
async def raises(policies, state): return policies["unknown"]
async def text(policies, state): return {"x": "much"}
async def listed(policies, state): return [1.0]
async def nan(policies, state): return {"x": float("nan")}
async def opaque(policies, state): state["x"] = object(); return {}
def blocking(policies, state): return {}
async def short(policies): return {}
"""


@pytest.fixture
def made(tmp_path):
    (tmp_path / "own.py").write_text(CODE)

    def make(name, freq=1):
        ref = name and f"own.py:{name}"
        config = OmegaConf.create({"validation": {"metrics": ref, "metrics_freq": freq}})
        return UserMetrics(config, str(tmp_path / "flow.yaml"))

    return make


def test_the_function_gets_the_policies_and_a_state_that_lasts(made):
    metrics = made("count")
    for calls in (1, 2):
        assert asyncio.run(metrics.measure({"a": None, "b": None})) == {"user/calls": calls, "user/policies": 2}
    resumed = made("count")
    resumed.state = dict(metrics.state)
    assert asyncio.run(resumed.measure({})) == {"user/calls": 3, "user/policies": 0}


def test_it_is_due_at_the_start_at_multiples_and_at_the_end(made):
    assert [step for step in range(8) if made("count", freq=3).due(step, total=7)] == [0, 3, 6, 7]
    assert not any(made(None).due(step, total=7) for step in range(8))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "KeyError: 'unknown' .*own.py:5"),
        ("text", "x is str 'much', not a finite number"),
        ("nan", "x is float nan, not a finite number"),
        ("listed", "returned list .1.0., not a dict of numbers"),
        ("opaque", "TypeError: Object of type object is not JSON serializable"),
    ],
)
def test_an_error_of_the_function_is_one_line(made, name, message):
    with pytest.raises(UserError, match=f"validation.metrics: own.py:{name}.*{message}"):
        asyncio.run(made(name).measure({}))


@pytest.mark.parametrize(
    ("name", "message"),
    [("blocking", "must be `async def`"), ("short", "must take the positional"), ("none", "defines no `none`")],
)
def test_a_function_that_cannot_be_called_is_refused_before_the_run(made, name, message):
    with pytest.raises(UserError, match=message):
        made(name)


def test_an_answers_log_prob_is_the_sum_over_its_tokens_and_the_end_of_turn(tiny_model, monkeypatch, one_thread):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    server = RolloutServer(str(tiny_model), max_requests=2, max_len=64, load_format="auto", trust_remote_code=False)
    handle = SimpleNamespace(generate=SimpleNamespace(remote=lambda **keys: server.generate(**keys)))
    monkeypatch.setattr(scorer, "render", lambda tokenizer, messages, **_: [5, 6, len(messages)])
    monkeypatch.setattr(scorer, "end_of_turn_id", lambda tokenizer, **_: 1)
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [ord(c) % 90 for c in text])
    policy = SimpleNamespace(tokenizer=tokenizer, replicas=[SimpleNamespace(server_handle=handle)] * 2, adapter=None)
    messages, answers = [{"role": "user", "content": "?"}], ["yes", "no", ""]
    found = asyncio.run(ServerScorer(policy).log_probs(messages, answers))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for answer, total in zip(answers, found, strict=True):
        ids = torch.tensor([[5, 6, 1, *(ord(c) % 90 for c in answer), 1]])
        with torch.no_grad():
            log_probs = model(ids).logits.log_softmax(-1)[0, 2:-1]
        expected = log_probs.gather(-1, ids[0, 3:, None]).sum().item()
        assert total == pytest.approx(expected, abs=1e-4)
