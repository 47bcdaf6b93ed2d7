"""torchao's 8-bit Adam in the trained engines: its steps, and checkpoints that continue exactly."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from recipe.dag.policy.worker import PolicyWorker

pytest.importorskip("torchao")


@pytest.fixture
def wide_model(tiny_model, tmp_path):
    """A model with tensors of 4,096 and more values, which are quantized."""
    config = AutoConfig.from_pretrained(tiny_model, hidden_size=64, intermediate_size=128)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "wide")
    for file in tiny_model.glob("*token*"):
        (tmp_path / "wide" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "wide"


@pytest.fixture
def make_worker(engine, wide_model):
    def make(name: str) -> PolicyWorker:
        config = copy.deepcopy(engine.config)
        library = "torchao.optim" if name.endswith("8bit") else "torch.optim"
        config.actor_rollout_ref.model.path = config.critic.model.path = str(wide_model)
        for optim in (config.actor_rollout_ref.actor.optim, config.critic.optim):
            optim.merge_with({"optimizer": name, "optimizer_impl": library, "lr": 1e-3, "lr_warmup_steps": 4})
        worker = PolicyWorker(config.actor_rollout_ref, role="actor", critic=config.critic)
        worker.init_model()
        return worker

    yield make
    torch.compiler.set_stance("default")


def step(learner, seed: int) -> float:
    """Step with random gradients; return the next learning rate."""
    torch.manual_seed(seed)
    for parameter in learner.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.to_local().normal_()
    learner.optimizer_step()
    learner.optimizer_zero_grad()
    return learner.lr_scheduler_step()


def weights(learner) -> torch.Tensor:
    return torch.cat([parameter.full_tensor().detach().flatten() for parameter in learner.module.parameters()])


def test_steps_are_close_to_those_of_adam_in_fp32_and_resume_exactly(make_worker, tmp_path):
    first, second, plain = (make_worker(name) for name in ("AdamW8bit", "AdamW8bit", "AdamW"))
    engines = [(worker.actor.engine, worker.critic.engine) for worker in (first, second, plain)]
    for learner, _, exact in zip(*engines, strict=True):
        start = weights(learner)
        assert [step(learner, seed) for seed in (1, 2)] == pytest.approx([step(exact, seed) for seed in (1, 2)])
        moved, expected = weights(learner) - start, weights(exact) - start
        assert 0 < float((moved - expected).norm() / expected.norm()) < 0.1
        moments = [learner.optimizer.state[p]["exp_avg"].to_local() for p in learner.module.parameters()]
        names = {type(moment).__name__ for moment in moments if moment.numel() >= 4096}
        assert names == {"OptimState8bit"}
    first.save_checkpoint(str(tmp_path / "actor")), first.save_critic(str(tmp_path / "critic"))
    second.load_checkpoint(str(tmp_path / "actor")), second.load_critic(str(tmp_path / "critic"))
    for learner, resumed, _ in zip(*engines, strict=True):
        assert step(learner, 3) == step(resumed, 3)
        assert torch.equal(weights(learner), weights(resumed))
