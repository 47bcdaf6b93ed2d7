"""What is refused before anything is started because workflow and configuration do not fit."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from recipe.dag.app import launch as stages
from recipe.dag.app.cli import app
from recipe.dag.app.launch import Evaluation, choose_defaults, launch
from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.policy import cluster
from recipe.dag.settings.compose import compose_config
from recipe.dag.train.resources import Resources
from recipe.dag.workflow.machine import Machine
from recipe.sandbox.errors import CannotIsolate
from recipe.sandbox.launch import LocalSandbox
from tests.workflow.shapes import QWEN, write_config

ROOT = Path(__file__).parents[2]


def test_uncertainty_weights_need_several_episodes_per_sample(tmp_path):
    text = (ROOT / "workflows" / "workflow_no_tool.yaml").read_text()
    path = tmp_path / "unsure.yaml"
    path.write_text(text.replace("{estimator: grpo,", "{uncertainty: {}, estimator: grpo,"))
    files = [f"workflow={path}", "data.train_files=train.parquet"]
    with pytest.raises(UserError, match=r"unsure.yaml: algorithm.uncertainty compares .*rollout.n to at least 2"):
        launch("dag", [*files, "actor_rollout_ref.rollout.n=1"])


def test_what_the_command_line_sets_in_the_workflow_is_checked_with_it():
    files = [f"workflow={ROOT}/workflows/workflow_no_tool.yaml", "data.train_files=train.parquet"]
    unsure = [*files, "workflow.algorithm.uncertainty={}", "actor_rollout_ref.rollout.n=1"]
    with pytest.raises(UserError, match="algorithm.uncertainty compares"):
        launch("dag", unsure)
    with pytest.raises(UserError, match=r"^workflow.algorithm.epoch=2: algorithm.epoch: unknown key"):
        launch("dag", [*files, "workflow.algorithm.epoch=2"])


def launch_on_gsm8k(folder: Path, model: Path, *overrides: str) -> None:
    """Up to where the first process would start, which raises ConnectionError."""
    files = [f"data.{split}_files={folder}" for split in ("train", "val")]
    names = ["data.train_name=main", "data.val_name=main", "platform=cpu", f"model_path={model}"]
    launch("dag", [f"workflow={ROOT}/workflows/workflow_no_tool.yaml", *files, *names, *overrides])


@pytest.fixture
def nothing_starts(monkeypatch):
    async def open_resources(*arguments, **options):
        raise ConnectionError("started")

    monkeypatch.setattr(Resources, "open", open_resources)
    monkeypatch.setenv("MODEL_PATH", "")


def test_gsm8k_can_be_trained_on_from_the_hub_as_it_is(gsm8k, tiny_model, nothing_starts):
    with pytest.raises(ConnectionError, match="started"):
        launch_on_gsm8k(gsm8k, tiny_model)


def test_data_of_which_no_answer_can_be_right_is_refused_before_anything_starts(gsm8k, tiny_model, nothing_starts):
    with pytest.raises(UserError, match="data.train_files: 8 of 8 ground truths that were checked are never"):
        launch_on_gsm8k(gsm8k, tiny_model, "data.answer_format=text")


def test_sampling_that_the_trainer_does_not_know_is_reported_in_training_alone(tmp_path, tiny_model, capsys):
    text = (ROOT / "workflows" / "workflow_no_tool.yaml").read_text()
    path = tmp_path / "narrow.yaml"
    path.write_text(text.replace("temperature: 0.8,", "temperature: 0.8, top_p: 0.9,"))
    options = [f"workflow={path}", f"model_path={tiny_model}", "platform=cpu", f"output_dir={tmp_path}/out"]
    for evaluate_only, count in ((False, 1), (True, 0)):
        with pytest.raises(UserError, match="needs problems"):  # the next thing that is missing
            launch("dag", options, evaluation=Evaluation() if evaluate_only else None)
        shown = capsys.readouterr().err
        assert shown.count("the trainer's log-probs ignore top_p 0.9") == count


@pytest.fixture
def broken(tmp_path):
    """A workflow whose hooks import what is not there."""
    hooks = "import helper\n\ndef pre_process(tokenizer, prompt_ids, obs):\n    return [1]\n"
    (tmp_path / "hooks.py").write_text(hooks)
    (tmp_path / "helper.py").write_text("\nimport not_there\n")
    text = (ROOT / "workflows" / "workflow_no_tool.yaml").read_text()
    path = tmp_path / "broken.yaml"
    text = text.replace("recipe/retool_ma/hooks.py:Reasoner", "hooks.py")
    path.write_text(text.replace("recipe/", f"{ROOT}/recipe/"))
    return path


@pytest.mark.parametrize("evaluate_only", [False, True])
def test_code_that_cannot_be_imported_is_refused_before_anything_is_started_or_written(
    broken, tmp_path, monkeypatch, evaluate_only
):
    monkeypatch.setattr("recipe.dag.app.launch.execute", lambda *_args, **_keys: pytest.fail("the run was started"))
    monkeypatch.setattr("recipe.dag.app.launch.prepare_environment", lambda _platform: None)
    monkeypatch.setenv("MODEL_PATH", "m")
    out = tmp_path / "out"
    options = [f"workflow={broken}", "data.train_files=train.parquet", "data.val_files=val.parquet", "platform=cpu"]
    with pytest.raises(UserError, match=r"hooks.py: cannot be loaded: .*'not_there' \(.*helper.py:2\)"):
        launch("dag", [*options, f"output_dir={out}"], evaluation=Evaluation() if evaluate_only else None)
    assert not out.exists()


def test_validate_imports_only_where_it_is_asked_to(broken):
    runner = CliRunner()
    assert runner.invoke(app, ["validate", str(broken)]).exit_code == 0
    done = runner.invoke(app, ["validate", "--load", str(broken)])
    assert done.exit_code == 2 and "helper.py:2" in done.output


def test_a_helper_beside_hooks_is_found_by_the_console_script(broken, tmp_path):
    """Which has another sys.path[0] than `python -m`."""
    (tmp_path / "helper.py").write_text("IDS = [1]\n")
    script = tmp_path / "bin" / "verl-dag"
    script.parent.mkdir()
    script.write_text("from recipe.dag.app.cli import main\nmain()\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), "validate", "--load", str(broken)]
    done = subprocess.run(command, cwd=tmp_path.parent, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "OK" in done.stdout, done.stderr


@pytest.mark.parametrize("evaluate_only", [False, True])
def test_what_breaks_under_a_signal_to_all_processes_ends_the_run_in_one_line(monkeypatch, capsys, evaluate_only):
    def dies(name, overrides, folder, evaluation, stop):
        stop.signum = signal.SIGTERM
        if not evaluate_only:
            stop.way_back = "the same command resumes from global_step_3"
        raise RuntimeError("The actor died.\n  and a page about it")

    monkeypatch.setattr(stages, "check", dies)
    with pytest.raises(SystemExit) as ended:
        launch("dag", [], evaluation=Evaluation() if evaluate_only else None)
    left = "the same command goes on where it was" if evaluate_only else "the same command resumes from global_step_3"
    assert ended.value.code == 143
    assert capsys.readouterr().err == f"interrupted (SIGTERM: RuntimeError: The actor died.); {left}\n"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), UserError("a mistake")])
def test_without_a_signal_an_error_stays_what_it_is(monkeypatch, error):
    def fails(*_args, **_keys):
        raise error

    monkeypatch.setattr(stages, "check", fails)
    with pytest.raises(type(error), match=str(error)):
        launch("dag", [])


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, UserError), (errno.EDQUOT, UserError), (errno.EIO, OSError)]
)
def test_a_full_disk_is_one_line(monkeypatch, tmp_path, number, error):
    def fails(run):
        run.stop.way_back = "the same command resumes from global_step_3"
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(stages, "prepare", fails)
    run = [f"workflow={ROOT}/workflows/workflow_retool_ma.yaml", "data.train_files=any", "model_path=any"]
    with pytest.raises(error) as caught:
        launch("dag", [*run, f"output_dir={tmp_path}/out"])
    if error is UserError:
        reason = f"{tmp_path}/out: cannot be written: {os.strerror(number)}; make room; the same command resumes from "
        assert str(caught.value) == reason + "global_step_3"


@pytest.fixture
def two_cards(monkeypatch, tmp_path):
    """A machine with two GPUs of 80 GB, and a model of 3B parameters at MODEL_PATH."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("recipe.dag.settings.defaults.liger_is_installed", lambda: False)
    monkeypatch.setattr("recipe.dag.workflow.machine.this_machine", lambda: Machine((80 * 10**9,) * 2, 10**12))
    monkeypatch.setenv("MODEL_PATH", write_config(tmp_path / "m", QWEN["3b"]))


