"""`verl-dag sft`: what it refuses before it starts, and whole runs on a CPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from recipe.dag.app.evaluate import checkpoint_models, find_checkpoint
from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.train.sft import launch as sft
from recipe.dag.train.sft import process
from recipe.dag.train.sft.compose import compose_sft
from recipe.dag.workflow.machine import Machine
from tests.dialogues import SCHEMA, dialogue, save_model, tokenizer, write_parquet

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "recipe" / "retool" / "train_sft.sh"
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_parquet(folder / "train.parquet", [dialogue(seed) for seed in range(24)], [SCHEMA])
    write_parquet(folder / "val.parquet", [dialogue(seed) for seed in range(100, 105)], [SCHEMA])
    return folder


def refusal(data, model, output, *settings) -> str:
    with pytest.raises(UserError) as caught:
        sft.launch([f"data.train_files={data}", f"model.path={model}", f"output_dir={output}", *settings])
    return str(caught.value)


@pytest.mark.parametrize(
    ("gpus", "settings", "recompute"),
    [
        ((80 * 10**9,), [], False),
        ((80 * 10**9, 10**9), [], True),
        ((), [], True),
        ((80 * 10**9,), ["model.enable_gradient_checkpointing=true"], True),
        ((80 * 10**9,), ["model.use_fused_kernels=false"], True),
    ],
    ids=str,
)
def test_layers_recompute_nothing_where_all_activations_fit(
    gpus, settings, recompute, data, model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(process, "this_machine", lambda: Machine(gpus))
    paths = [f"data.train_files={data}/train.parquet", f"model.path={model}", f"output_dir={tmp_path}"]
    config = compose_sft([*paths, "platform=cuda", "data.train_batch_size=4", *settings])
    process.check(config, processes=1)
    assert config.model.enable_gradient_checkpointing is recompute
    line = f"recomputed in the backward pass: {'all layers' if recompute else 'none'}\n"
    assert (line in capsys.readouterr().out) == (settings[:1] != ["model.enable_gradient_checkpointing=true"])


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("optim.lr=fast", "optim.lr=fast: it takes"),
        ("trainer.total_epoch=3", "unknown key; did you mean `trainer.total_epochs`?"),
        ("lr=1", "lr=1: unknown key; did you mean `optim.lr`?"),
        ("data.truncation=middle", "it takes"),
        ("model.lora_rank=8", "nothing reads it; pass `lora.rank=...`"),
        ("trainer.nccl_timeout=0", "it takes a whole number, 1 or more"),
        ("optim.num_cycles=1", "nothing reads it with optim.lr_scheduler_type=constant; remove it, or set"),
        ("optim.min_lr_ratio=0.1", "nothing reads it with optim.lr_scheduler_type=constant"),
        ("optim.zero_indexed_step=false", "nothing reads it with optim.lr_scheduler_type=constant"),
        ("data.micro_batch_size_per_gpu=2", "nothing reads it with data.use_dynamic_bsz=true"),
        ("data.custom_cls.name=Mine", "nothing reads it with data.custom_cls.path=pkg://"),
        ("trainer.save_freq=0", "after_each_epoch, -1, or a whole number, 1 or more"),
        ("data.max_token_len_per_gpu=10", "the longest transcript would not fit; raise it"),
        ("data.train_batch_size=25", "more than the 24 transcripts"),
        ("engine.ulysses_sequence_parallel_size=2", "does not divide the 1 processes"),
        ("platform=cuda", "torch sees no GPU"),
    ],
)
def test_a_wrong_setting_is_one_line(data, model, tmp_path, setting, problem):
    message = refusal(data / "train.parquet", model, tmp_path / "out", setting)
    assert problem in message and "\n" not in message
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_key_that_another_setting_makes_idle_is_accepted_beside_the_setting_that_reads_it():
    paths = ["data.train_files=x", "model.path=m", "output_dir=o"]
    cosine = compose_sft([*paths, "optim.num_cycles=1", "optim.lr_scheduler_type=cosine"])
    assert cosine.optim.num_cycles == 1
    fixed = [*paths, "data.use_dynamic_bsz=false"]
    assert compose_sft([*fixed, "data.micro_batch_size_per_gpu=2"]).data.micro_batch_size_per_gpu == 2
    with pytest.raises(UserError, match="max_token_len_per_gpu=9: nothing reads it with data.use_dynamic_bsz=false"):
        compose_sft([*fixed, "data.max_token_len_per_gpu=9"])


def test_a_configuration_file_is_checked_like_the_command_line(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [sft, _self_]\noptim: {lrr: 1}\nmodel: {lora_rank: 4}\n")
    with pytest.raises(UserError) as caught:
        sft.launch([], name="mine", folder=tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2 and "optim.lrr=1: unknown key; did you mean `optim.lr`" in str(caught.value)
    assert any("model.lora_rank=4: nothing reads it" in line for line in lines)


def test_a_model_that_is_none_or_has_no_chat_template_is_one_line(data, model, tmp_path):
    train = data / "train.parquet"
    assert "is not a model directory" in refusal(train, tmp_path / "nothing", tmp_path / "out")
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer(None).save_pretrained(bare)
    assert "has no chat template" in refusal(train, bare, tmp_path / "out", "data.train_batch_size=4")


def test_a_disk_without_room_is_one_line(data, model, tmp_path, monkeypatch, capsys):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(sft.shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    message = refusal(data / "train.parquet", model, tmp_path / "out")
    assert "0.0 GB free, but a checkpoint takes about" in message and "make room" in message
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refusal(data / "train.parquet", model, tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "MODEL, DATA and OUT are needed, 0 given"),
        (["model", "data"], "MODEL, DATA and OUT are needed, 2 given"),
        (["model", "optim.lr=1", "out"], "optim.lr=1 stands where MODEL, DATA or OUT is expected"),
        (["model", "", "out"], "an argument is empty"),
        (["model", "--val", "out"], "--val is not an option here"),
        (["model", "{data}", "out", "experiment"], "experiment is not a setting"),
        (["model", "{data}", "out", "--model=other"], "--model=other is an option"),
        (["model", "nowhere", "out"], "DATA nowhere does not exist"),
        (["model", "{empty}", "out"], "train.parquet does not exist"),
    ],
)
def test_the_script_refuses_wrong_arguments_in_one_line(data, tmp_path, arguments, problem):
    arguments = [a.format(data=data, empty=tmp_path) for a in arguments]
    done = subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert problem in done.stderr and "usage: bash recipe/retool/train_sft.sh" in done.stderr


def test_the_script_passes_its_arguments_on(data, tmp_path):
    shown = tmp_path / "python"
    shown.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    shown.chmod(0o755)
    command = ["bash", str(SCRIPT), "org/model", str(data), "out dir", "optim.lr=1e-5"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHON": str(shown)})
    assert done.stdout.splitlines() == [
        *("-m", "recipe.dag.cli", "sft", f"{data}/train.parquet", "--model", "org/model", "--output", "out dir"),
        *("--val", f"{data}/val.parquet", "--config-name", "sft", "optim.lr=1e-5"),
    ]


@pytest.mark.parametrize(("given", "seconds"), [(None, "3600"), ("5", "5")])
def test_torchrun_leaves_time_for_a_checkpoint_after_sigterm(tmp_path, monkeypatch, given, seconds):
    from torch.distributed.launcher.api import LaunchConfig

    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    started = []

    class Process:
        def __init__(self, arguments, env=None, pass_fds=()):
            started.append(env or os.environ)

        def wait(self):
            return 0

    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    monkeypatch.setattr(sft.subprocess, "Popen", Process)
    assert sft._spawn(OmegaConf.create({"output_dir": str(tmp_path)}), 2) == 0
    assert started[0][name] == seconds and started[0]["PATH"] == os.environ["PATH"]
    monkeypatch.setenv(name, started[0][name])
    assert LaunchConfig(1, 1, 2).shutdown_timeout == int(seconds)  # torch reads the variable


@pytest.mark.timeout(1800)
def test_every_process_group_has_the_time_out_of_the_settings(data, model, tmp_path, zygote):
    arguments = [f"data.train_files={data}/train.parquet", f"model.path={model}", f"output_dir={tmp_path}/out"]
    arguments += ["platform=cpu", "data.train_batch_size=8", "data.max_length=2048", "trainer.nccl_timeout=4321"]
    done = subprocess.run(
        [zygote.python, str(ROOT / "tests" / "train" / "sft" / "sft_timeouts.py"), *arguments],
        env=ENV,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    times = json.loads(done.stdout.splitlines()[-1])
    assert times == [4321.0, 4321.0]  # the default group's, and that of a mesh


def command(python: Path, data: Path, model: str, output: Path, *settings: str) -> list[str]:
    return [
        *(str(python), "-m", "recipe.dag.cli", "sft", str(data / "train.parquet"), "--model", model),
        *("--output", str(output), "--val", str(data / "val.parquet"), "--config-name", "sft_small"),
        *("data.train_batch_size=8", "data.max_token_len_per_gpu=2048", "platform=cpu", *settings),
    ]


def losses(output: Path) -> list[tuple]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    keys = ("train/loss", "train/grad_norm", "train/lr", "train/tokens", "val/loss")
    return [(line["step"], *(line.get(key) for key in keys)) for line in lines]


def kill_at(step: int, output: Path, arguments: list[str], signum: int) -> int:
    """Run until metrics.jsonl has `step`, send the signal, and return the exit code."""
    process = subprocess.Popen(arguments, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while f'"step":{step},' not in _text(output / "metrics.jsonl"):
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.02)
        process.send_signal(signum)
        return process.wait(900)
    finally:
        process.kill()


def _text(path: Path) -> str:
    return path.read_text().replace(" ", "") if path.is_file() else ""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_lost_process_ends_the_others_and_is_named_in_one_line(data, model, tmp_path, zygote):
    arguments = command(zygote.python, data, model, tmp_path, "trainer.n_gpus_per_node=2", "trainer.total_epochs=50")
    run = subprocess.Popen(arguments, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while '"step":2,' not in _text(tmp_path / "metrics.jsonl"):
            assert run.poll() is None, run.communicate()
            time.sleep(0.05)
        settings = f"{tmp_path}/run/sft.yaml"
        mine = [each for each in psutil.process_iter(["cmdline"]) if settings in (each.info["cmdline"] or ())]
        (rank,) = [each for each in mine if each.environ().get("RANK") == "1"]
        rank.kill()
        errors = run.communicate(timeout=900)[1].splitlines()
    finally:
        run.kill()
    assert run.returncode == 1 and not [line for line in errors if "Traceback" in line or "rank0" in line]
    assert errors[-1] == (
        f"error: process 1 of 2 (pid {rank.pid}) ended with SIGKILL, and the others with it; their errors are in "
        f"{tmp_path}/run/rank_*.log. The same command resumes from the last checkpoint"
    )
    assert {path.name for path in (tmp_path / "run").glob("rank_*.log")} == {"rank_0.log", "rank_1.log"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_training_lowers_the_loss_and_a_killed_run_ends_like_an_undisturbed_one(data, model, tmp_path, zygote):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = ("trainer.total_epochs=4", "trainer.save_freq=2", "trainer.test_freq=1", "optim.lr=0.01")
    settings += ("optim.lr_scheduler_type=cosine",)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = subprocess.run(
        command(zygote.python, data, model, whole, *settings), env=ENV, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"model: {whole}/huggingface" in done.stdout
    assert all(f"step {step}/12 " in done.stdout for step in range(1, 13)), "each one validates, so each has a line"
    curve = losses(whole)
    assert [row[0] for row in curve] == list(range(13)) and curve[0][-1] is not None
    assert curve[-1][1] < 0.7 * curve[1][1] and curve[-1][-1] < 0.7 * curve[0][-1]

    arguments = command(zygote.python, data, model, killed, *settings)
    assert kill_at(3, killed, arguments, signal.SIGKILL) == -signal.SIGKILL
    assert kill_at(6, killed, arguments, signal.SIGTERM) == 128 + signal.SIGTERM
    done = subprocess.run(arguments, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0 and "resuming from" in done.stdout, done.stderr[-3000:]
    assert losses(killed) == curve
    weights = [load_file(folder / "huggingface" / "model.safetensors") for folder in (whole, killed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    step = find_checkpoint(whole)
    assert step == find_checkpoint(whole / "checkpoints") and step.name == "global_step_12"
    workflow = load_workflow(ROOT / "workflows" / "workflow_single_agent_tool.yaml")
    assert checkpoint_models(whole, workflow) == {"main": f"{step}/main/actor/huggingface"}
    loaded = AutoModelForCausalLM.from_pretrained(whole / "huggingface")
    assert AutoTokenizer.from_pretrained(whole / "huggingface").chat_template == tokenizer().chat_template
    assert loaded.num_parameters() > 0 and (whole / "curve.png").stat().st_size > 1000

    again = subprocess.run(
        command(zygote.python, data, model, whole, *settings), env=ENV, capture_output=True, text=True
    )
    assert again.returncode == 0 and "nothing to do; raise trainer.total_epochs" in again.stdout
    arguments = command(zygote.python, data, model, whole, *settings, "optim.lr=0.02")
    other = subprocess.run(arguments, env=ENV, capture_output=True, text=True)
    assert other.returncode == 2 and "optim.lr: was 0.01, now 0.02" in other.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_adapter_is_trained_resumed_and_a_policy_starts_at_it(data, model, tmp_path, zygote):
    from recipe.dag.platform.adapter_weights import read_adapter, target_layers
    from recipe.dag.train.models import skeleton

    settings = ("lora.rank=4", "optim.lr=0.05", "trainer.save_freq=3", "trainer.test_freq=-1")
    for folder, epochs in (("whole", 2), ("resumed", 1), ("resumed", 2)):
        arguments = command(zygote.python, data, model, tmp_path / folder, *settings, f"trainer.total_epochs={epochs}")
        done = subprocess.run(arguments, env=ENV, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"model: {tmp_path}/{folder}/adapter" in done.stdout
    whole, resumed = (tmp_path / folder / "adapter" for folder in ("whole", "resumed"))
    assert {path.name for path in whole.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert (whole / "adapter_model.safetensors").read_bytes() == (resumed / "adapter_model.safetensors").read_bytes()
    curve = losses(tmp_path / "whole")
    assert curve[-1][-1] < curve[0][-1], "on validation transcripts, before and after"
    layers = target_layers(skeleton(model, trust_remote_code=False), ("all-linear",))
    shape, pairs = read_adapter(whole, layers)
    assert (shape.rank, shape.alpha) == (4, 8.0) and all(b.abs().max() > 0 for _, b in pairs.values())
    for wrong, message in (
        ("lora.targets=[qproj]", "lora.targets: Qwen2ForCausalLM has no linear layer `qproj`"),
        ("optim.optimizer=AdamW8bit", "is for whole models"),
    ):
        assert message in refusal(data / "train.parquet", model, tmp_path / "no", "lora.rank=4", "platform=cpu", wrong)
    assert "with lora.rank=null; set lora.rank, too" in refusal(data, model, tmp_path / "no", "lora.alpha=4")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_processes_have_the_losses_of_one(data, model, tmp_path, zygote):
    curves = []
    for processes in (1, 2):
        output = tmp_path / str(processes)
        settings = ("trainer.total_training_steps=2", f"trainer.n_gpus_per_node={processes}")
        done = subprocess.run(
            command(zygote.python, data, model, output, *settings), env=ENV, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        curves.append(losses(output))
        assert (output / "huggingface" / "model.safetensors").is_file()
    for alone, shared in zip(*curves, strict=True):
        known = [value is not None for value in alone]  # the first validation comes before any training
        assert known == [value is not None for value in shared] and any(known)
        pairs = [pair for pair in zip(alone, shared, strict=True) if pair[0] is not None]
        assert all(one == pytest.approx(other, rel=1e-4) for one, other in pairs)
