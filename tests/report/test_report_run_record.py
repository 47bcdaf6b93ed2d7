from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.report import run_record
from recipe.dag.report.run_record import launches, write_run_record

ROOT = Path(__file__).parents[2]
TEXT = """\
dag_id: kept   # a comment
agents: [{name: solver, policy: main}]
policies: {main: {model: {path: m}}}
algorithm: {estimator: rloo}
envs: {shop: {path: "shop.py:Shop", kwargs: {token: tok123}}}
nodes:
  - {id: solve, agent: solver, env: shop, env_pays: true}
"""


@pytest.fixture
def flow(tmp_path):
    shop = "class Shop:\n    def __init__(self, token): pass\n    def reset(self, sample, seed): pass\n"
    (tmp_path / "shop.py").write_text(shop + "    def step(self, actions, truth): pass\n")
    (tmp_path / "flow.yaml").write_text(TEXT)
    return load_workflow(tmp_path / "flow.yaml")


def write(output, flow, **launch) -> Path:
    config = {"seed": 3, "sandbox": {"token": "tok456", "url": None}, "data": {"train_files": ["a", "b"]}}
    return write_run_record(output, config=config, workflow=flow, fingerprint={"learned": {}}, launch=launch)


def test_a_launch_keeps_what_the_run_was_made_of(tmp_path, flow, monkeypatch):
    monkeypatch.setattr(run_record.sys, "orig_argv", ["verl-dag", "train", "sandbox.token=tok789", "seed=3"])
    folder = write(tmp_path / "out", flow, seed=3, resumed_from=None)
    assert folder == tmp_path / "out" / "run" / "1"
    assert {path.name for path in folder.iterdir()} == {
        *("launch.json", "config.yaml", "workflow.yaml", "workflow.json", "fingerprint.json")
    }
    facts = json.loads((folder / "launch.json").read_text())
    assert facts["command"] == ["verl-dag", "train", "sandbox.token=***", "seed=3"]
    assert (facts["seed"], facts["resumed_from"], facts["folder"]) == (3, None, os.getcwd())
    assert {"python", "torch", "verl", "transformers", "ray", "sglang", "verl-dag"} <= facts["versions"].keys()
    assert facts["versions"]["torch"] and facts["versions"]["python"].startswith("3.")
    config = YAML(typ="safe").load((folder / "config.yaml").read_text())
    assert config == {"seed": 3, "sandbox": {"token": "***", "url": None}, "data": {"train_files": ["a", "b"]}}
    assert (folder / "workflow.yaml").read_text() == TEXT.replace("tok123", "***")
    resolved = json.loads((folder / "workflow.json").read_text())
    assert resolved["algorithm"]["center"] == "leave_one_out", "what the preset means is written out"
    assert "main.update" in [node["id"] for node in resolved["nodes"]], "and the training chain that is derived"


def test_no_file_of_a_launch_holds_a_secret(tmp_path, flow, monkeypatch):
    monkeypatch.setenv("WANDB_KEY", "plain-looking-value")
    monkeypatch.setattr(
        run_record.sys, "orig_argv", ["verl-dag", "train", "+note=plain-looking-value", "--token", "t9"]
    )
    folder = write(tmp_path / "out", flow, evaluated="https://me:hunter2@host/checkpoint")
    text = "".join(path.read_text() for path in folder.iterdir())
    assert not [secret for secret in ("tok123", "tok456", "plain-looking", '"t9"', "hunter2") if secret in text]


def test_a_later_launch_leaves_the_earlier_ones_alone(tmp_path, flow):
    first = write(tmp_path, flow, step=0)
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    folders = [first, *(write(tmp_path, flow, step=step) for step in range(1, 11))]
    assert [path.name for path in launches(tmp_path)] == [str(number) for number in range(1, 12)]
    assert launches(tmp_path) == folders
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before


def test_launches_at_the_same_time_get_folders_of_their_own(tmp_path, flow):
    threads = [threading.Thread(target=write, args=(tmp_path, flow), kwargs={"number": i}) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    facts = [json.loads((folder / "launch.json").read_text()) for folder in launches(tmp_path)]
    assert sorted(fact["number"] for fact in facts) == list(range(8))
    assert len(list((tmp_path / "run").iterdir())) == 8


def test_a_launch_that_fails_while_it_is_written_is_absent(tmp_path, flow, monkeypatch):
    monkeypatch.setattr(run_record.os, "rename", lambda *paths: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(UserError, match="run: cannot be written: disk full; pass another output_dir"):
        write(tmp_path / "out", flow)
    assert list((tmp_path / "out" / "run").iterdir()) == []


def test_an_output_that_is_a_file_is_one_line(tmp_path, flow):
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="out/run: cannot be written: Not a directory"):
        write(tmp_path / "out", flow)


def test_the_commit_of_a_checkout_is_kept_and_whether_it_was_changed(tmp_path, flow, monkeypatch):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@e", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path / "repo", capture_output=True, text=True)
        return done.stdout.strip()

    module = tmp_path / "repo" / "recipe" / "dag" / "report" / "run_record.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    monkeypatch.setattr(run_record, "_PROJECT", tmp_path / "repo")
    monkeypatch.setattr(run_record, "__file__", str(module))

    def checkout() -> dict | None:
        return json.loads((write(tmp_path / "out", flow) / "launch.json").read_text())["checkout"]

    assert checkout() is None, "there is no repository"
    git("init")
    assert checkout() is None, "the repository is another project's, in which this one is installed"
    git("add", "."), git("commit", "-m", "first")
    assert checkout() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    module.write_text("changed")
    assert checkout() == {"commit": git("rev-parse", "HEAD"), "dirty": True}