def test_a_run_says_what_it_chose_and_whether_it_fits_before_it_starts(two_cards):
    config = compose_config("dag", ["workflow=w"])
    workflow = load_workflow(ROOT / "workflows" / "workflow_retool_ma.yaml")
    assert list(choose_defaults(config, workflow, "cuda")) == [
        "GPUs of each machine: 2 of 80.0 GB, all that are visible",
        "micro-batches: 16,384 tokens; offload: none",
        "kernels: transformers'; weights gathered once a pass; recomputed in the backward pass: all layers but "
        "3, only the MLP in 33 of them",
        "memory of main on each GPU: fits: 71.9 of 80.0 GB",
    ]
    assert config.trainer.n_gpus_per_node == 2 and not config.actor_rollout_ref.actor.fsdp_config.param_offload
    assert list(choose_defaults(config, workflow, "cpu")) == []


def test_a_model_of_the_hub_is_looked_up_before_its_memory_is_estimated(two_cards, monkeypatch, tmp_path):
    monkeypatch.setenv("MODEL_PATH", "org/model")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    def download(path, **_options):
        write_config(tmp_path / "hub" / "models--org--model" / "snapshots" / "1", QWEN["0.5b"])

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", download)
    config = compose_config("dag", ["workflow=w"])
    workflow = load_workflow(ROOT / "workflows" / "workflow_retool_ma.yaml")
    assert list(choose_defaults(config, workflow, "cuda"))[-1].startswith("memory of main on each GPU: fits: ")


