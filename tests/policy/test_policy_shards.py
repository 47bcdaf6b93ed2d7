from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipe.dag.core.errors import UserError
from recipe.dag.policy.shards import Saved, check_loadable, check_written, missing_files, shortfall
from recipe.dag.settings.compose import compose_config
from recipe.dag.workflow.schema import Workflow

CONTENTS = ("model", "optimizer", "extra", "hf_model")
MAIN = Saved("main/actor", 2, CONTENTS)


def write(step: Path, model: Saved = MAIN) -> Path:
    folder = step / model.folder
    (folder / "huggingface").mkdir(parents=True)
    (folder / "huggingface" / "model.safetensors").write_bytes(b"weights")
    for kind in ("model", "optim", "extra_state"):
        for rank in range(model.world_size):
            torch.save({"w": torch.ones(3)}, folder / f"{kind}_world_size_{model.world_size}_rank_{rank}.pt")
    return folder


def test_a_complete_checkpoint_passes(tmp_path):
    write(tmp_path)
    assert not list(missing_files(tmp_path, [MAIN]))
    check_written(tmp_path, [MAIN], patience_s=0)


@pytest.mark.parametrize(
    "name",
    [
        *(f"{part}_world_size_2_rank_1.pt" for part in ("model", "optim", "extra_state")),
        "huggingface/model.safetensors",
    ],
)
def test_a_file_that_a_rank_has_not_left_is_named(tmp_path, name):
    (write(tmp_path) / name).unlink()
    with pytest.raises(UserError, match=f"main/actor/{name.replace('model.safetensors', '')}.*did not arrive"):
        check_written(tmp_path, [MAIN], patience_s=0)


def test_a_torn_file_counts_as_missing(tmp_path):
    shard = write(tmp_path) / "model_world_size_2_rank_0.pt"
    shard.write_bytes(shard.read_bytes()[:-30])
    assert list(missing_files(tmp_path, [MAIN])) == ["main/actor/model_world_size_2_rank_0.pt"]


def test_only_what_was_asked_for_must_be_there(tmp_path):
    folder = write(tmp_path)
    for path in folder.glob("optim*"):
        path.unlink()
    assert not list(missing_files(tmp_path, [Saved("main/actor", 2, ("model", "extra"))]))


def test_a_checkpoint_without_weights_is_refused_in_one_line_where_a_run_would_resume_from_it(tmp_path):
    config = compose_config("dag", ["workflow=w", "data.train_files=x"])
    policies = {
        "main": {"model": {"path": "m"}},
        "lean": {"model": {"path": "m"}, "config": {"actor.checkpoint.load_contents": ["model"]}},
    }
    workflow = Workflow(path="w", dag_id="w", agents=[{"name": "a", "policy": "main"}], policies=policies, nodes=[])
    for name in policies:
        write(tmp_path, Saved(f"{name}/actor", 2, CONTENTS))
    for path in (tmp_path / "lean" / "actor").glob("optim*"):
        path.unlink()  # which this policy does not load
    facts = {"policies": {"main": 2, "lean": 2}}
    check_loadable(tmp_path, facts, config, workflow)
    (tmp_path / "main" / "actor" / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(UserError, match=r"main/actor/model_world_size_2_rank_1.pt is missing .*resume_mode=disable"):
        check_loadable(tmp_path, facts, config, workflow)


def test_contents_that_a_run_would_load_and_does_not_save_are_named():
    policies = {"main": {"model": {"path": "m"}}, "fixed": {"model": {"path": "m"}, "frozen": True}}
    agents = [{"name": name, "policy": name} for name in policies]
    flow = Workflow(path="w", dag_id="w", agents=agents, policies=policies, nodes=[])
    contents = "actor_rollout_ref.actor.checkpoint"
    assert shortfall(compose_config("dag", ["workflow=w"]), flow) is None
    few = compose_config("dag", ["workflow=w", f"{contents}.save_contents=[model,hf_model]"])
    assert "asks for optimizer of main/actor, extra of main/actor, which" in shortfall(few, flow)
    flow.policies["main"].config["actor.checkpoint.load_contents"] = ["model"]
    assert shortfall(few, flow) is None
