from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch

from recipe.dag.episode.row import Row
from recipe.dag.train import kernels
from recipe.dag.train.batch import to_tensordict
from recipe.dag.train.metrics import mismatch, token_metrics
from recipe.dag.train.packing import PAD
from recipe.dag.train.step import TrainingStep, keep_informative, split_by_policy
from recipe.dag.workflow.loader import load_workflow
from recipe.dag.workflow.schema import Algorithm

TWO_POLICIES = """\
dag_id: two
agents: [{name: left, policy: a}, {name: right, policy: b}, {name: judge, policy: fixed}]
policies: {a: {model: {path: m}}, b: {model: {path: m}}, fixed: {model: {path: m}, frozen: true}}
nodes:
  - {node_id: l, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: left}
  - {node_id: r, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: right}
  - {node_id: j, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: judge, dependencies: [l, r]}
  - {node_id: reward, node_type: COMPUTE, node_role: REWARD, dependencies: [j], executable_ref: score.py:score}
"""


@pytest.fixture
def workflow(tmp_path):
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    (tmp_path / "two.yaml").write_text(TWO_POLICIES)
    return load_workflow(tmp_path / "two.yaml")


def row(reward: float = 0.0, *, policy: str = "a", uid: str = "u", temperature: float = 1.0, mask=(1, 0, 1)) -> Row:
    ids = list(range(5, 5 + len(mask)))
    log_probs = [-float(i + 1) * bit for i, bit in enumerate(mask)]
    return Row(uid, 0, "left", "l", 0, policy, 0, [3, 4], ids, list(mask), log_probs, reward, temperature=temperature)


def test_rows_go_to_their_policies_in_order_and_frozen_ones_are_left_out(workflow):
    rows = [row(1, policy="b"), row(2, policy="fixed"), row(3, policy="a"), row(4, policy="b")]
    split = split_by_policy(rows, workflow)
    assert {name: [r.reward for r in mine] for name, mine in split.items()} == {"a": [3], "b": [1, 4]}


def test_rows_without_anything_to_compare_are_left_out_where_asked():
    rows = [row(1, uid="same"), row(0, uid="mixed"), row(1, uid="same"), row(1, uid="mixed")]
    assert keep_informative(rows, Algorithm()) == rows
    assert [r.uid for r in keep_informative(rows, Algorithm(drop_zero_variance=True))] == ["mixed", "mixed"]
    assert keep_informative([], Algorithm(drop_zero_variance=True)) == []


def test_a_tensordict_holds_the_rows_in_layout_order_and_padding_has_no_mask():
    data = to_tensordict([row(mask=(1, 1)), row(mask=(1, 0, 1, 1))], [PAD, 1, 0], pad_token_id=9)
    assert [t.tolist() for t in data["input_ids"].unbind()] == [[9, 9], [3, 4, 5, 6, 7, 8], [3, 4, 5, 6]]
    assert [t.tolist() for t in data["response_mask"].unbind()] == [[0], [1, 0, 1, 1], [1, 1]]
    assert [t.tolist() for t in data["position_ids"].unbind()] == [[0, 1], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]
    assert data["temperature"] == 1.0


def test_rows_of_one_length_stay_jagged():
    data = to_tensordict([row(), row()], [0, 1], pad_token_id=0)
    assert all(data[name].layout == torch.jagged for name in ("prompts", "responses", "input_ids", "response_mask"))


def test_a_greedy_row_is_trained_at_temperature_one():
    data = to_tensordict([row(temperature=0.0), row(temperature=0.5)], [1, PAD, 0], pad_token_id=0)
    assert data["temperature"].tolist() == [0.5, 1.0, 1.0]


