"""`verl-dag eval`, `train` and `doctor`: what they make of their options, and one evaluation for real."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recipe.dag.app.launch
from recipe.dag.app import cli, doctor
from recipe.dag.app.evaluate import find_checkpoint, option
from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.train.data import Columns, load_samples

ROOT = Path(__file__).parents[2]
SHARED = str(ROOT / "workflows" / "workflow_retool_ma.yaml")
SEPARATE = str(ROOT / "workflows" / "workflow_retool_ma_separate.yaml")
ONE_AGENT = """\
dag_id: alone
agents: [{name: solver, policy: main, sampling: {max_tokens: 4}}]
policies: {main: {model: {path: "${oc.env:MODEL_PATH}"}}}
algorithm: {estimator: grpo}
nodes:
  - id: solve
    agent: solver
    hooks: hooks.py
  - {id: reward, reward: hooks.py:score, after: solve}
"""
HOOKS = """\
def pre_process(tokenizer, prompt_ids, obs, *, context=None):
    return [5, 6, 7]

def score(episode):
    episode.outcome = float(episode.sample["ground_truth"] == "1")
    return {"solver": episode.outcome}
"""


@pytest.fixture
def verl_dag(monkeypatch, capsys, tmp_path):
    """Runs verl-dag in an empty folder, up to where it would start Ray: (exit code, stderr, config, workflow)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MODEL_PATH", raising=False)
    monkeypatch.setattr(recipe.dag.app.launch, "prepare_environment", lambda platform: None)

    def run(*arguments) -> SimpleNamespace:
        started = SimpleNamespace(config=None, workflow=None, evaluation=None)

        async def start(run, cluster):
            started.config, started.workflow, started.evaluation = run.config, run.workflow, run.evaluation
            started.model = os.environ.get("MODEL_PATH")

        monkeypatch.setattr(recipe.dag.app.launch, "execute", start)
        monkeypatch.setattr(sys, "argv", ["verl-dag", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return SimpleNamespace(code=ended.value.code or 0, err=capsys.readouterr().err, **vars(started))

    yield run
    os.environ.pop("MODEL_PATH", None)


@pytest.fixture
def checkpoint(tmp_path):
    """Makes outputs/run/checkpoints with the given steps and policies; returns the folder."""

    def make(steps=(10, 20), policies=("main",), latest=20) -> Path:
        root = tmp_path / "outputs" / "run" / "checkpoints"
        for step in steps:
            for policy in policies:
                model = root / f"global_step_{step}" / policy / "actor" / "huggingface"
                model.mkdir(parents=True)
                (model / "config.json").write_text("{}")
            (root / f"global_step_{step}" / "run.json").write_text(json.dumps({"step": step}))
        (root / "latest_checkpointed_iteration.txt").write_text(str(latest))
        return root

    return make


def refused(done, *words):
    """One line, exit code 2, and nothing started."""
    assert (done.code, done.config) == (2, None)
    assert done.err.count("\n") == 1 and "Traceback" not in done.err
    assert [word for word in words if word not in done.err] == []


def test_eval_freezes_every_policy_and_drops_the_training_chain(verl_dag):
    done = verl_dag("eval", SEPARATE, "--model", "a model, with=signs", "--data", "x.jsonl")
    assert (done.code, done.evaluation is not None, done.model) == (0, True, "a model, with=signs")
    assert done.workflow.trained_policies() == () and done.workflow.training_nodes == ()
    assert [node.id for node in done.workflow.nodes] == ["plan", "execute", "verify", "reward", "team"]


def test_eval_options_land_in_the_configuration(verl_dag):
    options = ["--input-key", "q", "--label_key", "a", "--output", "out dir", "-n", 4, "--max-samples", 7, "--seed", 3]
    config = verl_dag("eval", SHARED, "--data", "it's.jsonl", *options, "data.max_prompt_length=99").config
    assert (config.data.val_files, config.data.input_key, config.data.label_key) == ("it's.jsonl", "q", "a")
    assert (Path(config.output_dir), config.validation.n, config.validation.max_samples) == (
        Path.cwd() / "out dir",
        4,
        7,
    )
    assert (config.seed, config.data.max_prompt_length) == (3, 99)


def test_eval_without_output_has_a_folder_of_its_own(verl_dag, tmp_path):
    (tmp_path / "my_task").mkdir()
    (tmp_path / "my_task" / "workflow.yaml").write_text(ONE_AGENT)
    (tmp_path / "my_task" / "hooks.py").write_text(HOOKS)
    done = verl_dag("eval", "my_task/workflow.yaml", "--data", "x")
    assert done.config.output_dir == str(tmp_path / "outputs" / "eval_my_task")
    assert verl_dag("eval", SHARED, "--data", "x").config.output_dir == str(
        Path("outputs/eval_workflow_retool_ma").absolute()
    )


@pytest.mark.parametrize("given", ["run", "run/checkpoints"])
def test_a_checkpoint_means_the_last_step_unless_one_is_named(verl_dag, checkpoint, given):
    root = checkpoint(latest=10)
    done = verl_dag("eval", SHARED, "--checkpoint", f"outputs/{given}", "--data", "x", "--output", "o")
    assert done.workflow.policies["main"].model.path.endswith("global_step_10/main/actor/huggingface")
    assert done.evaluation.weights.name == "global_step_10"
    assert find_checkpoint(root / "global_step_20") == root / "global_step_20"


def test_a_checkpoint_has_a_model_for_each_trained_policy(verl_dag, checkpoint):
    checkpoint(policies=("planner", "executor", "verifier"))
    done = verl_dag("eval", SEPARATE, "--checkpoint", "outputs/run", "--data", "x")
    parts = {name: Path(policy.model.path).parts[-3] for name, policy in done.workflow.policies.items()}
    assert parts == {name: name for name in ("planner", "executor", "verifier")}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([SEPARATE, "--checkpoint", "outputs/run"], ["no policy 'planner'", "main"]),
        ([SHARED, "--checkpoint", "nowhere"], ["nowhere: no checkpoint there"]),
        ([SHARED, "--model", "m", "--checkpoint", "c"], ["exclude each other"]),
        (["w.yaml", "--model", "m"], ["--model has no effect", "main: org/model"]),
        ([SHARED, "--output", "old"], ["holds a training run"]),
        ([SHARED, "--config-name", "ma_retool_ma", "default_agent.nothing=1"], ["default_agent.nothing"]),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(arguments, words, verl_dag, checkpoint, tmp_path):
    checkpoint()
    (tmp_path / "w.yaml").write_text(ONE_AGENT.replace("${oc.env:MODEL_PATH}", "org/model"))
    (tmp_path / "hooks.py").write_text(HOOKS)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text("{}\n")
    refused(verl_dag("eval", *arguments, "--data", "x"), *words)


def test_a_checkpoint_without_a_model_to_load_is_refused(verl_dag, checkpoint):
    model = checkpoint() / "global_step_20" / "main" / "actor" / "huggingface"
    (model / "config.json").unlink()
    refused(verl_dag("eval", SHARED, "--checkpoint", "outputs/run", "--data", "x"), "hf_model")


def test_retool_ma_keys_mean_ours(verl_dag):
    agent = {
        "pretrain": "models/m",
        "vllm_num_engines": 2,
        "vllm_tensor_parallel_size": 2,
        "prompt_max_len": 900,
        "generate_max_len": 300,
        "rollout_batch_size": 4,
        "micro_rollout_batch_size": 2,
        "temperature": 0.25,
        "max_samples": 5,
        "save_path": "here",
    }
    keys = {"packing_samples": False, "prompt_data": "amc.jsonl", "prompt_split": "train", "input_key": "q"}
    keys |= {"label_key": "a", "add_prompt_suffix": "!"} | {f"default_agent.{key}": v for key, v in agent.items()}
    overrides = [option(key, value) for key, value in keys.items()]
    done = verl_dag("eval", SHARED, "--config-name", "ma_retool_ma", *overrides)
    data, node = done.config.data, done.config.actor_rollout_ref
    assert (done.code, done.model, Path(done.config.output_dir)) == (0, "models/m", Path.cwd() / "here")
    assert (data.max_prompt_length, data.max_response_length, data.train_batch_size) == (900, 300, 4)
    assert (data.val_files, data.val_split, data.input_key, data.label_key) == ("amc.jsonl", "train", "q", "a")
    assert data.add_prompt_suffix == "!" and done.config.validation.max_samples == 5
    assert (done.config.trainer.n_gpus_per_node, node.rollout.tensor_model_parallel_size) == (4, 2)
    assert str(node.model.use_remove_padding).lower() == "false"
    assert [agent.validation.temperature for agent in done.workflow.agents] == [0.25] * 3
    assert [agent.sampling.temperature for agent in done.workflow.agents] == [0.8] * 3


@pytest.mark.parametrize("workflow", [f"workflow={SHARED}", SHARED])
def test_train_is_the_same_as_main(verl_dag, workflow):
    done = verl_dag("train", workflow, "data.train_files=t.parquet", "seed=5")
    assert (done.code, done.evaluation, done.config.seed) == (0, None, 5)
    assert done.workflow == load_workflow(SHARED)
    refused(verl_dag("train", SHARED, f"workflow={SHARED}"), "names the workflow, too; pass only one")
    refused(verl_dag("train", f"workflow={SHARED}"), "data.train_files")


def test_problem_files_of_every_kind_become_the_same_samples(tmp_path):
    rows = [{"q": f"What is {i}?", "a": i} for i in range(3)]
    (tmp_path / "p.json").write_text(json.dumps(rows))
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    columns = Columns("q", "a", add_prompt_suffix=" Box it.")
    kinds = [load_samples(str(tmp_path / f"p.{kind}"), columns=columns) for kind in ("json", "jsonl", "parquet")]
    assert kinds[0] == kinds[1] == kinds[2] and len(kinds[0]) == 3
    assert kinds[0][2]["prompt"] == [{"role": "user", "content": "What is 2? Box it."}]
    assert (kinds[0][2]["ground_truth"], kinds[0][2]["data_source"]) == ("2", "p")


def test_a_problem_file_without_the_column_is_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"q": "1?", "answer": "1"}\n')
    with pytest.raises(UserError, match=r"data.val_files: .*row 1 has no 'problem' .*data.input_key=COLUMN"):
        load_samples(str(tmp_path / "p.jsonl"), what="data.val_files")


def test_doctor_finds_this_machine_fit(monkeypatch, full_isolation):
    lines: list[str] = []
    monkeypatch.setattr(doctor, "MIN_MEMORY_GIB", 0)
    monkeypatch.setattr(doctor, "MIN_DISK_GIB", 0)
    assert doctor.examine(lines.append), lines
    assert [line.split()[1] for line in lines] == list(doctor.CHECKS)


def test_doctor_goes_on_after_a_failure_and_says_so(verl_dag, monkeypatch):
    def broken() -> str:
        raise RuntimeError("on\nfire")

    def absent() -> str:
        raise doctor.Note("not there")

    monkeypatch.setattr(doctor, "CHECKS", {"bad": broken, "extra": absent, "good": lambda: "fine"})
    lines: list[str] = []
    assert not doctor.examine(lines.append)
    assert [line.split(maxsplit=2) for line in lines] == [
        ["FAIL", "bad", "RuntimeError: on fire"],
        ["note", "extra", "not there"],
        ["ok", "good", "fine"],
    ]
    assert verl_dag("doctor").code == 1


def test_doctor_refuses_what_a_run_to_fill_caches_cannot_use(verl_dag, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = verl_dag("doctor", "--warm", tiny_model, "platform=cpu", "data.train_batch_size=4")
    assert (run.code, run.config.data.train_batch_size, run.config.trainer.total_training_steps) == (0, 4, 1)
    assert run.model == str(tiny_model) and not list(tmp_path.iterdir())
    assert verl_dag("doctor", "--warm", tiny_model, "data.train_batch_sise=4").code == 1
    assert not list(tmp_path.iterdir())
    other = verl_dag("doctor", "--warm", tiny_model, "w.yaml")
    assert other.code == 2 and "--warm trains a workflow of its own; remove w.yaml" in other.err


@pytest.mark.slow
def test_doctor_trains_one_step_to_fill_caches(tiny_model, tmp_path, zygote, joined_ray):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text("w1w0")  # its tokenizer has no tokens for English
    (tmp_path / "triton").mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    command = [zygote.python, "-m", "recipe.dag.cli", "doctor", "--warm", str(model), "platform=cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=env | joined_ray, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert re.search(rf"ok    kernels     one step took \d+ s; kernels are in {tmp_path}/triton", done.stdout)
    assert not list(tmp_path.glob("verl-dag-warm-*"))


NVIDIA_SMI = "#!/bin/sh\necho '{driver}'\n"


@pytest.fixture
def gpu_host(tmp_path, monkeypatch):
    """A machine with this driver, glibc, Python and (SGLang's version or None)."""

    def make(driver="580.95.05", glibc="2.36", python=(3, 12), sglang="0.5.12"):
        (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI.format(driver=driver))
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(doctor.platform, "libc_ver", lambda: ("glibc", glibc))
        monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(doctor.sys, "version_info", (*python, 3))
        monkeypatch.setattr(doctor, "package_version", lambda package: sglang)

    return make


def test_doctor_finds_a_gpu_host_fit(gpu_host):
    gpu_host()
    assert doctor.check_gpu_host().startswith("driver 580.95.05, glibc 2.36, Python 3.12: fit")


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"driver": "535.183.01"}, "driver 535.183.01 is older than 580"),
        ({"glibc": "2.31"}, "glibc 2.31 is older than 2.34"),
        ({"python": (3, 11)}, "for Python 3.12, not 3.11"),
    ],
)
def test_doctor_names_what_a_gpu_host_lacks(gpu_host, machine, reason):
    gpu_host(**machine)
    with pytest.raises(doctor.Unfit, match=reason):
        doctor.check_gpu_host()
    gpu_host(**machine, sglang=None)
    with pytest.raises(doctor.Note, match=reason):
        doctor.check_gpu_host()


