"""Policies are started with the configuration of their own pool of GPUs."""

from __future__ import annotations

import asyncio

from recipe.dag.settings.compose import compose_config
from recipe.dag.train import local_policies
from recipe.dag.train.models import ModelPaths
from recipe.dag.workflow.schema import Workflow


def test_a_policy_alone_on_its_gpu_reduces_its_gradients_once(monkeypatch):
    class Runtime:
        def __init__(self, name, config, *_, **__):
            self.name, self.config = name, config

        async def start(self):
            pass

        launch = start

    monkeypatch.setattr(local_policies, "create", lambda spec, platform: spec)
    monkeypatch.setattr(local_policies, "PolicyRuntime", Runtime)
    flow = Workflow(
        path="w.yaml",
        dag_id="w",
        agents=[],
        policies={"alone": {"model": {"path": "m"}, "gpus": 1}, "wide": {"model": {"path": "m"}}},
        nodes=[],
    )
    run = compose_config("dag", ["workflow=w.yaml", "data.train_files=none", "trainer.n_gpus_per_node=4"])
    models, policies = ModelPaths({"alone": "m", "wide": "m"}, {}), {}
    asyncio.run(local_policies.start_policies(run, flow, models, policies, platform="cuda"))
    engines = {name: policy.config.actor_rollout_ref.actor.fsdp_config for name, policy in policies.items()}
    once = {name: engine.use_no_sync_for_gradient_accumulation for name, engine in engines.items()}
    assert once == {"alone": True, "wide": False}
