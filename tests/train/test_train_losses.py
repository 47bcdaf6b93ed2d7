"""The policy losses' gradients on verl's engine, against the formulas in plain torch."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.train import kernels
from recipe.dag.train.kernels import PolicyBatch
from recipe.dag.types.row import Row
from tests.train.rows import some_rows

LOW, HIGH, DUAL, DRIFT, KL, ENTROPY = 0.2, 0.3, 1.5, 0.4, 0.25, 0.125


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return some_rows(8)


@pytest.fixture
def plain(tiny_model, engine):
    """The actor's network in plain transformers, with the actor's weights."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="sdpa").eval()
    state = engine.worker.actor.engine.module.state_dict()
    model.load_state_dict({name: tensor.full_tensor() for name, tensor in state.items()})
    return model


def logits_of(model, row: Row) -> torch.Tensor:
    ids = torch.tensor([row.prompt_ids + row.response_ids])
    return model(ids).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)


def log_probs_of(model, row: Row) -> torch.Tensor:
    return logits_of(model, row).gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]


@pytest.fixture
def columns(rows, plain) -> dict[str, list[torch.Tensor]]:
    """Old log-probs so far from the present ones, to both sides, that every clip has something to do."""
    draw = torch.Generator().manual_seed(1)

    def noise(row, scale):
        return scale * torch.randn(len(row.response_ids), generator=draw)

    with torch.no_grad():
        now = [log_probs_of(plain, row) for row in rows]
    return {
        "old_log_probs": [value + noise(row, 0.6) for value, row in zip(now, rows, strict=True)],
        "ref_log_prob": [value + noise(row, 0.3) for value, row in zip(now, rows, strict=True)],
        "advantages": [noise(row, 1.0) for row in rows],
    }


def vanilla(log_ratio, advantage):
    ratio = log_ratio.exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
    return torch.where(advantage < 0, torch.minimum(loss, -DUAL * advantage), loss)


def gspo(log_ratio, advantage):
    """A call's geometric mean ratio; every token gets the gradient of its own log-prob."""
    ratio = log_ratio.mean().exp().detach() * (log_ratio - log_ratio.detach()).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)


def cpgd(log_ratio, advantage):
    surrogate = torch.minimum(log_ratio * advantage, log_ratio.clamp(math.log(1 - LOW), math.log(1 + HIGH)) * advantage)
    weight = (log_ratio.exp() - 1).clamp(max=1.0).detach()
    return -surrogate + DRIFT * weight * log_ratio


FORMULAS = {"vanilla": vanilla, "gspo": gspo, "cpgd": cpgd}


def reference(
    model, rows, columns, loss: str, *, kl: bool, entropy: bool, importance: bool
) -> tuple[torch.Tensor, float]:
    """(gradient, fraction of tokens that it leaves alone) of the loss over all rows as one mini-batch."""
    total, count, still = 0.0, 0, 0
    for index, row in enumerate(rows):
        mask = torch.tensor(row.response_mask).bool()
        distribution = logits_of(model, row)
        log_prob = distribution.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0][mask]
        old, ref, advantage = (columns[key][index][mask] for key in ("old_log_probs", "ref_log_prob", "advantages"))
        losses = FORMULAS[loss](log_prob - old, advantage)
        still += int((torch.autograd.grad(losses.sum(), log_prob, retain_graph=True)[0] == 0).sum())
        if importance:
            losses = losses * columns["rollout_is_weights"][index][mask]
        if kl:
            losses = losses + KL * ((ref - log_prob).exp() - (ref - log_prob) - 1)
        if entropy:
            losses = losses + ENTROPY * (distribution.exp() * distribution).sum(-1)[mask]
        total = total + (losses.mean() if loss == "gspo" else losses.sum())
        count += 1 if loss == "gspo" else int(mask.sum())
    model.zero_grad()
    (total / count).backward()
    tokens = sum(sum(row.response_mask) for row in rows)
    return torch.cat([p.grad.flatten() for p in model.parameters()]), still / tokens


CASES = [(loss, "", size) for loss in FORMULAS for size in (1, 4)]
CASES += [(loss, "importance", 3) for loss in FORMULAS]
CASES += [("vanilla", "kl", 2), ("vanilla", "entropy", 2), ("vanilla", "kl importance", 2)]


@pytest.mark.parametrize(("loss", "extra", "micro_batch"), CASES)
def test_the_gradient_is_that_of_the_formula(engine, rows, plain, columns, monkeypatch, loss, extra, micro_batch):
    worker, config = engine.worker, engine.worker.loss_fn.keywords["config"]
    settings = {
        "clip_ratio_low": LOW,
        "clip_ratio_high": HIGH,
        "clip_ratio_c": DUAL,
        "use_kl_loss": "kl" in extra,
        "kl_loss_coef": KL,
        "entropy_coeff": ENTROPY,
        "loss_agg_mode": "seq-mean-token-mean" if loss == "gspo" else "token-mean",
    }
    for key, value in settings.items():
        monkeypatch.setitem(config.__dict__, key, value)
    monkeypatch.setitem(config.policy_loss.__dict__, "loss_mode", loss)
    monkeypatch.setitem(config.policy_loss.__dict__, "ppo_kl_coef", DRIFT)
    actor, seen = worker.actor, {}
    parameters = list(actor.engine.module.parameters())

    def record() -> float:
        seen["gradient"] = torch.cat([p.grad.full_tensor().flatten().clone() for p in parameters])
        return 0.0

    monkeypatch.setattr(actor.engine, "optimizer_step", record)
    monkeypatch.setattr(actor.engine, "lr_scheduler_step", lambda: 0.0)
    monkeypatch.setattr(actor.engine.engine_config, "use_dynamic_bsz", False, raising=False)
    engine_config = engine.config.copy()
    engine_config.actor_rollout_ref.actor.use_dynamic_bsz = False
    engine_config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = micro_batch
    policy = SimpleNamespace(
        config=engine_config, data_parallel_size=1, workers=worker, tokenizer=SimpleNamespace(pad_token_id=0)
    )
    monkeypatch.setattr(actor.engine.engine_config, "micro_batch_size_per_gpu", micro_batch, raising=False)
    if "importance" in extra:
        draw = torch.Generator().manual_seed(2)
        columns["rollout_is_weights"] = [2 * torch.rand(len(row.response_ids), generator=draw) for row in rows]
    batch = PolicyBatch(rows, columns=dict(columns))
    algorithm = make_algorithm(entropy_coef=ENTROPY if extra == "entropy" else 0.0)
    kernels.prepare(policy, batch, algorithm)
    kernels.update_actor(policy, batch, algorithm, seed=0)
    terms = {name: name in extra for name in ("kl", "entropy", "importance")}
    expected, still = reference(plain, rows, columns, loss, **terms)
    assert (seen["gradient"] - expected).norm() < 1e-4 * expected.norm()
    if loss == "vanilla":
        assert 0.1 < still < 0.9 and batch.metrics["pg_clipfrac_lower"] > 0  # both clips are under test
    if loss == "cpgd":
        assert 0 < batch.metrics["pg_clipfrac"] < 1 and batch.metrics["policy_drift"] > 0
