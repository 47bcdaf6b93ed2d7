from __future__ import annotations

import asyncio
import math
import threading
import time
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.core.errors import UserError
from recipe.dag.episode.rows import rows_of
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.policy.placement import Pool
from recipe.dag.report.starvation import Starvation
from recipe.dag.train import kernels
from recipe.dag.train.step import TrainingStep
from recipe.dag.train.trainer import Trainer
from recipe.dag.types.record import Call, Episode
from recipe.dag.types.row import Row
from recipe.dag.workflow.agent_schema import Reference
from recipe.dag.workflow.node import Kind
from recipe.dag.workflow.training_chain import derive_training_chain
from tests.rows import of_calls
from tests.train import steps
from tests.train.rows import row
from tests.train.steps import policies_of, run_step


@pytest.fixture
def workflow(two_policies):
    return two_policies


@pytest.fixture
def trace(monkeypatch):
    """The kernels replaced by a record of which policy ran when."""
    events: list[tuple[str, str]] = []

    def record(kind: str):
        def kernel(policy, batch, *args, **kwargs):
            events.append((kind, policy.name))

        return kernel

    for kind in ("old_log_probs", "update_actor", "prepare"):
        monkeypatch.setattr(kernels, kind, record(kind))
    return events


def test_a_step_runs_the_nodes_of_the_policies_that_have_rows(workflow, trace):
    step = run_step(workflow, [row(1, policy="b"), row(0, policy="b")], shared_pool=False)
    assert [event for event in trace if event[0] != "prepare"] == [("old_log_probs", "b"), ("update_actor", "b")]
    assert set(step.timing) == {"b.old_log_probs", "b.advantage", "b.update"}
    assert step.metrics()["policy/b/rows"] == 2


def test_no_policy_is_updated_before_all_old_log_probs_are_known(workflow, trace):
    run_step(workflow, [row(policy=p) for p in "abab"])
    kinds = [kind for kind, _ in trace if kind != "prepare"]
    assert kinds.count("update_actor") == kinds.count("old_log_probs") == 2
    assert kinds.index("update_actor") > max(i for i, kind in enumerate(kinds) if kind == "old_log_probs")


def test_a_policy_frees_its_cache_before_another_one_uses_its_devices(workflow, trace, monkeypatch):
    def processes_of(name):
        return SimpleNamespace(workers=SimpleNamespace(free_cache=lambda: trace.append(("free", name))))

    monkeypatch.setattr(steps, "processes_of", processes_of)
    run_step(workflow, [row(policy=p) for p in "abab"])
    events = [event for event in trace if event[0] != "prepare"]
    passes = [name for kind, name in events if kind != "free"]
    freed = [before for before, after in pairwise(passes) if before != after]
    assert freed and [name for kind, name in events if kind == "free"] == freed
    assert all(events[i + 1][1] != name for i, (kind, name) in enumerate(events) if kind == "free")


def test_a_step_without_rows_does_nothing(workflow, trace):
    step = TrainingStep(workflow, {}, [row(policy="fixed")], seed=0)
    asyncio.run(step.run())
    assert trace == [] and step.metrics() == {"train/rows": 0.0}


CHAINED = """\
dag_id: chained
agents: [{name: left, policy: a}, {name: right, policy: b}, {name: judge, policy: fixed}]
policies:
  a: {model: {path: m}, critic: {}, train_cycle: 1}
  b: {model: {path: m}, critic: {share: a}, train_cycle: 1}
  fixed: {model: {path: m}, frozen: true}
algorithm: {estimator: gae_chain, lam: 0.5, whiten: false, old_log_probs: trainer}
nodes:
  - {id: l, agent: left}
  - {id: r, agent: right, after: l}
  - {id: j, agent: judge, after: r}
  - {id: reward, reward: score.py:score, after: j}
"""


@pytest.fixture
def chained(tmp_path):
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    (tmp_path / "chained.yaml").write_text(CHAINED)
    return load_workflow(tmp_path / "chained.yaml")


@pytest.fixture
def critics(monkeypatch, trace):
    """`trace` with critics, too: each row is worth what its policy's place in the alphabet says."""

    def values(policy, batch):
        trace.append(("values", policy.name))
        batch.columns["values"] = [
            torch.full((len(r.response_ids),), {"a": 0.25, "b": 0.5}[r.policy]) for r in batch.rows
        ]

    def update_critic(policy, batch, critic, *, seed):
        trace.append(("update_critic", policy.name))
        assert len(batch.columns["returns"]) == len(batch.columns["values"]) == len(batch.rows)

    monkeypatch.setattr(kernels, "values", values)
    monkeypatch.setattr(kernels, "update_critic", update_critic)
    monkeypatch.setattr(kernels, "prepare_critic", lambda *args: None)
    return trace


