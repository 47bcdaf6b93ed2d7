"""Past selves: when their servers get the policy's weights, which, and what a checkpoint keeps of them."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from recipe.dag.core.errors import UserError
from recipe.dag.platform.rollout_server import RolloutServer
from recipe.dag.policy.canary import Canary
from recipe.dag.policy.shards import check_written, missing_files
from recipe.dag.policy.snapshot import SnapshotPolicy

PROMPT = [5 + i * 7 % 90 for i in range(30)]


class Handle:
    """A server in this process, called as a Ray actor is."""

    def __init__(self, server: RolloutServer):
        self.server = server

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(self.server, name))


@pytest.fixture
def past(engine, tiny_model, tmp_path, monkeypatch, one_thread):
    """`past(every)`: a snapshot of the tiny model's worker, with two servers."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    module, worker = engine.worker.actor.engine.module, engine.worker
    before = [parameter.detach().clone() for parameter in module.parameters()]
    source = SimpleNamespace(
        name="main",
        canary=Canary("main", PROMPT, [], "float32"),
        workers=SimpleNamespace(
            save_weights=worker.save_weights, score_canary=lambda prompt: [worker.score_canary(prompt)]
        ),
    )

    def make(every: int = 3, folder=tmp_path) -> SnapshotPolicy:
        made = SnapshotPolicy.__new__(SnapshotPolicy)
        rollout = {"rollout": {"canary": True}, "actor_rollout_ref": {"rollout": {"name": "cpu", "quantization": None}}}
        made.name, made.version, made.config, made.canary = "old", 0, OmegaConf.create(rollout), None
        made.policies, made.source, made.every, made.root = {"main": source}, "main", every, folder / "snapshots"
        made.folder, made.expected = None, []
        options = {"max_requests": 2, "max_len": 64, "load_format": "auto", "trust_remote_code": False}
        servers = [RolloutServer(str(tiny_model), **options) for _ in range(2)]
        made.replicas = [SimpleNamespace(server_handle=Handle(s), server_address=f"host:{s}") for s in servers]
        return made

    make.learn = lambda: _scale(module, worker)
    yield make
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), before, strict=True):
            parameter.copy_(value)
    worker.canary, worker.canary_scores = [], None


def _scale(module, worker) -> None:
    """Change the weights, as a step of training does."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.01)
    worker.canary_scores = None


def weights_of(policy: SnapshotPolicy) -> dict[str, torch.Tensor]:
    parameters = policy.replicas[1].server_handle.server.generator.model.named_parameters()
    return {name: parameter.detach().clone() for name, parameter in parameters}


def same(one, other) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_servers_change_at_the_start_and_at_multiples_of_every_and_the_canary_knows_their_version(past):
    policy, seen, versions = past(every=3), [], []
    for step in range(8):
        asyncio.run(policy.refresh(step))
        versions.append(policy.version)
        seen.append(weights_of(policy))
        past.learn()
    assert versions == [0, 0, 0, 3, 3, 3, 6, 6]
    assert same(seen[0], seen[2]) and same(seen[3], seen[5]) and not same(seen[2], seen[3])
    assert policy.canary.difference < 1e-4
    assert [folder.name for folder in policy.root.iterdir()] == ["old@6"], "earlier weights are removed"
    policy.replicas[1].server_handle.server.version = 5
    with pytest.raises(UserError, match=r"policy old, version 6: 1 of 2 servers do not have .* reports version 5"):
        asyncio.run(policy.refresh(7))


def test_a_server_with_other_weights_is_found_in_a_step_without_a_change(past):
    policy = past()
    asyncio.run(policy.refresh(0))
    with torch.no_grad():
        for parameter in policy.replicas[0].server_handle.server.generator.model.parameters():
            parameter.mul_(1.5)
    with pytest.raises(UserError, match="policy old, version 0: 1 of 2 servers .* has other weights"):
        asyncio.run(policy.refresh(1))


def test_a_checkpoint_keeps_the_past_and_a_resumed_run_serves_it(past, tmp_path):
    policy = past(every=4)
    asyncio.run(policy.refresh(0))
    past.learn()
    asyncio.run(policy.refresh(4))
    of_step_4 = weights_of(policy)
    past.learn()
    asyncio.run(policy.refresh(6))
    checkpoint = tmp_path / "global_step_6"
    policy.save(checkpoint / "old", 6)
    check_written(checkpoint, policy.saved(), patience_s=0)
    kept = checkpoint / "old" / "snapshot" / "huggingface" / "model.safetensors"
    assert kept.stat().st_nlink == 2, "a link, not a copy"
    asyncio.run(policy.refresh(8))
    assert same(of_step_4, load_file(kept)), "a later change leaves the checkpoint alone"

    resumed = past(every=4, folder=tmp_path / "elsewhere")
    asyncio.run(resumed.load_snapshot(checkpoint / "old"))
    assert resumed.version == 4 and same(weights_of(resumed), of_step_4)
    asyncio.run(resumed.refresh(6))
    assert resumed.version == 4, "as in the run that was not stopped"
    kept.unlink()
    again = tmp_path / "global_step_7"
    resumed.save(again / "old", 7)
    assert list(missing_files(again, resumed.saved())) == [], "the checkpoint that it came from may be gone"
    about = checkpoint / "old" / "snapshot" / "snapshot.json"
    assert json.loads(about.read_text())["version"] == 4
    about.write_text("{")
    with pytest.raises(UserError, match="snapshot.json: cannot be read .JSONDecodeError.; resume from another"):
        asyncio.run(resumed.load_snapshot(checkpoint / "old"))


def test_without_the_canary_nothing_is_scored(past):
    policy = past()
    policy.policies["main"].canary, policy.config.rollout.canary = None, False
    asyncio.run(policy.refresh(0))
    asyncio.run(policy.refresh(1))
    assert policy.canary is None and policy.version == 0
