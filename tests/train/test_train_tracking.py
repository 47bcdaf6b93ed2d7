from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.train.tracking import Trackers, backends_of


@pytest.mark.parametrize(
    ("given", "backends"),
    [
        ("[console]", []),
        ("[console,tensorboard,file]", ["tensorboard", "file"]),
        ("console", []),
        ("tensorboard", ["tensorboard"]),
        ("null", []),
        ("[]", []),
    ],
)
def test_the_console_is_no_tracker_and_one_name_need_not_be_a_list(given, backends):
    assert backends_of(OmegaConf.create(f"logger: {given}").logger) == backends


TRACKED = """\
dag_id: tracked
agents: [{name: solver, policy: main}]
policies: {main: {model: {path: m}}}
nodes:
  - {id: solve, agent: solver}
  - {id: reward, reward: score.py:score, after: solve}
"""
VARIABLES = [
    f"{name}_{what}" for name in ("WANDB", "SWANLAB") for what in ("API_KEY", "DIR", "MODE", "RESUME", "RUN_ID")
]


@pytest.fixture
def track(tmp_path, monkeypatch):
    """`track(step)`: the trackers of a run in `out` that goes on after `step`."""
    (tmp_path / "score.py").write_text("def score(episode):\n    return {}\n")
    (tmp_path / "flow.yaml").write_text(TRACKED)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def track(step: int, *, out: str = "out", logger: str = "file", **sandbox: str) -> Trackers:
        trainer = {"logger": [logger], "project_name": "p", "experiment_name": "n"}
        config = {"output_dir": str(tmp_path / out), "trainer": trainer, "sandbox": sandbox}
        (tmp_path / out).mkdir(exist_ok=True)
        return Trackers(OmegaConf.create(config), load_workflow(tmp_path / "flow.yaml"), step=step)

    return track


@pytest.fixture
def seen(monkeypatch):
    """What a tracker that starts finds in its environment and gets as its settings, launch by launch."""
    launches = []

    class Tracking:
        def __init__(self, project, experiment, backends, settings):
            launches.append(SimpleNamespace(settings=settings, **{name: os.environ.get(name) for name in VARIABLES}))

    monkeypatch.setattr("verl.utils.tracking.Tracking", Tracking)
    return launches


def test_wandb_and_swanlab_go_on_in_one_run_until_the_run_starts_anew(track, seen, tmp_path):
    track(0), track(20), track(40), track(0), track(5), track(5, out="other")
    for name in ("WANDB_RUN_ID", "SWANLAB_RUN_ID"):
        first, *resumed, anew, again, other = [getattr(launch, name) for launch in seen]
        assert resumed == [first, first] and anew == again
        assert len({first, anew, other}) == 3
    assert {(launch.WANDB_RESUME, launch.SWANLAB_RESUME) for launch in seen} == {("allow", "allow")}
    folders = [launch.WANDB_DIR for launch in seen]
    assert (folders[0], folders[-1]) == (str(tmp_path / "out"), str(tmp_path / "other"))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": "a"}', "[" * 100_000])
def test_a_damaged_id_is_one_line_and_not_another_run_there(track, seen, tmp_path, content):
    track(0)
    (tmp_path / "out" / "run" / "tracking.json").write_text(content)
    with pytest.raises(UserError, match=r"^[^\n]*tracking\.json: damaged [^\n]* or delete it to continue[^\n]*$"):
        track(5)
    assert len(seen) == 1


def test_what_the_user_set_for_a_tracker_stays_and_nothing_is_left_behind(track, seen, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    monkeypatch.setenv("WANDB_API_KEY", "abcdefgh")
    before = dict(os.environ)
    track(0)
    assert (seen[0].WANDB_RUN_ID, seen[0].WANDB_MODE, seen[0].SWANLAB_MODE) == ("mine", None, "offline")
    assert dict(os.environ) == before


def test_trackers_get_no_secret(track, seen):
    track(0, token="abcdefgh", url="http://me:pass@host")
    assert seen[0].settings["sandbox"] == {"token": "***", "url": "http://***@host"}
    assert seen[0].settings["dag"]["dag_id"] == "tracked"


def test_the_file_of_a_resumed_run_keeps_what_was_known_at_its_checkpoint(track, tmp_path):
    first = track(0)
    for step in range(1, 6):
        first.log({"x": step}, step)
    first.finish(exit_code=1)
    resumed = track(3)
    resumed.log({"x": 40}, 4)
    resumed.finish(exit_code=0)
    lines = [json.loads(line) for line in (tmp_path / "out" / "tracking.jsonl").read_text().splitlines()]
    assert [(line["step"], line["data"]["x"]) for line in lines] == [(1, 1), (2, 2), (3, 3), (4, 40)]


@pytest.mark.slow
def test_wandb_itself_writes_into_the_output_and_keeps_its_id(track, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (0, 3):
        trackers = track(step, logger="wandb")
        trackers.log({"x": 1.0}, step + 1)
        trackers.finish(exit_code=0)
    runs = [folder.name for folder in (tmp_path / "out" / "wandb").glob("offline-run-*")]
    run_id = json.loads((tmp_path / "out" / "run" / "tracking.json").read_text())["id"]
    assert runs and all(f"-{run_id}" in name for name in runs)
    assert not (tmp_path / "wandb").exists()