def chain_rows(rewards=(0.0, 0.0, 1.0)) -> list[Row]:
    calls = enumerate(zip(rewards, ("a", "b", "fixed"), strict=True))
    return [row(reward, policy=policy, mask=(1,), position=position) for position, (reward, policy) in calls]


def test_a_shared_critic_is_asked_and_updated_once_and_actors_take_turns(chained, critics):
    for number, turn in enumerate("ab"):
        run_step(chained, chain_rows(), step=number)
        assert [e for e in critics if e[0] != "prepare"] == [
            ("old_log_probs", turn),
            ("values", "a"),
            ("update_critic", "a"),
            ("update_actor", turn),
        ]
        critics.clear()


def test_chained_credit_goes_through_all_policies_and_past_frozen_ones(chained, critics):
    step = run_step(chained, chain_rows())
    # the judge's reward stands on b's token, the last one that is trained
    last = 1.0 - 0.5
    assert step.batches["b"].columns["advantages"][0].tolist() == [last]
    assert step.batches["a"].columns["advantages"][0].tolist() == [0.5 - 0.25 + 0.5 * last]
    metrics = step.metrics()
    assert metrics["policy/a/critic/value_mean"] == 0.25 and metrics["policy/b/critic/value_mean"] == 0.5


def test_a_joint_advantage_is_shown_as_that_of_all_policies(chained, critics):
    shown = []

    class Passes:
        def show(self, label, tokens, *, kind):
            shown.append((label, kind))
            return nullcontext()

    run_step(chained, chain_rows(), passes=Passes())
    assert ("step 1: advantage of a, b", "advantage of a, b") in shown
    assert ("step 1: update of a", "update of a") in shown


def test_what_a_policy_was_unsure_of_weighs_less_within_its_sample_and_agent(workflow, trace):
    flow = workflow.model_copy(
        update={"algorithm": make_algorithm(estimator="reinforce", uncertainty={"alpha": 0.5, "bound": 2.0})}
    )
    masks = (1,), (1, 1), (1, 1, 1)
    rows = [row(1.0, episode=episode, mask=mask) for episode, mask in enumerate(masks)]  # mean log-probs -1, -1.5, -2
    alone = row(1.0, uid="other", mask=(1, 1, 1))
    step = run_step(flow, [*rows, alone])
    found = [one[0].item() for one in step.batches["a"].columns["advantages"]]
    assert found == pytest.approx([math.exp(0.5), 1.0, math.exp(-0.5), 1.0])
    assert step.batches["a"].columns["returns"][0].tolist() == [1.0]
    metrics = step.metrics()
    assert metrics["policy/a/uncertainty_weight/max"] == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize(
    ("loss_agg", "share"), [("token-mean", 0.95), ("seq-mean-token-sum", 0.95), ("seq-mean-token-mean", 0.5)]
)
def test_agents_of_one_policy_may_have_equal_parts_in_its_loss(workflow, trace, loss_agg, share):
    """The reference is the sum over each agent's own rows, each as `loss_agg` counts it, and then over agents."""
    calls = [("long", 2.0, (1,) * 19), ("long", 5.0, (1,) * 19), ("short", 3.0, (1, 0)), ("short", 7.0, (1,))]
    rows = [row(r, episode=e, mask=mask, agent=agent) for e, (agent, r, mask) in enumerate(calls)]
    rows += [row(9.0, episode=9, mask=(1, 1), agent="short", learns=False)]
    of_call = (lambda r: 1.0) if loss_agg == "seq-mean-token-mean" else (lambda r: float(sum(r.response_mask)))
    advantages, lines = {}, {}
    for kind in ("loss_agg", "equal"):
        algorithm = make_algorithm(estimator="reinforce", loss_agg=loss_agg, agent_weights=kind)
        step = TrainingStep(workflow.model_copy(update={"algorithm": algorithm}), policies_of("a", "b"), rows, seed=0)
        asyncio.run(step.run())
        advantages[kind] = [one[0].item() for one in step.batches["a"].columns["advantages"]]
        metrics, starvation = step.metrics(), Starvation(workflow)
        lines[kind] = [[*starvation.lines({}, step.dominant_agents())] for _ in range(2)]
        expected = share if kind == "loss_agg" else 0.5
        assert metrics["agent/long/grad_tokens_share"] == pytest.approx(expected)
        assert metrics["agent/short/grad_tokens_share"] == pytest.approx(1 - expected)
    assert advantages["loss_agg"] == [2.0, 5.0, 3.0, 7.0, 9.0]
    weights = [of_call(r) * r.learns for r in rows]
    total, reference = sum(weights), 0.0
    for agent in ("long", "short"):
        own = [(w, r.calls[0].reward) for w, r in zip(weights, rows, strict=True) if r.calls[0].agent == agent]
        reference += total / 2 * sum(w * reward for w, reward in own) / sum(w for w, _ in own)
    assert sum(w * a for w, a in zip(weights, advantages["equal"], strict=True)) == pytest.approx(reference)
    assert lines["equal"] == [[], []] and lines["loss_agg"][1] == []
    assert ["agent long has 95% of the loss of policy a" in line for line in lines["loss_agg"][0]] == [True] * (
        share > 0.9
    )


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_pp_baseline"])
def test_rows_that_are_left_out_change_nothing_for_those_that_are_kept(workflow, trace, estimator):
    """Their zeros would count in what divides the others."""
    kept = [row(float(episode == 1), uid="mixed", episode=episode) for episode in range(2)]
    dropped = [row(1.0, uid=f"same{group}", episode=episode) for group in range(9) for episode in range(2)]
    options = {"estimator": estimator, "drop_zero_variance": True}
    flow = workflow.model_copy(update={"algorithm": make_algorithm(**options)})
    found = []
    for rows in (kept, kept + dropped):
        step = run_step(flow, rows)
        found.append(torch.stack(step.batches["a"].columns["advantages"]))
    assert found[0].any() and torch.equal(*found)


