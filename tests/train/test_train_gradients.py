"""How rows are laid out, merged and cut into micro-batches changes no gradient: the step runs on verl's own engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from recipe.dag.algorithms.blocks import Uncertainty
from recipe.dag.episode.rows import rows_of
from recipe.dag.policy.losses import actor_loss
from recipe.dag.train.metrics import token_metrics
from recipe.dag.train.packing import PAD
from recipe.dag.train.step import TrainingStep
from recipe.dag.types.record import Call, Episode
from tests.train.steps import policy_on

TOLERANCE = 1e-5
LOSSES = ("token-mean", "seq-mean-token-sum")
TOOL = 5
"""The id of tokens that a tool put in."""


ALONE = (("solver", None), ("solver", 0), ("solver", 1))
"""The agent of each call, and the call that it continues."""
SHARED = (("plan", None), ("left", 0), ("right", 0), ("end", 2))
"""With a fork."""


def episodes(*, temperature: float = 1.0, plan=ALONE) -> list[Episode]:
    """Two groups of two conversations of these calls, each going on from one before, with a tool's tokens."""
    draw = torch.Generator().manual_seed(7)

    def some(low: int, high: int) -> list[int]:
        count = int(torch.randint(low, high, (1,), generator=draw))
        return torch.randint(2, 96, (count,), generator=draw).tolist()

    made = []
    for index in range(4):
        episode = Episode(uid=f"u{index // 2}", index=index % 2, sample={}, turns=3, done=True)
        histories = {None: some(3, 8)}
        for turn, (agent, continued) in enumerate(plan):
            history = histories[continued]
            first, tool, last = some(2, 7), [TOOL] * len(some(1, 5)), some(2, 6)
            response = first + tool + last
            mask = [1] * len(first) + [0] * len(tool) + [1] * len(last)
            noise = torch.randn(len(response), generator=draw).tolist()
            log_probs = [x - 6.0 if bit else 0.0 for x, bit in zip(noise, mask, strict=True)]
            call = Call("solve", agent, 0, "main", turn, list(history), response, mask, log_probs)
            call.temperature = temperature
            call.reward = float(torch.randn(1, generator=draw))
            episode.calls.append(call)
            histories[turn] = history + response + some(1, 6)  # what the next speaker said
        made.append(episode)
    return made


@pytest.fixture(scope="module")
def gradient(engine):
    """Rows -> the gradient of one training step, flat, before clipping; the weights stay as they are."""
    worker, actor = engine.worker, engine.worker.actor
    with torch.no_grad():  # else the KL to the reference has no gradient
        for parameter in worker.ref.engine.module.parameters():
            parameter.mul_(1.05)
    loss_config = engine.worker.loss_fn.keywords["config"]
    parameters = [p for p in actor.engine.module.parameters() if p.requires_grad]
    seen: dict[str, torch.Tensor] = {}

    def record() -> float:
        seen["gradient"] = torch.cat([p.grad.full_tensor().flatten().clone() for p in parameters])
        return float(seen["gradient"].norm())

    def compute(rows, *, loss="token-mean", old="trainer", micro_batch=1, dynamic=None, **options) -> SimpleNamespace:
        """`micro_batch`: rows per micro-batch; `dynamic`: tokens per micro-batch; `options`: of the algorithm."""
        update = {"loss_agg": loss, "old_log_probs": old, **options}
        algorithm = engine.workflow.algorithm.model_copy(update=update)
        nodes = [n for n in engine.workflow.nodes if old == "trainer" or n.id != "main.old_log_probs"]
        workflow = engine.workflow.model_copy(update={"algorithm": algorithm, "nodes": tuple(nodes)})
        policy = policy_on(worker, engine.config, micro_batch=micro_batch, dynamic=dynamic)
        object.__setattr__(loss_config, "loss_agg_mode", loss)
        step = TrainingStep(workflow, {"main": policy}, rows, seed=0)
        asyncio.run(step.run())
        batch = step.batches["main"]
        return SimpleNamespace(
            value=seen.pop("gradient"), order=batch.order, columns=batch.columns, metrics=batch.metrics
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor.engine, "optimizer_step", record)
        patch.setattr(actor.engine, "lr_scheduler_step", lambda: 0.0)
        assert actor.loss_fn.func is actor_loss
        yield compute


def distance(a: SimpleNamespace, b: SimpleNamespace) -> float:
    return float((a.value - b.value).norm() / b.value.norm())


@pytest.fixture(scope="module")
def alone(gradient):
    """What everything else is compared with: one row per call, one row per micro-batch, no padding."""
    found = {}
    for loss in LOSSES:
        for old in ("trainer", "rollout"):
            found[loss, old] = gradient(rows_of(episodes(), merge=False), loss=loss, old=old)
            assert len(found[loss, old].order) == 12 and PAD not in found[loss, old].order
    return found


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("old", ["trainer", "rollout"])
def test_merged_rows_give_the_gradient_of_separate_ones(gradient, alone, loss, old):
    rows = rows_of(episodes())
    assert [len(row.calls) for row in rows] == [3, 3, 3, 3]
    merged = gradient(rows, loss=loss, old=old, micro_batch=2)
    assert distance(merged, alone[loss, old]) < TOLERANCE
    if old == "rollout":  # a case that says something about clipping
        assert 0.05 < merged.metrics["pg_clipfrac"] < 0.95


