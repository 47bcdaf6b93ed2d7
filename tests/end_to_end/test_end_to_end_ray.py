"""A run that joins a Ray which was started in another folder, as on every cluster."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.end_to_end.runs import finish, log_of, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SHARDS = ("model", "optim", "extra_state")


@pytest.fixture
def ray_elsewhere(material, tmp_path) -> Iterator[dict[str, str]]:
    """The environment that a run joins it with. It asks for a token, which Ray would not look for by itself."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (tmp_path / "token").write_text("0123456789abcdef" * 4)
    token = {"RAY_AUTH_TOKEN_PATH": f"{tmp_path}/token"}
    with material.zygote.ray(folder, processors=3, RAY_AUTH_MODE="token", PYTHONPATH="", **token) as address:
        yield {"RAY_ADDRESS": address, **token}


def test_a_run_with_relative_paths_keeps_its_weights_and_resumes(material, ray_elsewhere, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    near = os.path.relpath(material.folder, home)
    paths = [f"data.train_files={near}/data/train.parquet", f"data.val_files={near}/data/test.parquet"]
    paths += ["output_dir=outputs/joined", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    env = {**ray_elsewhere, "MODEL_PATH": f"{near}/model"}
    out = home / "outputs" / "joined"

    first = start(material, out, *paths, "trainer.total_training_steps=1", cwd=home, **env)
    assert list(finish(first, out)) == [1]
    assert "joining Ray at" in log_of(out)
    actor = out / "checkpoints" / "global_step_1" / "main" / "actor"
    for kind in SHARDS:
        assert (actor / f"{kind}_world_size_1_rank_0.pt").stat().st_size > 0, kind
    assert not list((tmp_path / "elsewhere").iterdir()), "something was written where Ray runs"

    again = finish(start(material, out, *paths, "trainer.total_training_steps=2", cwd=home, **env), out)
    assert sorted(again) == [1, 2]
    assert f"resumed from {actor.parents[1]}" in log_of(out)

    (out / "checkpoints" / "global_step_2" / "main" / "actor" / "model_world_size_1_rank_0.pt").unlink()
    before = len(log_of(out))
    torn = start(material, out, *paths, "trainer.total_training_steps=3", cwd=home, **env)
    assert torn.wait(timeout=1200) == 2
    lines = [line for line in log_of(out)[before:].splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "main/actor/model_world_size_1_rank_0.pt is missing or torn" in lines[0]
    assert "joining" not in log_of(out)[before:], "it was refused before anything was started"


def test_workers_draw_the_same_random_numbers_in_every_run(material, tmp_path):
    """The model drops attention weights while it learns, so an unseeded worker would show."""
    model = tmp_path / "model"
    shutil.copytree(material.folder / "model", model)
    config = (model / "config.json").read_text()
    assert '"attention_dropout": 0.0' in config
    (model / "config.json").write_text(config.replace('"attention_dropout": 0.0', '"attention_dropout": 0.3'))
    overrides = ["trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    metrics = []
    for name in ("one", "other"):
        run = start(material, tmp_path / name, *overrides, "trainer.save_freq=-1", MODEL_PATH=str(model))
        metrics.append(finish(run, tmp_path / name)[1])
    for key in ("policy/main/grad_norm", "policy/main/loss"):
        assert metrics[0][key] == pytest.approx(metrics[1][key], rel=1e-5, abs=1e-8), key
    assert metrics[0]["policy/main/grad_norm"] > 0