def test_only_critics_learn_during_their_warm_up(chained, critics):
    flow = chained.model_copy(update={"algorithm": chained.algorithm.model_copy(update={"critic_warmup": 1})})
    run_step(flow, chain_rows(), step=0)
    assert [kind for kind, _ in critics if kind != "prepare"] == ["values", "update_critic"]


def test_missing_values_are_reported_with_the_policys_name(chained, critics):
    flow = chained.model_copy(update={"nodes": tuple(n for n in chained.nodes if n.id != "a.values")})
    with pytest.raises(UserError, match="gae_chain needs a critic: policies.a has none, or no CRITIC node"):
        run_step(flow, chain_rows())


def test_the_kl_to_the_reference_is_taken_from_the_rewards(workflow, monkeypatch, trace):
    policies = {name: spec.model_copy(update={"reference": Reference()}) for name, spec in workflow.policies.items()}
    algorithm = make_algorithm(estimator="reinforce", kl_reward_coef=0.5)
    base = [node for node in workflow.nodes if "." not in node.id]
    nodes = derive_training_chain(policies, base, algorithm)
    flow = workflow.model_copy(update={"policies": policies, "algorithm": algorithm, "nodes": (*base, *nodes)})

    def put(column, value):
        return lambda policy, batch: batch.columns.update({column: [torch.tensor(value)] * len(batch.rows)})

    monkeypatch.setattr(kernels, "old_log_probs", put("old_log_probs", [-1.0, 9.0, -2.0]))
    monkeypatch.setattr(kernels, "reference_log_probs", put("ref_log_prob", [-3.0, 0.0, -2.5]))
    step = run_step(flow, [row(1.0)])
    assert step.batches["a"].columns["advantages"][0].tolist() == [1 - 0.5 * 2 - 0.5 * 0.5, 0, 1 - 0.5 * 0.5]