@pytest.mark.parametrize(
    ("loss", "options", "calls"),
    [
        ("token-mean", {}, 16),
        ("seq-mean-token-sum", {}, 16),
        ("token-mean", {"agent_weights": "equal"}, 16),
        ("token-mean", {"uncertainty": Uncertainty.model_validate({})}, 16),
        ("seq-mean-token-sum", {"drop_zero_variance": True}, 12),
        ("token-mean", {"drop_zero_variance": True}, 12),
    ],
    ids=str,
)
def test_rows_of_several_agents_give_the_gradient_of_a_row_per_call(gradient, loss, options, calls):
    """... each call with its own advantage and weight; of rows with a call that is left out, too, at the end of a row
    (`left` in the first group) and within one (`right` in the second)."""
    made = episodes(plan=SHARED)
    for episode in made:
        episode.calls[1 if episode.uid == "u0" else 2].reward = 0.5
    merged, separate = rows_of(made), rows_of(made, merge=False)
    assert [row.agents for row in merged] == [["plan", "left"], ["right", "end"]] * 4 and len(separate) == 16
    found = [gradient(rows, loss=loss, micro_batch=2, **options) for rows in (merged, separate)]
    assert distance(*found) < TOLERANCE
    assert len(found[1].order) == calls


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("merge", [True, False])
def test_padding_rows_change_no_gradient(gradient, alone, loss, merge):
    padded = gradient(rows_of(episodes(), merge=merge), loss=loss, micro_batch=7)
    assert padded.order.count(PAD) == (3 if merge else 2)
    assert distance(padded, alone[loss, "trainer"]) < TOLERANCE


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "sizes", [{"micro_batch": 3}, {"micro_batch": 12}, {"dynamic": 70}, {"dynamic": 4096}], ids=str
)
def test_order_and_micro_batches_change_no_gradient(gradient, alone, loss, sizes):
    rows = rows_of(episodes(), merge=False)
    shuffled = [rows[i] for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))]
    assert distance(gradient(shuffled, loss=loss, **sizes), alone[loss, "trainer"]) < TOLERANCE


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_first_update_needs_no_pass_over_the_old_weights(gradient, loss, temperature):
    """... and reports what that pass would have."""
    rows = rows_of(episodes(temperature=temperature))
    with_pass, without = (gradient(rows, loss=loss, old=old, micro_batch=2) for old in ("trainer", "auto"))
    assert "old_log_probs" not in without.columns and "entropy" not in without.columns
    assert distance(without, with_pass) < TOLERANCE
    told = token_metrics(rows, with_pass.columns)
    for name in ("entropy", "logprob_diff/mean", "logprob_diff/max", "logprob_pearson", "server_kl"):
        assert without.metrics[name] == pytest.approx(told[name], rel=1e-4), name
    assert not [name for name in without.metrics if "sum" in name]


def test_merged_rows_get_the_log_probs_and_advantages_of_their_calls(gradient, alone):
    separate = alone["token-mean", "trainer"].columns
    rows = rows_of(episodes())
    merged = gradient(rows, micro_batch=4).columns
    for name in ("old_log_probs", "ref_log_prob", "advantages"):
        masks = [torch.tensor(row.response_mask).bool() for row in rows_of(episodes(), merge=False)]
        expected = torch.cat([value[mask] for value, mask in zip(separate[name], masks, strict=True)])
        masks = [torch.tensor(row.response_mask).bool() for row in rows]
        found = torch.cat([value[mask] for value, mask in zip(merged[name], masks, strict=True)])
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
        assert found.std() > 0.1


def test_a_temperature_scales_the_log_probs_merged_or_not(gradient, alone):
    separate = gradient(rows_of(episodes(temperature=0.7), merge=False))
    merged = gradient(rows_of(episodes(temperature=0.7)), micro_batch=3)
    assert distance(merged, separate) < TOLERANCE
    assert distance(separate, alone["token-mean", "trainer"]) > 0.01


def test_the_comparison_sees_a_wrong_mask(gradient, alone):
    rows = [replace(row, response_mask=[1] * len(row.response_mask)) for row in rows_of(episodes())]
    assert distance(gradient(rows, micro_batch=2), alone["token-mean", "trainer"]) > 0.01


def test_the_comparison_sees_a_trajectorys_reward_changed(gradient, alone):
    rows = rows_of(episodes())
    for index, row in enumerate(rows):
        first, *others = row.calls
        row.calls = (replace(first, reward=first.reward + index), *others)
    assert distance(gradient(rows, micro_batch=2), alone["token-mean", "trainer"]) > 0.01


def test_the_comparison_sees_a_history_left_out(gradient, alone):
    rows = [replace(row, prompt_ids=row.prompt_ids[-2:]) for row in rows_of(episodes(), merge=False)]
    assert distance(gradient(rows, micro_batch=2), alone["token-mean", "trainer"]) > 0.01