def test_servers_that_do_not_fit_the_gpus_end_a_run_before_it_starts(two_cards):
    config = compose_config("dag", ["workflow=w", "actor_rollout_ref.rollout.tensor_model_parallel_size=4"])
    workflow = load_workflow(ROOT / "workflows" / "workflow_retool_ma.yaml")
    with pytest.raises(UserError, match="servers of 4 GPUs do not fit into the 2 of policy `main`"):
        list(choose_defaults(config, workflow, "cuda"))


@pytest.mark.parametrize(("given", "kept"), [(None, "passive"), ("active", "active")])
def test_the_processes_of_a_cpu_run_do_not_spin_while_they_wait(monkeypatch, given, kept):
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    stages.prepare_environment("cpu")
    assert os.environ["OMP_WAIT_POLICY"] == kept and "OMP_WAIT_POLICY" in cluster.FORWARDED


order: list[str] = []
ray_started, begun = threading.Event(), {"sandbox": threading.Event(), "imports": threading.Event()}


class Ray:
    """A stand-in for the cluster, whose start ends when the sandbox's and the imports have begun."""

    def __init__(self, *_arguments, **_options):
        self.logs = SimpleNamespace(open=lambda: None)

    def __enter__(self) -> Ray:
        return self

    def __exit__(self, *_exception) -> None:
        order.append("Ray ended")

    def join(self) -> None:
        pass

    def nodes(self) -> list[str]:
        return []

    def lost(self, error: Exception) -> str:
        return ""

    def pointer(self) -> str:
        return ""

    def start(self) -> None:
        assert all(event.wait(60) for event in begun.values())
        order.append("Ray")
        ray_started.set()


