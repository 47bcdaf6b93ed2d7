"""Epochs and mini-batches of an update on verl's own engine: which rows share an optimizer step, and what divides."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

import pytest
import torch
from verl.utils import tensordict_utils as tu

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.train import kernels
from recipe.dag.train.kernels import PolicyBatch
from recipe.dag.types.row import Row
from recipe.dag.workflow.agent_schema import Critic
from tests.rows import build_row, merge_rows, with_calls

COUNT = 7
"""Rows; they do not divide by two or three."""


def some_rows() -> list[Row]:
    """Rows of different lengths; the first response token names the row."""
    draw, rows = torch.Generator().manual_seed(4), []
    for index in range(COUNT):
        size = 2 + int(torch.randint(0, 5, (1,), generator=draw))
        response = [10 + index, *torch.randint(30, 96, (size,), generator=draw).tolist()]
        mask = [1, *torch.randint(0, 2, (size,), generator=draw).tolist()]
        tokens = {"prompt": [2, 3], "response": response, "log_probs": [0.0] * len(mask)}
        rows.append(build_row(uid=f"u{index}", mask=mask, **tokens))
    return rows


@pytest.fixture
def policy(engine, monkeypatch):
    """The engine's worker as kernels see it, with two rows per micro-batch."""
    config = engine.config.copy()
    for part in (config.actor_rollout_ref.actor, config.critic):
        part.use_dynamic_bsz, part.ppo_micro_batch_size_per_gpu = False, 2
    for worker in (engine.worker.actor, engine.worker.critic):
        monkeypatch.setattr(worker.engine.engine_config, "use_dynamic_bsz", False, raising=False)
        monkeypatch.setattr(worker.engine.engine_config, "micro_batch_size_per_gpu", 2, raising=False)
    return SimpleNamespace(
        config=config, data_parallel_size=1, workers=engine.worker, tokenizer=SimpleNamespace(pad_token_id=0)
    )


@pytest.fixture
def steps(engine, monkeypatch):
    """What verl's workers do from now on: per optimizer step (rows by name, gradient, whether the schedule moves); the
    weights stay as they are."""
    done: list[tuple[list[int], torch.Tensor, bool]] = []
    for worker in (engine.worker.actor, engine.worker.critic):
        parameters = [p for p in worker.engine.module.parameters() if p.requires_grad]

        def train_batch(data, *, train=worker.train_batch):
            rows = zip(data["input_ids"].unbind(), data["response_mask"].unbind(), strict=True)
            responses = [ids[-len(mask)].item() - 10 for ids, mask in rows]
            moves = bool(tu.get(data, "update_lr_scheduler"))
            output = train(data)
            names = sorted(name for name in responses if name >= 0)
            done.append((names, GRADIENT.pop(), moves))
            return output

        def optimizer_step(parameters=parameters) -> float:
            GRADIENT.append(torch.cat([p.grad.full_tensor().flatten().clone() for p in parameters]))
            return 0.0

        monkeypatch.setattr(worker, "train_batch", train_batch)
        monkeypatch.setattr(worker.engine, "optimizer_step", optimizer_step)
        monkeypatch.setattr(worker.engine, "lr_scheduler_step", lambda: 0.0)
    return done


GRADIENT: list[torch.Tensor] = []
"""Of the step under way."""


def update(
    policy,
    kind: str,
    *,
    epochs: int,
    mini_batches: int,
    seed: int = 0,
    outside: Collection[int] = (),
    keep: bool = True,
) -> PolicyBatch:
    """`outside`: rows that the loss leaves out; without `keep` they are not there at all."""
    batch, draw = PolicyBatch(some_rows()), torch.Generator().manual_seed(6)
    for index in outside:
        batch.rows[index] = with_calls(batch.rows[index], learns=False)

    def noise() -> list[torch.Tensor]:
        return [torch.randn(len(row.response_ids), generator=draw) for row in batch.rows]

    columns = [noise(), noise(), noise()]
    if not keep:
        left = [index for index in range(COUNT) if index not in outside]
        batch.rows = [batch.rows[index] for index in left]
        columns = [[column[index] for index in left] for column in columns]
    if kind == "actor":
        algorithm = make_algorithm(epochs=epochs, mini_batches=mini_batches)
        kernels.prepare(policy, batch, algorithm)
        old, reference = ([value - 4.5 for value in column] for column in columns[1:])
        batch.columns |= {"advantages": columns[0], "old_log_probs": old, "ref_log_prob": reference}
        kernels.update_actor(policy, batch, algorithm, seed=seed)
    else:
        critic = Critic(epochs=epochs, mini_batches=mini_batches)
        kernels.prepare_critic(policy, batch, critic)
        batch.columns |= {"values": columns[0], "returns": columns[1]}
        kernels.update_critic(policy, batch, critic, seed=seed)
    return batch


