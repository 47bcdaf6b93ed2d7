"""verl's value model on this package's engine: what it starts from, learns towards, and leaves alone."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from transformers import AutoModelForTokenClassification

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.policy.placement import Pool
from recipe.dag.train import kernels
from recipe.dag.train.critics import critic_batches, value_metrics
from recipe.dag.train.kernels import PolicyBatch
from recipe.dag.train.step import TrainingStep
from recipe.dag.types.row import Row
from recipe.dag.workflow.agent_schema import Critic
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.training_chain import derive_training_chain
from tests.rows import with_calls
from tests.train.rows import some_rows

CLIP = 0.2  # the engine fixture's critic


@pytest.fixture(scope="module")
def policy(engine) -> SimpleNamespace:
    """The engine's worker as the kernels meet a policy."""
    worker = engine.worker
    return SimpleNamespace(
        config=engine.config,
        data_parallel_size=1,
        workers=SimpleNamespace(compute_values=worker.compute_values, update_critic=worker.update_critic),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )


@pytest.fixture(scope="module")
def first_values(policy) -> list[torch.Tensor]:
    """Before any other test gives the head weights."""
    return values_of(policy)


@pytest.fixture
def plain(engine, tiny_model, first_values):
    """The same network in plain transformers, both with the same random head; afterwards the engine's is as before."""
    model = AutoModelForTokenClassification.from_pretrained(tiny_model, num_labels=1, attn_implementation="sdpa").eval()
    module = engine.worker.critic.engine.module
    before = {name: tensor.full_tensor().clone() for name, tensor in module.state_dict().items()}
    torch.manual_seed(5)
    torch.nn.init.normal_(model.score.weight, std=0.1)
    copy_into(module, model.state_dict())
    yield model
    copy_into(module, before)


