from __future__ import annotations

import asyncio
import hashlib
import math

import pytest
import torch

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.algorithms.happo import Happo
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.train import kernels
from recipe.dag.train.kernels import PolicyBatch
from recipe.dag.train.sequential import CompoundFactor
from recipe.dag.train.step import TrainingStep
from recipe.dag.types.row import Row
from tests.rows import build_row, merge_rows
from tests.train.steps import policies_of, policy_on, run_step

WORKFLOW = """\
dag_id: two
agents: [{name: left, policy: a}, {name: right, policy: b}]
policies: {a: {model: {path: m}}, b: {model: {path: m}}}
algorithm: {group_by: [uid, agent], scale: none, happo: {order: reverse_topological, ratio: sequence_sum}}
nodes:
  - {id: l, agent: left}
  - {id: r, agent: right, after: l}
  - {id: reward, reward: score.py:score, after: r}
"""


def row(policy: str, episode: int, reward: float, mask=(1, 0, 1)) -> Row:
    agent = {"a": "left", "b": "right"}[policy]
    return build_row(reward, episode=episode, agent=agent, node=agent[0], policy=policy, mask=mask)


@pytest.fixture
def workflow(tmp_path):
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    (tmp_path / "two.yaml").write_text(WORKFLOW)
    return load_workflow(tmp_path / "two.yaml")


@pytest.fixture
def run(monkeypatch, workflow):
    """Runs a step in which an update adds `moved[policy]` to the log-prob of every token of its rows."""

    def run(rows, moved, *, step=0, order="reverse_topological", shared_pool=False):
        events: list[tuple] = []

        def old_log_probs(policy, batch):
            events.append(("old", policy.name))
            batch.columns["old_log_probs"] = [torch.full((len(r.response_ids),), -2.0) for r in batch.rows]

        def update_actor(policy, batch, algorithm, *, seed):
            events.append(("update", policy.name, [v.clone() for v in batch.columns["advantages"]]))

        def log_probs(policy, batch):
            events.append(("new", policy.name))
            return [old + moved[policy.name] for old in batch.columns["old_log_probs"]]

        for kernel in (old_log_probs, update_actor, log_probs):
            monkeypatch.setattr(kernels, kernel.__name__, kernel)
        monkeypatch.setattr(kernels, "prepare", lambda *args: None)
        happo = workflow.algorithm.happo.model_copy(update={"order": order})
        flow = workflow.model_copy(update={"algorithm": workflow.algorithm.model_copy(update={"happo": happo})})
        return events, run_step(flow, rows, step=step, seed=3, shared_pool=shared_pool)

    return run


ROWS = [row("a", 0, 1.0), row("a", 1, 0.0), row("b", 0, 1.0), row("b", 1, 0.0)]


@pytest.mark.parametrize("shared_pool", [True, False])
def test_the_second_policys_advantages_are_weighed_by_the_first_ones_update(run, shared_pool):
    events, training = run(ROWS, {"b": 0.25}, shared_pool=shared_pool)
    assert {event[:2] for event in events[:2]} == {("old", "a"), ("old", "b")}
    assert [event[:2] for event in events[2:]] == [("update", "b"), ("new", "b"), ("update", "a")]
    first, second = events[2][2], events[4][2]
    assert [v.tolist() for v in first] == [[0.5, 0, 0.5], [-0.5, 0, -0.5]]
    # two sampled tokens per row: the factor of an episode is exp(2 * .25)
    factor = math.exp(0.5)
    assert [v.tolist() for v in second] == [pytest.approx([s * factor, 0, s * factor]) for s in (0.5, -0.5)]
    metrics = training.metrics()
    assert metrics["policy/b/happo_factor/max"] == 1.0
    assert metrics["policy/a/happo_factor/mean"] == pytest.approx(factor)


@pytest.mark.parametrize("happo", [True, False])
def test_behaviour_log_probs_have_one_hash_from_the_first_update_to_the_last(workflow, monkeypatch, happo):
    """Weights that an update moved can no longer say with which probability something was sampled."""
    weights, hashes = {"a": -1.0, "b": -2.0}, []

    def current(policy, batch):
        return [torch.full((len(r.response_ids),), weights[policy.name]) for r in batch.rows]

    def update_actor(policy, batch, algorithm, *, seed):
        known = [(*b.columns["old_log_probs"], *map(torch.tensor, (r.rollout_log_probs for r in b.rows)))
                 for b in step.batches.values()]  # fmt: skip
        hashes.append(hashlib.sha256(b"".join(x.numpy().tobytes() for parts in known for x in parts)).hexdigest())
        weights[policy.name] += 1.0

    monkeypatch.setattr(kernels, "old_log_probs", lambda p, b: b.columns.update(old_log_probs=current(p, b)))
    monkeypatch.setattr(kernels, "log_probs", current)
    monkeypatch.setattr(kernels, "update_actor", update_actor)
    monkeypatch.setattr(kernels, "prepare", lambda *args: None)
    algorithm = workflow.algorithm if happo else workflow.algorithm.model_copy(update={"happo": None})
    flow = workflow.model_copy(update={"algorithm": algorithm})
    step = TrainingStep(flow, policies_of("a", "b"), ROWS, step=0, seed=3)
    asyncio.run(step.run())
    assert len(hashes) == 2 and len(set(hashes)) == 1


def test_a_policy_that_did_not_move_changes_nothing(run):
    events, _ = run(ROWS, {"b": 0.0})
    updates = [event[2] for event in events if event[0] == "update"]
    assert all(torch.equal(one, other) for one, other in zip(*updates, strict=True))