def test_reinforce_pp_learns_from_one_episode_per_sample_with_the_kl_in_its_rewards(workflow, monkeypatch, trace):
    """C14: the return of a token is what it and the later ones earn, KL included; it is normalised once, over all
    sampled tokens of the policy, before rows are laid out over ranks."""
    policies = {name: spec.model_copy(update={"reference": Reference()}) for name, spec in workflow.policies.items()}
    algorithm = make_algorithm(estimator="reinforce_pp", kl_reward_coef=0.1)
    base = [node for node in workflow.nodes if "." not in node.id]
    nodes = derive_training_chain(policies, base, algorithm)
    flow = workflow.model_copy(update={"policies": policies, "algorithm": algorithm, "nodes": (*base, *nodes)})
    masks = [(1, 0, 1), (1,), (1, 1, 0, 1, 1)]
    rewards = [1.0, 0.0, 0.5]
    rows = [row(r, uid=f"u{k}", mask=mask) for k, (r, mask) in enumerate(zip(rewards, masks, strict=True))]

    def put(column: str, scale: float):
        def kernel(policy, batch):
            batch.columns[column] = [scale * torch.arange(1.0, 1 + len(r.response_mask)) for r in batch.rows]

        return kernel

    monkeypatch.setattr(kernels, "old_log_probs", put("old_log_probs", -1.0))
    monkeypatch.setattr(kernels, "reference_log_probs", put("ref_log_prob", -1.5))
    step = run_step(flow, rows)

    returns = []  # of the sampled tokens, from the formula
    for reward, mask in zip(rewards, masks, strict=True):
        sampled = [at for at, bit in enumerate(mask) if bit]
        kl = {at: 0.1 * 0.5 * (at + 1) for at in sampled}
        returns += [reward - sum(kl[later] for later in sampled if later >= at) for at in sampled]
    mean = sum(returns) / len(returns)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in returns) / (len(returns) - 1))
    batch = step.batches["a"]
    found = torch.cat(batch.columns["advantages"])[
        torch.cat([torch.tensor(r.response_mask) for r in batch.rows]).bool()
    ]
    assert found.tolist() == pytest.approx([(value - mean) / deviation for value in returns], abs=1e-4)


def test_log_probs_are_computed_in_the_turns_of_others_only_where_the_rewards_need_them(chained, critics, monkeypatch):
    def put(kind: str, column: str):
        def kernel(policy, batch):
            critics.append((kind, policy.name))
            batch.columns[column] = [torch.zeros(len(row.response_ids)) for row in batch.rows]

        return kernel

    monkeypatch.setattr(kernels, "old_log_probs", put("old_log_probs", "old_log_probs"))
    monkeypatch.setattr(kernels, "reference_log_probs", put("reference", "ref_log_prob"))
    base = [node for node in chained.nodes if "." not in node.id]
    policies = {
        name: spec.model_copy(update={"reference": None if spec.frozen else Reference()})
        for name, spec in chained.policies.items()
    }
    for weight, who in ((0.0, "a"), (0.5, "ab")):
        algorithm = chained.algorithm.model_copy(update={"kl_reward_coef": weight})
        nodes = derive_training_chain(policies, base, algorithm)
        flow = chained.model_copy(update={"policies": policies, "algorithm": algorithm, "nodes": (*base, *nodes)})
        run_step(flow, chain_rows(), step=0)
        for kind in ("old_log_probs", "reference"):
            assert sorted(name for seen, name in critics if seen == kind) == list(who)
        critics.clear()


def test_a_missing_reference_is_reported_with_the_policys_name(workflow, trace):
    flow = workflow.model_copy(update={"algorithm": make_algorithm(kl_reward_coef=0.5)})
    with pytest.raises(UserError, match="kl_reward_coef: policies.a needs `reference: true`"):
        run_step(flow, [row(1.0)])


@pytest.mark.parametrize("kernel", ["old_log_probs", "update_actor"])
def test_policies_of_different_pools_work_at_the_same_time(workflow, trace, monkeypatch, kernel):
    together = threading.Barrier(2)  # passes only if both run at the same time
    monkeypatch.setattr(kernels, kernel, lambda *args, **kwargs: together.wait(timeout=30))
    run_step(workflow, [row(policy=p) for p in "ab"], shared_pool=False)
    assert not together.broken


def test_policies_of_one_pool_work_in_turn(workflow, trace, monkeypatch):
    inside, most = [], []

    def kernel(policy, batch, *args, **kwargs):
        inside.append(policy.name)
        most.append(len(inside))
        time.sleep(0.01)
        inside.remove(policy.name)

    for kind in ("old_log_probs", "update_actor"):
        monkeypatch.setattr(kernels, kind, kernel)
    run_step(workflow, [row(policy=p) for p in "ab"])
    assert most == [1] * 4


def test_batches_are_built_while_another_policy_has_the_pool(workflow, trace, monkeypatch):
    prepared = {name: threading.Event() for name in "ab"}
    other = {"a": "b", "b": "a"}

    def prepare(policy, batch, algorithm):
        batch.data = object()
        prepared[policy.name].set()

    def kernel(policy, batch, *args, **kwargs):
        assert prepared[other[policy.name]].wait(30)

    monkeypatch.setattr(kernels, "prepare", prepare)
    monkeypatch.setattr(kernels, "old_log_probs", kernel)
    run_step(workflow, [row(policy=p) for p in "ab"])