class Reached(Exception):
    """The policies would start."""


async def reached(*_arguments) -> None:
    raise Reached


@pytest.fixture
def started(monkeypatch, gsm8k, tiny_model, tmp_path):
    """Start a run that uses the sandbox, with stand-ins; `launch` of the server is the argument's."""
    monkeypatch.setattr(Resources, "check_agents", lambda *_arguments: order.append("agents"))
    order.clear()
    ray_started.clear()
    for event in begun.values():
        event.clear()

    def begin(serve) -> None:
        def launch_server(_server) -> None:
            begun["sandbox"].set()
            assert ray_started.wait(60)
            serve()

        monkeypatch.setattr(LocalSandbox, "launch", launch_server)
        monkeypatch.setattr(stages, "Cluster", Ray)
        monkeypatch.setattr(stages, "_import_policies", lambda trains: begun["imports"].set())
        monkeypatch.setattr(stages, "write_record", lambda *_arguments: order.append("record"))
        monkeypatch.setattr(stages, "start", reached)
        files = [f"data.{split}_files={gsm8k}" for split in ("train", "val")]
        keys = ["data.train_name=main", "data.val_name=main", "platform=cpu", f"model_path={tiny_model}"]
        launch("dag", [f"workflow={ROOT}/workflows/workflow_retool_ma.yaml", *files, *keys, f"output_dir={tmp_path}/o"])

    return begin


def test_sandbox_and_imports_start_beside_ray_and_files_are_written_after_them(started):
    with pytest.raises(Reached):
        started(lambda: order.append("sandbox"))
    assert order == ["agents", "Ray", "sandbox", "record", "Ray ended"]


def test_a_sandbox_that_does_not_start_beside_ray_is_one_line_and_nothing_is_written(started):
    def fails() -> None:
        raise CannotIsolate("Landlock is missing")

    with pytest.raises(UserError, match="^Landlock is missing; .*sandbox.isolation=rlimits"):
        started(fails)
    assert order == ["agents", "Ray", "Ray ended"]


@pytest.mark.parametrize(("trains", "most"), [(True, 24), (False, 6)])
def test_the_processes_that_run_episodes_are_counted_for_the_forks_too(monkeypatch, trains, most):
    monkeypatch.setenv("MODEL_PATH", "m")
    keys = {"train_batch_size": 4}
    config = OmegaConf.create({"data": keys, "validation": {"n": 3}, "actor_rollout_ref": {"rollout": {"n": 2}}})
    workflow = load_workflow(ROOT / "examples" / "gallery" / "workflow_counterfactual.yaml")
    counts = []

    async def start_policies(*_arguments, **_options) -> None: ...

    async def start_processes(*_arguments, episodes: int) -> None:
        counts.append(episodes)

    resources = SimpleNamespace(start_policies=start_policies, start_processes=start_processes)
    run = SimpleNamespace(config=config, workflow=workflow, platform="cpu", trains=trains)
    asyncio.run(stages.start(run, SimpleNamespace(val=[{}, {}], models=None), resources))
    assert counts == [most]


def test_an_agent_that_is_refused_ends_the_run_before_ray_starts(started, monkeypatch):
    def refused(*_arguments) -> None:
        ray_started.set()  # the sandbox ends first
        raise UserError("the template has no tools")

    monkeypatch.setattr(Resources, "check_agents", refused)
    with pytest.raises(UserError, match="no tools"):
        started(lambda: None)
    assert order == ["Ray ended"]