def copy_into(module, state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.to_local().copy_(state[name])


def batch_of(policy, critic: Critic, rows=None) -> PolicyBatch:
    batch = PolicyBatch(rows if rows is not None else some_rows())
    kernels.prepare_critic(policy, batch, critic)
    return batch


def values_of(policy) -> list[torch.Tensor]:
    batch = batch_of(policy, Critic())
    kernels.values(policy, batch)
    return batch.columns["values"]


def plain_values(model, row: Row) -> torch.Tensor:
    """The value before each response token stands on the token before it."""
    logits = model(torch.tensor([row.prompt_ids + row.response_ids])).logits[0, :, 0]
    return logits[len(row.prompt_ids) - 1 : -1]


def test_a_new_critic_expects_nothing(first_values):
    assert [len(v) for v in first_values] == [len(row.response_ids) for row in some_rows()]
    assert not torch.cat(first_values).any()


def test_the_critic_needs_no_flash_attention(engine):
    config = engine.worker.critic.engine.module.config
    assert config._attn_implementation == "varlen"


def test_values_are_those_of_the_plain_model(policy, plain):
    with torch.no_grad():
        for found, row in zip(values_of(policy), some_rows(), strict=True):
            torch.testing.assert_close(found, plain_values(plain, row), atol=1e-5, rtol=0)


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_the_gradient_is_that_of_the_clipped_value_loss(policy, engine, plain, monkeypatch, mini_batches):
    rows, critic = some_rows(), Critic(cliprange_value=CLIP, mini_batches=mini_batches)
    batch, draw = batch_of(policy, critic, rows), torch.Generator().manual_seed(1)
    # values from before an update that has moved them: some are clipped, to either side
    with torch.no_grad():
        now = [plain_values(plain, row) for row in rows]
    noise = [0.4 * torch.randn(len(v), generator=draw) for v in now]
    batch.columns["values"] = [v + n for v, n in zip(now, noise, strict=True)]
    batch.columns["returns"] = [v + torch.randn(len(v), generator=draw) for v in now]

    module, seen = engine.worker.critic.engine.module, []

    def record() -> float:
        seen.append({name: p.grad.full_tensor().clone() for name, p in module.named_parameters()})
        return 0.0

    monkeypatch.setattr(engine.worker.critic.engine, "optimizer_step", record)
    kernels.update_critic(policy, batch, critic, seed=0)
    assert len(seen) == mini_batches and 0 < batch.metrics["clip_fraction"] < 1

    height, losses = len(batch.order) // mini_batches, []
    for step, found in enumerate(seen):
        plain.zero_grad()
        total, count = 0.0, 0
        for index in batch.order[step * height : (step + 1) * height]:
            mask = torch.tensor(rows[index].response_mask).bool()
            value, old = plain_values(plain, rows[index])[mask], batch.columns["values"][index][mask]
            target = batch.columns["returns"][index][mask]
            clipped = torch.maximum(torch.minimum(value, old + CLIP), old - CLIP)
            total = total + torch.maximum((value - target) ** 2, (clipped - target) ** 2).sum()
            count += int(mask.sum())
        loss = 0.5 * total / count
        loss.backward()
        losses.append(loss.item())
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(
                found[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert batch.metrics["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_an_update_moves_the_values_towards_the_returns_and_the_actor_not_at_all(policy, engine, plain):
    actor = engine.worker.actor.engine.module
    before = [p.full_tensor().clone() for p in actor.parameters()]
    critic = Critic(epochs=3)
    batch = batch_of(policy, critic)
    kernels.values(policy, batch)
    batch.columns["returns"] = [torch.full((len(v),), 5.0) for v in batch.columns["values"]]
    kernels.update_critic(policy, batch, critic, seed=0)
    after = torch.cat(values_of(policy)) - torch.cat(batch.columns["values"])
    assert after.mean() > 0 and batch.metrics["grad_norm"] > 0
    assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, actor.parameters(), strict=True))


def test_a_saved_critic_comes_back(policy, engine, plain, tmp_path):
    values = torch.cat(values_of(policy))
    engine.worker.save_critic(str(tmp_path), 1)
    copy_into(engine.worker.critic.engine.module, {n: p * 0 for n, p in plain.state_dict().items()})
    assert not torch.equal(torch.cat(values_of(policy)), values)
    engine.worker.load_critic(str(tmp_path))
    assert torch.equal(torch.cat(values_of(policy)), values)


def test_a_shared_critic_gets_all_rows_at_once_and_each_policy_its_values():
    policies = {
        "a": {"model": {"path": "m"}, "critic": {}},
        "b": {"model": {"path": "m"}, "critic": {"share": "a"}},
        "c": {"model": {"path": "m"}, "critic": {}},
        "d": {"model": {"path": "m"}},
    }
    flow = Workflow(path="w", dag_id="w", agents=[{"name": "x", "policy": "a"}], policies=policies, nodes=[])
    rows = some_rows()
    batches = {"a": PolicyBatch(rows[:2]), "b": PolicyBatch(rows[2:5]), "d": PolicyBatch(rows[5:])}
    critics = critic_batches(flow, batches)
    assert list(critics) == ["a"] and critics["a"].batch.rows == rows[:5]
    critics["a"].batch.columns["values"] = [torch.tensor([float(i)]) for i in range(5)]
    critics["a"].split_to_policies("values")
    assert [v.item() for v in batches["b"].columns["values"]] == [2, 3, 4] and "values" not in batches["d"].columns
    batches["a"].columns["returns"], batches["b"].columns["returns"] = [torch.zeros(1)] * 2, [torch.ones(1)] * 3
    critics["a"].concat("returns")
    assert [v.item() for v in critics["a"].batch.columns["returns"]] == [0, 0, 1, 1, 1]
    assert list(critic_batches(flow, {"b": batches["b"]})) == ["a"]  # the owner itself has no row in this step


def test_explained_variance():
    rows = some_rows(3)
    returns = [torch.arange(len(row.response_ids), dtype=torch.float32) for row in rows]
    batch = PolicyBatch(rows, columns={"values": returns, "returns": returns})
    assert value_metrics(batch)["critic/explained_variance"] == pytest.approx(1)
    batch.columns["values"] = [torch.full_like(r, 2.5) for r in returns]
    found = value_metrics(batch)
    assert found["critic/explained_variance"] == pytest.approx(0) and found["critic/value_mean"] == 2.5
    batch.columns["returns"] = batch.columns["values"]
    assert "critic/explained_variance" not in value_metrics(batch)


def test_an_actor_whose_turn_it_is_not_keeps_weights_optimizer_and_schedule_while_its_critic_learns(
    engine, policy, plain
):
    actor, critic = engine.worker.actor.engine, engine.worker.critic.engine
    mine = engine.workflow.policies["main"].model_copy(update={"train_cycle": 1, "reference": None})
    algorithm = make_algorithm(estimator="gae", lam=0.9)
    policies = {"main": mine, "other": mine}
    nodes = derive_training_chain(policies, [], algorithm)
    flow = engine.workflow.model_copy(update={"policies": policies, "algorithm": algorithm, "nodes": nodes})
    policy.pool, policy.processes = Pool(None, 1), None
    methods = ("compute_values", "update_critic", "compute_log_prob", "update_actor")
    policy.workers = SimpleNamespace(**{name: getattr(engine.worker, name) for name in methods})

    def state_of(it) -> bytes:
        parts = it.module.state_dict(), it.optimizer.state_dict(), it.lr_scheduler.state_dict()
        buffer = io.BytesIO()
        torch.save(tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, parts), buffer)
        return buffer.getvalue()

    rows = [with_calls(row, reward=float(index)) for index, row in enumerate(some_rows())]
    before = state_of(actor), state_of(critic)
    step = TrainingStep(flow, {"main": policy}, rows, step=1, seed=0)  # the other's turn
    asyncio.run(step.run())
    assert state_of(actor) == before[0] and state_of(critic) != before[1]
    assert step.metrics()["policy/main/critic/grad_norm"] > 0 and "policy/main/grad_norm" not in step.metrics()
