"""What a checkpoint of supervised fine-tuning is compared with, and what a forced resume takes from it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from recipe.dag.core.errors import UserError
from recipe.dag.train.checkpoint import save
from recipe.dag.train.sft.checkpoint import Checkpoints, check_intact, experiment, find_start, keep_options
from recipe.dag.train.sft.compose import compose_sft


@pytest.fixture
def compose(tmp_path):
    """`compose(settings)`: the configuration of a run with a model folder and a training file."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"first")
    (tmp_path / "train.parquet").write_bytes(b"rows")
    paths = [f"data.train_files={tmp_path}/train.parquet", f"model.path={tmp_path}/model", f"output_dir={tmp_path}/out"]
    return lambda *settings: compose_sft([*paths, *settings])


def write_checkpoint(config, facts=None) -> None:
    """Record a checkpoint of `config` without its weights; `facts`: in place of what it says of the experiment."""
    folder = Path(config.trainer.default_local_dir) / "global_step_4"
    folder.mkdir(parents=True)
    facts = facts or experiment(config)
    (folder / "run.json").write_text(json.dumps({"step": 4, "policies": {config.policy: 1}, "sft": facts}))
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("4")


def resume(config) -> str:
    """Return the problem that resuming has; a checkpoint without weights always has one."""
    with pytest.raises(UserError) as caught:
        find_start(config, json.loads(json.dumps(experiment(config))), processes=1)
    return str(caught.value)


ACCEPTED = "is missing or torn"


def test_the_same_command_resumes(compose):
    write_checkpoint(compose())
    assert ACCEPTED in resume(compose("trainer.total_epochs=9"))


def test_a_model_that_was_built_anew_in_its_folder_is_another_experiment(compose):
    write_checkpoint(compose())
    (Path(compose().model.path) / "model.safetensors").write_bytes(b"other")
    assert "model.path: was /" in resume(compose())


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("optim.lr_warmup_steps=5", "optim.lr_warmup_steps: was -1, now 5"),
        ("optim.override_optimizer_config={eps: 1e-6}", "optim.override_optimizer_config.eps: was absent, now 1e-06"),
        ("optim.optimizer_impl=torchao.optim", "optim.optimizer_impl: was torch.optim, now torchao.optim"),
        ("model.custom_chat_template=x", "model.custom_chat_template: was None, now x"),
        ("model.override_config.dropout=0.1", "model.override_config.dropout: was absent, now 0.1"),
        ("data.custom_cls={path: mine.py, name: Mine}", "data.custom_cls.name: was TranscriptDataset, now Mine"),
    ],
)
def test_settings_that_change_the_weights_are_another_experiment(compose, setting, line):
    write_checkpoint(compose())
    assert line in resume(compose(setting))
    assert ACCEPTED in resume(compose(setting, "trainer.resume_mode=force"))


def test_the_number_of_steps_counts_where_the_learning_rate_depends_on_it(compose):
    cosine = "optim.lr_scheduler_type=cosine"
    write_checkpoint(compose(cosine))
    assert ACCEPTED in resume(compose(cosine))
    assert "trainer.total_epochs: was 8, now 9" in resume(compose(cosine, "trainer.total_epochs=9"))


def test_an_option_that_is_given_no_more_is_a_difference(compose):
    write_checkpoint(compose("model.override_config.dropout=0.1"))
    assert "model.override_config.dropout: was 0.1, now absent" in resume(compose())


def of_earlier_version(config, *, drop=()):
    """What an earlier version recorded: no precision, and digests apart from names; `drop`: what it lacks."""
    now = experiment(config)
    recorded = {key: value for key, value in now.items() if not key.startswith(("engine.", "model."))}
    recorded |= {"model.path": now["model.path"]["name"], "model": now["model.path"]["digest"]}
    recorded |= {"model.custom_chat_template": None, "data.train_files": now["data.train_files"]["digest"].split(",")}
    return {key: value for key, value in recorded.items() if key not in drop}


def test_a_checkpoint_of_an_earlier_version_is_compared_by_what_it_holds(compose):
    config = compose()
    write_checkpoint(config, of_earlier_version(config, drop=("model", "optim.lr_warmup_steps")))
    assert ACCEPTED in resume(compose("optim.lr_warmup_steps=5"))
    assert "optim.lr: was 5e-06, now 0.1" in resume(compose("optim.lr=0.1"))


def test_a_checkpoint_without_the_precision_is_compared_by_all_else(compose):
    config = compose()
    write_checkpoint(config, of_earlier_version(config))
    assert ACCEPTED in resume(compose("engine.model_dtype=bf16"))
    line = "optim.override_optimizer_config.eps: was absent, now 1e-06"
    assert line in resume(compose("optim.override_optimizer_config={eps: 1e-6}"))
    (Path(config.data.train_files)).write_bytes(b"other rows")
    assert "data.train_files: was " in resume(compose())
    (Path(config.model.path) / "model.safetensors").write_bytes(b"other")
    assert "model.path: was /" in resume(compose())


@pytest.mark.parametrize("mode", ["auto", "force"])
def test_another_policy_is_one_line(compose, mode):
    write_checkpoint(compose())
    problem = resume(compose("policy=solver", f"trainer.resume_mode={mode}"))
    assert "holds the policy main, not solver; set policy=main" in problem and "\n" not in problem


def made(rate: float, decay: float = 0.0):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=rate, weight_decay=decay)
    return weight, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def test_a_forced_resume_has_its_own_learning_rate_at_the_step_of_the_checkpoint():
    weight, optimizer, scheduler = made(1.0)
    for _ in range(3):
        weight.sum().backward()
        optimizer.step()
        scheduler.step()
    stored = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, stored)
    stored.seek(0)
    state = torch.load(stored)
    for rate, decay in ((1.0, 0.0), (10.0, 0.5)):
        _, resumed, schedule = made(rate, decay)
        with keep_options(resumed, schedule):
            resumed.load_state_dict(state["optimizer"])
            schedule.load_state_dict(state["scheduler"])
        group = resumed.param_groups[0]
        assert (group["lr"], group["weight_decay"], group["initial_lr"]) == (rate / 4, decay, rate)
        assert schedule.get_last_lr() == [rate / 4]
        resumed.step()
        schedule.step()
        assert group["lr"] == rate / 5
    assert scheduler.get_last_lr() == [1 / 4]


def test_a_damaged_shard_is_refused_with_the_way_to_the_last_intact_checkpoint(tmp_path):
    def write(folder: Path) -> None:
        torch.save({"w": torch.ones(9)}, folder / "model.pt")

    good, bad = (save(tmp_path, step, {"policies": {}}, write, keep=0) for step in (1, 2))
    check_intact(bad)
    shard = bad / "model.pt"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=rf"^{shard}: damaged.*{good}: write 1 into {tmp_path}/latest_checkpointed"):
        check_intact(bad)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("error", "free"), [(OSError(28, "No space left on device"), 2**40), (RuntimeError("unexpected pos 64"), 0)]
)
def test_a_full_disk_is_one_line_in_every_process(compose, monkeypatch, rank, error, free):
    class Engine:
        def save_checkpoint(self, folder, global_step):
            raise error

    config = compose()
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    Path(config.trainer.default_local_dir).mkdir(parents=True)
    checkpoints = Checkpoints(config, Engine(), {}, rank=rank, processes=2)
    with pytest.raises(UserError, match=r"the checkpoint of step 3 cannot be written .*; make room") as caught:
        checkpoints.save(3)
    assert "\n" not in str(caught.value)
