"""Checkpoints whose pickles would run a program."""

from __future__ import annotations

import os
import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ray.exceptions import RayTaskError

from recipe.dag.core.errors import UserError
from recipe.dag.policy.policy import PolicyRuntime
from recipe.dag.policy.safe_load import weights_only
from recipe.dag.policy.worker import PolicyWorker


class Evil:
    """Creates the file `path` when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def first_weight(training_worker) -> torch.Tensor:
    return next(training_worker.engine.module.parameters()).full_tensor()


@pytest.mark.parametrize("model", ["actor", "critic"])
@pytest.mark.parametrize("no_force", [False, True])
def test_a_worker_restores_a_genuine_checkpoint_and_refuses_one_that_runs_a_program(
    engine, tmp_path, monkeypatch, model, no_force
):
    if no_force:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    worker, folder = engine.worker, tmp_path / model
    save, load = (
        (PolicyWorker.save_checkpoint, PolicyWorker.load_checkpoint)
        if model == "actor"
        else (PolicyWorker.save_critic, PolicyWorker.load_critic)
    )
    save(worker, str(folder))
    trained = first_weight(getattr(worker, model)).clone()
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    with torch.no_grad():
        next(getattr(worker, model).engine.module.parameters()).zero_()
    load(worker, str(folder))
    assert torch.equal(first_weight(getattr(worker, model)), trained)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == drawn
    assert os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD") == ("1" if no_force else None)
    for kind in ("model", "optim", "extra_state"):
        shard = folder / f"{kind}_world_size_1_rank_0.pt"
        genuine = shard.read_bytes()
        torch.save({"w": Evil(tmp_path / "ran")}, shard)
        with pytest.raises(UserError, match=rf"^{folder}: refused.*`posix\.mkdir`") as caught:
            load(worker, str(folder))
        assert "\n" not in str(caught.value) and not (tmp_path / "ran").exists()
        shard.write_bytes(genuine)


@pytest.mark.parametrize("content", [pickle.dumps(Evil("ran")), b"not a pickle"])
def test_other_files_are_refused_in_one_line(tmp_path, content):
    (tmp_path / "mixer.pt").write_bytes(content)
    with pytest.raises(UserError, match="mixer.pt: refused") as caught, weights_only(tmp_path / "mixer.pt"):
        torch.load(tmp_path / "mixer.pt", weights_only=False)
    assert "\n" not in str(caught.value)


def test_what_a_worker_refuses_arrives_as_one_line(tmp_path):
    def refuse(path):
        raise RayTaskError(
            "load_checkpoint", "Traceback\n  of a worker", UserError("main: refused")
        ).as_instanceof_cause()

    runtime = PolicyRuntime.__new__(PolicyRuntime)
    runtime.workers = SimpleNamespace(load_checkpoint=refuse)
    with pytest.raises(UserError) as caught:
        runtime.load(tmp_path)
    assert str(caught.value) == "main: refused"