def test_mismatch_of_equal_and_shifted_log_probs():
    server = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    assert mismatch(server, server) == {
        "logprob_diff/mean": 0,
        "logprob_diff/max": 0,
        "logprob_pearson": pytest.approx(1),
    }
    found = mismatch(server + torch.tensor([0.0, 0.3, 0.0]), server)
    assert found["logprob_diff/mean"] == pytest.approx(0.1) and found["logprob_diff/max"] == pytest.approx(0.3)
    assert found["logprob_pearson"] < 1


def test_mismatch_has_no_correlation_where_nothing_varies():
    same = torch.full((3,), -1.0, dtype=torch.float64)
    assert set(mismatch(same, same)) == {"logprob_diff/mean", "logprob_diff/max"}


def test_token_metrics_look_at_sampled_tokens_only():
    rows = [row(mask=(1, 0, 1)), row(mask=(1, 1))]
    nan = math.nan
    columns = {
        "old_log_probs": [torch.tensor([-1.5, nan, -3.0]), torch.tensor([-1.0, -2.0])],
        "ref_log_prob": [torch.tensor([-1.5, nan, -3.0]), torch.tensor([-1.0, -2.0])],
        "entropy": [torch.tensor([1.0, nan, 3.0]), torch.tensor([2.0, 2.0])],
        "advantages": [torch.tensor([0.5, nan, 0.5]), torch.tensor([-1.0, -1.0])],
    }
    metrics = token_metrics(rows, columns)
    expected = {
        "rows": 2,
        "trained_tokens": 4,
        "total_tokens": 9,
        "entropy": 2,
        "advantage/mean": -0.25,
        "advantage/max": 1,
    }
    assert expected.items() <= metrics.items()
    assert metrics["logprob_diff/max"] == pytest.approx(0.5) and metrics["logprob_diff/mean"] == pytest.approx(0.125)
    assert metrics["reference_kl"] == 0


def test_log_probs_taken_over_from_the_server_are_not_compared_with_themselves():
    metrics = token_metrics([row()], {"old_log_probs": [torch.tensor([-1.0, 0.0, -3.0])]})
    assert not any(name.startswith("logprob") for name in metrics)


@pytest.fixture
def trace(monkeypatch):
    """The kernels replaced by a record of who ran when."""
    events: list[tuple[str, str]] = []

    def record(kind: str):
        def kernel(policy, batch, *args, **kwargs):
            events.append((kind, policy.name))

        return kernel

    for kind in ("old_log_probs", "update_actor", "prepare"):
        monkeypatch.setattr(kernels, kind, record(kind))
    return events


def test_a_step_runs_the_nodes_of_the_policies_that_have_rows(workflow, trace):
    policies = {n: SimpleNamespace(name=n, pool=SimpleNamespace(lock=asyncio.Lock())) for n in ("a", "b")}
    step = TrainingStep(workflow, policies, [row(1, policy="b"), row(0, policy="b")], seed=0)
    asyncio.run(step.run())
    assert [event for event in trace if event[0] != "prepare"] == [("old_log_probs", "b"), ("update_actor", "b")]
    assert set(step.timing) == {"b.old_log_probs", "b.advantage", "b.update"}
    assert step.metrics()["policy/b/rows"] == 2


def test_no_policy_is_updated_before_all_old_log_probs_are_known(workflow, trace):
    lock = asyncio.Lock()
    policies = {n: SimpleNamespace(name=n, pool=SimpleNamespace(lock=lock)) for n in ("a", "b")}
    asyncio.run(TrainingStep(workflow, policies, [row(policy=p) for p in "abab"], seed=0).run())
    kinds = [kind for kind, _ in trace if kind != "prepare"]
    assert kinds.count("update_actor") == kinds.count("old_log_probs") == 2
    assert kinds.index("update_actor") > max(i for i, kind in enumerate(kinds) if kind == "old_log_probs")


def test_a_step_without_rows_is_nothing(workflow, trace):
    step = TrainingStep(workflow, {}, [row(policy="fixed")], seed=0)
    asyncio.run(step.run())
    assert trace == [] and step.metrics() == {}