@pytest.mark.parametrize("answer", ["", "NVIDIA-SMI has failed"])
def test_doctor_says_without_a_driver_what_the_gpu_installation_needs(gpu_host, answer):
    gpu_host(driver=answer)
    with pytest.raises(doctor.Note, match=r"needs driver 580, glibc 2\.34, Python 3\.12"):
        doctor.check_gpu_host()


def test_doctor_wants_the_pinned_verl(monkeypatch):
    assert doctor.check_verl().startswith(doctor.pinned_verl())
    monkeypatch.setattr(doctor, "package_version", lambda package: "0.0.1")
    with pytest.raises(doctor.Unfit, match=f"needs verl=={doctor.pinned_verl()}"):
        doctor.check_verl()


@pytest.mark.slow
def test_an_evaluation_of_a_checkpoint_for_real(tiny_model, tmp_path, zygote, joined_ray):
    """A frozen policy: the server loads its weights from disk. Results are in the order of the data."""
    (tmp_path / "w.yaml").write_text(ONE_AGENT)
    (tmp_path / "hooks.py").write_text(HOOKS)
    rows = [{"problem": f"w{i}", "answer": str(int(i % 3 == 0))} for i in range(9)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = tmp_path / "checkpoints" / "global_step_1" / "main" / "actor" / "huggingface"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (tmp_path / "checkpoints" / "global_step_1" / "run.json").write_text('{"step": 1, "policies": {}}')
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    arguments = ["eval", "w.yaml", "--checkpoint", "checkpoints", "--data", "p.jsonl", "--output", "out", "-n", "2"]
    overrides = ["platform=cpu", "data.max_prompt_length=16", "data.max_response_length=16"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **joined_ray}
    env.pop("MODEL_PATH", None)

    def evaluate() -> str:
        command = [zygote.python, "-m", "recipe.dag.cli", *arguments, *overrides]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout

    assert "accuracy 0.3333, 18 episodes, 0 errors" in evaluate()
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [item["prompt"] for item in results] == [f"w{i}" for i in range(9) for _ in range(2)]
    assert all(item["trajectory"][0]["agent_output"] for item in results)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["final_accuracy"] == pytest.approx(1 / 3) and summary["samples_per_problem"] == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("episodes.jsonl", "evaluation.json", "logs", "results.json", "run", "summary.json")
    ]
    launch = json.loads((tmp_path / "out" / "run" / "1" / "launch.json").read_text())
    assert Path(launch["evaluated"]).name == "global_step_1" and "eval" in launch["command"]
    # As if it had been killed: what is on disk is not run again, and the results are the same.
    log = tmp_path / "out" / "episodes.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:11]) + lines[11][:40])
    again = evaluate()
    assert "holds 11 of 18 episodes" in again and "accuracy 0.3333, 18 episodes, 0 errors" in again
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results