def test_episodes_in_which_the_first_policy_said_nothing_keep_their_advantages(run):
    rows = [row("a", 0, 1.0), row("a", 1, 0.0), row("b", 1, 1.0), row("b", 2, 0.0)]
    events, _ = run(rows, {"b": 0.5})
    second = events[-1][2]
    assert second[0].tolist() == [0.5, 0, 0.5]
    assert second[1].tolist() == pytest.approx([-0.5 * math.e, 0, -0.5 * math.e])


def test_a_policy_without_rows_is_no_link_of_the_chain(run):
    events, _ = run(ROWS[:2], {})
    assert [event[:2] for event in events] == [("old", "a"), ("update", "a")]


def test_random_order_changes_from_step_to_step_and_repeats_after_a_resume(run):
    orders = [
        [event[1] for event in run(ROWS, {"a": 0.0, "b": 0.0}, step=step, order="random")[0] if event[0] == "update"]
        for step in [*range(8), *range(8)]
    ]
    assert orders[:8] == orders[8:] and {tuple(order) for order in orders} == {("a", "b"), ("b", "a")}


def two_turns(policy: str, episode: int, *, merged: bool) -> list[Row]:
    """A call of two tokens in turn 0 and one of one token in turn 1, as one row or as two."""
    agent = {"a": "left", "b": "right"}[policy]
    rows = [
        build_row(episode=episode, agent=agent, node=agent[0], policy=policy, turn=turn, mask=mask)
        for turn, mask in ((0, (1, 1)), (1, (0, 1) if merged else (1,)))
    ]
    return [merge_rows(rows)] if merged else rows


def factors(algorithm, *, merged: bool) -> list[float]:
    """By what policy b's tokens are weighed, turn by turn, after an update of policy a that doubled the probability of
    each token of its second turn."""
    factor = CompoundFactor(algorithm, ["a", "b"])
    first, second = (PolicyBatch(two_turns(name, 0, merged=merged)) for name in ("a", "b"))
    for batch in (first, second):
        batch.columns["advantages"] = [torch.ones(len(r.response_ids)) for r in batch.rows]
        batch.columns["old_log_probs"] = [torch.full((len(r.response_ids),), -3.0) for r in batch.rows]
    factor.weigh(first)
    moved = [-3.0, -3.0, math.nan, -3.0 + math.log(2)] if merged else [-3.0, -3.0, -3.0 + math.log(2)]
    factor.follow(first, torch.tensor(moved).split([len(r.response_ids) for r in first.rows]))
    factor.weigh(second)
    weighed = torch.cat(second.columns["advantages"]).tolist()
    return [weighed[0], weighed[-1]]


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"estimator": "grpo", "stat_unit": "call", "gamma_turn": 1.0},
        {"estimator": "grpo", "stat_unit": "call", "group_by": ["uid", "agent", "turn"]},
        {"estimator": "magrpo"},
        {"estimator": "gae_chain"},
        {"estimator": "mappo"},
        {"estimator": "vdn"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_advantages_of_a_turn_are_weighed_by_what_was_said_in_that_turn(options, merged):
    """Kuba et al.: the factor at time step t is made of ratios at t. An update moved turn 1 only."""
    algorithm = make_algorithm(**options, happo=Happo())
    assert factors(algorithm, merged=merged) == [1.0, pytest.approx(2.0)]


@pytest.mark.parametrize("merged", [True, False])
def test_a_return_that_all_turns_share_is_weighed_by_what_was_said_in_all_of_them(merged):
    algorithm = make_algorithm(estimator="grpo", stat_unit="trajectory", happo=Happo())
    assert factors(algorithm, merged=merged) == [pytest.approx(2.0), pytest.approx(2.0)]


@pytest.fixture
def nudged(engine):
    """verl's own worker, whose optimizer step moves every weight a little against its gradient; put back afterwards."""
    actor = engine.worker.actor.engine
    parameters = [p for p in actor.module.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in parameters]

    def step() -> float:
        with torch.no_grad():
            for p in parameters:
                p.sub_(0.05 * p.grad.sign())
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor, "optimizer_step", step)
        patch.setattr(actor, "lr_scheduler_step", lambda: 0.0)
        yield policy_on(engine.worker, engine.config, micro_batch=2)
    with torch.no_grad():
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old)


def test_log_probs_after_an_update_are_those_of_the_new_weights(engine, nudged):
    algorithm = engine.workflow.algorithm.model_copy(update={"kl_loss_coef": 0.0})
    rows = [row("a", 0, 1.0, mask=(1, 0, 1)), row("a", 1, 0.0, mask=(1, 1))]
    batch, fresh = kernels.PolicyBatch(rows), kernels.PolicyBatch(rows)
    kernels.prepare(nudged, batch, algorithm)
    kernels.old_log_probs(nudged, batch)
    kernels.reference_log_probs(nudged, batch)
    batch.columns["advantages"] = [torch.tensor([1.0, 0.0, 1.0]), torch.tensor([-1.0, -1.0])]
    kernels.update_actor(nudged, batch, algorithm, seed=0)
    after = kernels.log_probs(nudged, batch)
    kernels.prepare(nudged, fresh, algorithm)
    kernels.old_log_probs(nudged, fresh)
    for new, expected, old, one in zip(
        after, fresh.columns["old_log_probs"], batch.columns["old_log_probs"], rows, strict=True
    ):
        sampled = torch.tensor(one.response_mask).bool()
        torch.testing.assert_close(new[sampled], expected[sampled])
        assert (new - old)[sampled].abs().min() > 1e-4