@pytest.mark.parametrize("kind", ["actor", "critic"])
@pytest.mark.parametrize(("epochs", "mini_batches"), [(1, 1), (3, 1), (1, 3), (4, 2), (3, 3)])
def test_every_epoch_uses_every_row_once_in_as_many_steps_as_there_are_mini_batches(
    policy, steps, kind, epochs, mini_batches
):
    update(policy, kind, epochs=epochs, mini_batches=mini_batches)
    assert len(steps) == epochs * mini_batches
    for epoch in range(epochs):
        rows = [name for names, _, _ in steps[epoch * mini_batches : (epoch + 1) * mini_batches] for name in names]
        assert sorted(rows) == list(range(COUNT))
    assert [moves for _, _, moves in steps] == [False] * (len(steps) - 1) + [True]


@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_epochs_deal_the_rows_out_anew_from_the_seed_alone(policy, steps, kind):
    def mini_batches(seed: int) -> list[tuple[int, ...]]:
        steps.clear()
        update(policy, kind, epochs=4, mini_batches=2, seed=seed)
        return [tuple(names) for names, _, _ in steps]

    first = mini_batches(1)
    epochs = [frozenset(first[k : k + 2]) for k in range(0, 8, 2)]
    assert len(set(epochs)) >= 3
    assert mini_batches(1) == first
    other = mini_batches(2)
    assert other != first and other[:2] == first[:2]  # the first epoch's are those of the forward passes


@pytest.mark.parametrize("loss", ["seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_mean_of_the_mini_batches_gradients_is_the_whole_batchs(engine, policy, steps, monkeypatch, loss, epochs):
    """A sequence weighs the same in a mini-batch of four as in one of three: each is divided by rows / mini-batches."""
    monkeypatch.setitem(engine.worker.loss_fn.keywords["config"].__dict__, "loss_agg_mode", loss)
    update(policy, "actor", epochs=1, mini_batches=1)
    whole = steps.pop()[1]
    update(policy, "actor", epochs=epochs, mini_batches=2)
    assert {len(names) for names, _, _ in steps} == {3, 4}
    for epoch in range(epochs):
        mean = torch.stack([gradient for _, gradient, _ in steps[2 * epoch : 2 * epoch + 2]]).mean(0)
        assert (mean - whole).norm() < 1e-5 * whole.norm()
    assert whole.norm() > 1e-3


@pytest.mark.parametrize("loss", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize(("epochs", "mini_batches"), [(1, 1), (3, 2)])
def test_rows_outside_of_the_loss_leave_the_gradient_of_the_others(
    engine, policy, steps, monkeypatch, loss, epochs, mini_batches
):
    monkeypatch.setitem(engine.worker.loss_fn.keywords["config"].__dict__, "loss_agg_mode", loss)
    options = {"epochs": epochs, "mini_batches": mini_batches, "outside": (0, 3)}
    batch = update(policy, "actor", **options)
    assert batch.metrics["outside_loss"] == pytest.approx(2 / COUNT)
    masked = steps[:]
    steps.clear()
    update(policy, "actor", **options, keep=False)
    assert len(masked) == len(steps) == epochs * mini_batches
    for (names, gradient, _), (kept, expected, _) in zip(masked, steps, strict=True):
        assert names == kept and not {0, 3} & set(names)
        assert (gradient - expected).norm() < 1e-5 * expected.norm()


def test_nothing_is_updated_where_the_loss_leaves_out_every_row(policy, steps):
    batch = update(policy, "actor", epochs=2, mini_batches=1, outside=range(COUNT))
    assert steps == [] and batch.metrics == {"outside_loss": 1.0}


def test_critics_learn_from_rows_outside_of_the_loss(policy, steps):
    update(policy, "critic", epochs=1, mini_batches=1, outside=(0, 3))
    assert [names for names, _, _ in steps] == [list(range(COUNT))]


def test_a_call_outside_of_the_loss_leaves_the_gradient_of_its_rows_other_call(engine, policy, steps, monkeypatch):
    """Of two merged calls, the second alone: the same as a row whose prompt holds the first."""
    monkeypatch.setitem(engine.worker.loss_fn.keywords["config"].__dict__, "loss_agg_mode", "seq-mean-token-sum")
    first = build_row(prompt=[2, 3], response=[40, 41], mask=[1, 1], log_probs=[0.0] * 2, learns=False)
    second = build_row(turn=1, response=[42, 43, 44], mask=[0, 1, 1], log_probs=[0.0] * 3)
    merged = merge_rows([first, second])
    alone = build_row(prompt=[2, 3, 40, 41, 42], response=[43, 44], mask=[1, 1], log_probs=[0.0] * 2)
    algorithm = make_algorithm(loss_agg="seq-mean-token-sum")
    for row in (merged, alone):
        size = len(row.response_ids)
        columns = {name: [torch.full((size,), value)] for name, value in (("advantages", 1.0), ("old_log_probs", -4.5))}
        batch = PolicyBatch([row], columns=columns | {"ref_log_prob": columns["old_log_probs"]})
        kernels.prepare(policy, batch, algorithm)
        kernels.update_actor(policy, batch, algorithm, seed=0)
    (_, found, _), (_, expected, _) = steps
    assert (found - expected).norm() < 1e-5 * expected.norm() and expected.norm() > 1e-3
