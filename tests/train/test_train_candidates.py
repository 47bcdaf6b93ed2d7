"""A training step over candidates: which rows it learns from, with which advantages, and where it records them."""

from __future__ import annotations

import pytest

from recipe.dag.episode.rows import rows_of
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.train import kernels
from recipe.dag.train.call_filter import outside_loss
from recipe.dag.train.selection import informative_uids, select_rows
from recipe.dag.train.step import TrainingStep
from recipe.dag.types.record import Call, Episode
from tests.train.steps import run_step

FLOW = """\
dag_id: candidates
agents: [{name: solver, policy: a}, {name: checker, policy: b}]
policies: {a: {model: {path: m}}, b: {model: {path: m}}}
algorithm: {estimator: grpo, scale: none, old_log_probs: trainer}
nodes:
  - {id: solve, agent: solver, candidates: {k: 3, by: score.py:length}}
  - {id: check, agent: checker, after: solve}
  - {id: pay, reward: score.py:pay, after: check}
"""
CODE = "def length(context): return 0.0\ndef pay(episode): return {}\n"


@pytest.fixture
def load(tmp_path):
    def make(old: str = "", new: str = ""):
        (tmp_path / "score.py").write_text(CODE)
        (tmp_path / "w.yaml").write_text(FLOW.replace(old, new) if old else FLOW)
        return load_workflow(tmp_path / "w.yaml")

    return make


def call(agent: str, node: str, *, stop: str = "stop", **fields) -> Call:
    tokens = {"prompt_ids": [3], "response_ids": [5, 6], "response_mask": [1, 0], "rollout_log_probs": [-1.0, 0.0]}
    policy = "a" if agent == "solver" else "b"
    return Call(node, agent, int(policy == "b"), policy, 0, stop_reason=stop, **tokens, **fields)


def episode(
    index: int, scores: tuple[float | None, ...], reward: float, *, uid: str = "u", stop: str = "stop"
) -> Episode:
    kept = max(range(len(scores)), key=lambda position: scores[position] if scores[position] is not None else -1.0)
    siblings = [
        call("solver", "solve", score=score, candidate=position, candidates=len(scores))
        for position, score in enumerate(scores)
    ]
    siblings[0].stop_reason = stop
    dropped = [sibling for position, sibling in enumerate(siblings) if position != kept]
    siblings[kept].reward = reward
    return Episode(uid, index, {}, calls=[siblings[kept], call("checker", "check", reward=reward)], dropped=dropped)


def advantages(made: Episode) -> list[float | None]:
    return [None if sibling.advantage is None else round(sibling.advantage, 6) for sibling in made.all_calls]


def train(flow, episodes: list[Episode], monkeypatch) -> TrainingStep:
    for kind in ("old_log_probs", "update_actor", "prepare"):
        monkeypatch.setattr(kernels, kind, lambda *_, **__: None)
    rows = rows_of(episodes, outside_loss=lambda one: outside_loss(one, flow))
    return run_step(flow, rows, shared_pool=False, episodes=episodes)


def test_all_candidates_learn_and_their_advantages_are_recorded(load, monkeypatch):
    episodes = [episode(0, (0.0, 0.9, 0.3), 1.0), episode(1, (0.2, None, 0.2), 0.0)]
    step = train(load(), episodes, monkeypatch)
    assert [len(step.batches[name].rows) for name in ("a", "b")] == [5, 2]
    # the kept one, the checker, and then the candidates that were not kept
    assert advantages(episodes[0]) == [0.5 + 0.5, 0.5, -0.4, -0.1]
    assert advantages(episodes[1]) == [-0.5, -0.5, None, 0.0]
    for row, tokens in zip(step.batches["a"].rows, step.batches["a"].columns["advantages"], strict=True):
        assert len(tokens) == len(row.response_ids) and tokens[1] == 0.0


def test_a_candidate_that_was_cut_off_leaves_the_loss_and_stays_in_the_comparison(load, monkeypatch):
    flow = load("scale: none,", "scale: none, overlong: {mask: true},")
    episodes = [episode(0, (0.0, 0.9, 0.3), 1.0, stop="length"), episode(1, (0.1, 0.4, 0.1), 0.0)]
    step = train(flow, episodes, monkeypatch)
    masks = [row.loss_mask() for row in step.batches["a"].rows if row.episode == 0]
    assert masks == [[1, 0], [0, 0], [1, 0]]
    assert advantages(episodes[0]) == [1.0, 0.5, -0.4, -0.1]


def test_a_frozen_agents_candidates_are_not_trained(load, monkeypatch):
    flow = load("a: {model: {path: m}}", "a: {model: {path: m}, frozen: true}")
    step = train(flow, [episode(0, (0.0, 0.9), 1.0), episode(1, (0.1, 0.4), 0.0)], monkeypatch)
    assert set(step.batches) == {"b"}


def test_a_group_without_differences_is_informative_if_its_candidates_differ(load):
    flow = load("scale: none,", "scale: none, drop_zero_variance: true,")
    episodes = [
        *(episode(index, (0.0, 0.0), 1.0, uid="same") for index in range(2)),
        *(episode(index, (0.0, 0.5 * index), 1.0, uid="local") for index in range(2)),
        *(episode(index, (0.0, 0.0), float(index), uid="later") for index in range(2)),
    ]
    rows = rows_of(episodes)
    assert informative_uids(rows, flow) == ["local", "later"]
    trained, _ = select_rows(rows, flow)
    assert [(row.uid, row.episode, row.is_dropped) for row in trained["a"]] == [
        ("local", 1, False),
        ("local", 1, True),
        ("later", 0, False),
        ("later", 1, False),
    ]
    assert [row.uid for row in trained["b"]] == ["later", "later"]
    assert sum(call.reward for row in trained["a"] for call in row.calls) == 2.0