def test_a_batch_is_built_once_for_nodes_that_run_at_the_same_time(workflow, trace, monkeypatch):
    built = []

    def prepare(policy, batch, algorithm):
        time.sleep(0.01)
        built.append(policy.name)
        batch.data = object()

    monkeypatch.setattr(kernels, "prepare", prepare)

    async def main() -> None:
        step = TrainingStep(workflow, policies_of("a"), [row(policy="a")], seed=0)
        nodes = [node for node in workflow.training_nodes if node.kind is Kind.UPDATE]
        await asyncio.gather(*(step._execute(node) for node in nodes if step._policy_of(node) == "a"))

    asyncio.run(main())
    assert built == ["a"]


def test_weights_of_different_pools_are_synced_at_the_same_time_and_of_one_pool_in_turn():
    async def main() -> list[str]:
        together, order = asyncio.Barrier(2), []

        def policy(name: str, pool: object) -> SimpleNamespace:
            async def sync_weights(version: int) -> None:
                order.append(f"{name} begins")
                if name != "c":
                    await asyncio.wait_for(together.wait(), 30)
                order.append(f"{name} ends")

            workers = SimpleNamespace(free_cache=lambda: order.append(f"{name} frees"))
            made = SimpleNamespace(pool=pool, sync_weights=sync_weights, workers=workers)
            made.processes = made
            return made

        shared, single = Pool(None, 2), Pool(None, 1)
        trained = [policy("a", shared), policy("b", single), policy("c", shared)]
        await Trainer._sync_weights(SimpleNamespace(snapshots=[], trained=trained), 1)
        return order

    order = asyncio.run(main())
    assert order.index("a ends") < order.index("a frees") < order.index("c begins")


def test_adapters_of_one_base_are_synced_at_the_same_time():
    async def main() -> int:
        together, pool, host = asyncio.Barrier(2), Pool(None, 1), object()

        async def sync_weights(version: int) -> None:
            await asyncio.wait_for(together.wait(), 30)

        adapter = SimpleNamespace(pool=pool, processes=host, sync_weights=sync_weights)
        await Trainer._sync_weights(SimpleNamespace(snapshots=[], trained=[adapter, adapter]), 1)
        return together.n_waiting

    assert asyncio.run(main()) == 0


def test_each_call_of_an_episode_gets_the_mean_advantage_of_its_sampled_tokens(workflow, trace):
    def call(reward: float, response: list[int], mask: list[int], *, prompt=(3,), policy="a", train=True) -> Call:
        tokens = {"prompt_ids": list(prompt), "response_ids": response, "response_mask": mask}
        return Call(
            "l", "left", 0, policy, 0, **tokens, rollout_log_probs=[-1.0] * len(mask), reward=reward, train=train
        )

    # the second call goes on where the first one ended, so both are in one row
    first, second = call(1.0, [5, 6, 7], [1, 0, 1]), call(3.0, [9], [1], prompt=(3, 5, 6, 7, 8))
    left_out, frozen = call(9.0, [5], [1], train=False), call(9.0, [5], [1], policy="fixed")
    episode = Episode("u", 0, {}, calls=[left_out, first, frozen, second])
    rows = rows_of([episode])
    assert [of_calls(row, "position") for row in rows if row.policy == "a"] == [(1, 3)]
    flow = workflow.model_copy(update={"algorithm": make_algorithm(estimator="reinforce", gamma=0.5)})
    run_step(flow, rows, episodes=[episode])
    (row,) = (row for row in rows if row.policy == "a")
    step = run_step(flow, rows)
    values = step.batches["a"].columns["advantages"][0]
    assert len(set(values[[0, 2]].tolist())) == 2, "the first call's tokens differ, or a mean could not be told apart"
    assert first.advantage == pytest.approx((values[0] + values[2]).item() / 2)
    assert second.advantage == values[4].item() and len(row.response_ids) == 5
    assert left_out.advantage is None and frozen.advantage is None
    step.batches["a"].columns |= {"entropy": [torch.arange(5) / 8], "old_log_probs": [torch.full((5,), -0.25)]}
    step.record_tokens([episode])
    assert first.token_columns["entropy"] == [0.0, 0.125, 0.25] and second.token_columns["entropy"] == [0.5]
    assert second.token_columns["trainer_log_prob"] == [-0.25] and left_out.token_columns == {}
    assert second.token_columns["advantage"] == [round(values[4].item(), 6)]
