"""A project on disk whose run resumes: the command as a user types it, up to where Ray would start."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from ruamel.yaml import YAML

from recipe.dag.app.launch import launch
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.settings import defaults
from recipe.dag.settings.compose import compose_config
from recipe.dag.train import checkpoint
from recipe.dag.train.data import Columns, load_samples
from recipe.dag.train.fingerprint import Fingerprint, fingerprint_of
from recipe.dag.train.models import find_models
from recipe.dag.train.resume import find_start
from recipe.dag.workflow.schema import Workflow

yaml = YAML(typ="safe")

WORKFLOW = """\
dag_id: pair
agents: [{name: solver, policy: main}, {name: judge, policy: fixed}]
policies: {main: {model: {path: "${oc.env:MODEL_PATH}"}}, fixed: {model: {path: FIXED}, frozen: true}}
algorithm: {estimator: grpo}
nodes:
  - {id: solve, agent: solver, hooks: hooks.py}
  - {id: judge, agent: judge, after: solve}
  - {id: reward, reward: score.py:score, after: judge}
"""
HOOKS = "from words import ASK\n\ndef pre_process(tokenizer, prompt_ids, obs, **kwargs):\n    return prompt_ids\n"
PROBLEMS = [{"problem": f"{i} + 1", "answer": str(i + 1)} for i in range(4)]
UNSEEN = [{"problem": f"{i} + 2", "answer": str(i + 2)} for i in range(2)]


class Started(Exception):
    """The run got past all checks."""


def overrides_of(project: Path, *more: str) -> list[str]:
    return [
        *(f"workflow={project}/flow.yaml", f"data.train_files={project}/train.json", "platform=cpu"),
        *(f"data.val_files={project}/val.json", f"output_dir={project}/out", "trainer.total_training_steps=9", *more),
    ]


@cache
def _defaults() -> DictConfig:
    return compose_config("dag", ["workflow=any"])


def inputs(project: Path, *more: str) -> tuple[DictConfig, Workflow, Fingerprint, int]:
    """What `launch` makes of the same overrides: configuration, workflow, fingerprint, and the number of problems."""
    config = copy.deepcopy(_defaults())
    for override in overrides_of(project, *more):
        key, _, value = override.partition("=")
        OmegaConf.update(config, key, yaml.load(value), force_add=".engine_kwargs." in key)
    defaults.apply(config, defaults.on_cpu(config))
    flow = load_workflow(config.workflow)
    files = {"train": config.data.train_files, "test": config.data.val_files}
    data = [load_samples(names, columns=Columns(split=split)) for split, names in files.items()]
    return config, flow, fingerprint_of(config, flow, find_models(flow), *data), len(data[0])


def go(project: Path, *more: str) -> None:
    """Resume as `launch` does it, without the seconds that composing a configuration takes."""
    config, flow, fingerprint, samples = inputs(project, *more)
    assert find_start(config, flow, fingerprint, samples=samples, platform="cpu").step == 3


def launched(project: Path, *more: str) -> None:
    """Launch the run, which has to get past all checks."""
    with pytest.raises(Started):
        launch("dag", overrides_of(project, *more))


def save(project: Path, **facts) -> Path:
    """The checkpoint that the run's third step leaves; `facts` replace what it says of the run."""
    run_info = {"policies": {"main": 1}, "drawn": 3, "fingerprint": inputs(project)[2].items} | facts
    run_info = {key: value for key, value in run_info.items() if value is not None}
    return checkpoint.save(project / "out" / "checkpoints", 3, run_info, write_shards, keep=2)


def write_shards(folder: Path) -> None:
    actor = folder / "main" / "actor"
    actor.mkdir(parents=True)
    for name in ("model", "optim", "extra_state"):
        torch.save({}, actor / f"{name}_world_size_1_rank_0.pt")


def reported(capsys) -> str:
    """What a launch has said on stderr, without the phases that it announces."""
    lines = capsys.readouterr().err.splitlines(keepends=True)
    return "".join(line for line in lines if not line.endswith(" ...\n"))


def edit(path: Path, old: str, new: str) -> None:
    assert old in (text := path.read_text())
    path.write_text(text.replace(old, new))


def other_weights(folder: Path) -> None:
    """The same sizes, shapes and configuration."""
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
