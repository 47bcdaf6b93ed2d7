"""The files of a checkpoint: which must exist, and the check that they are complete.

Invariant: a run can resume from a checkpoint that `check_written` accepts: this process sees every file that each rank
of each policy had to save, to the last byte.
"""

from __future__ import annotations

import os
import shutil
import time
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.dag.core.errors import UserError
from recipe.dag.core.flatten import flatten
from recipe.dag.workflow.adapter_shape import CONFIG, HEAD, WEIGHTS
from recipe.dag.workflow.schema import Workflow

SHARDS = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""verl's name of a content -> the prefix of its files."""
ADAPTERS = {"adapter": (CONFIG, WEIGHTS), "head": (HEAD,)}
"""What a checkpoint has of an adapter and of a critic's head, besides the optimizer, whose files have the scheduler."""
SNAPSHOT = "snapshot"
"""The folder of a past self's weights in a policy's folder of a checkpoint."""
REFERENCE_CONTENTS = ("model",)
"""What a checkpoint has of a reference that is renewed."""
VISIBLE_S = 30
"""Seconds after which one machine must see on a shared file system what another has written."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The files that one model of a policy, its actor, critic or reference, writes to a checkpoint."""

    folder: str
    """Relative to the checkpoint, such as `main/actor`."""
    world_size: int
    contents: tuple[str, ...]
    """verl's names: model, optimizer, extra, hf_model; or `optimizer` and names out of ADAPTERS."""


def adapters_saved(policy: str, world_size: int, *, critic: bool) -> Iterator[Saved]:
    """Yield what is saved of an adapter policy, with a `critic` of its own or without."""
    yield Saved(f"{policy}/actor", world_size, ("optimizer", "adapter"))
    if critic:
        yield Saved(f"{policy}/critic", world_size, ("optimizer", "adapter", "head"))


def missing_files(step_folder: Path, models: Iterable[Saved]) -> Iterator[str]:
    """Yield the names of files that are missing from `step_folder`; truncated files count as missing."""
    for model in models:
        folder = step_folder / model.folder
        for kind in model.contents:
            if kind in SHARDS:
                names = [f"{SHARDS[kind]}_world_size_{model.world_size}_rank_{r}.pt" for r in range(model.world_size)]
                yield from (f"{model.folder}/{name}" for name in names if not _is_whole(folder / name))
            elif kind == "hf_model" and not any(_files(folder / "huggingface", (".safetensors", ".bin"))):
                yield f"{model.folder}/huggingface/*.safetensors"
            elif kind in ADAPTERS:
                yield from (f"{model.folder}/{name}" for name in ADAPTERS[kind] if not (folder / name).is_file())


def check_written(step_folder: Path, models: Iterable[Saved], *, patience_s: float = VISIBLE_S) -> None:
    """Raise UserError if files that the workers saved are not visible in `step_folder` within `patience_s`."""
    deadline = time.monotonic() + patience_s
    while missing := list(missing_files(step_folder, models)):
        if time.monotonic() >= deadline:
            raise UserError(
                f"{step_folder.parent}: the checkpoint was discarded, because {missing[0]} ({len(missing)} missing in "
                "all) did not arrive: the workers write to a folder that this process does not see, or the disk is "
                "full; set trainer.default_local_dir to a folder that all machines share"
            )
        time.sleep(0.2)


def check_loadable(folder: Path, facts: dict[str, Any], config: DictConfig, workflow: Workflow) -> None:
    """Raise UserError if the checkpoint `folder` lacks a file that the run would load. `facts`: the checkpoint's
    run.json, with the number of processes that wrote it."""
    advice = "pass another one with trainer.resume_mode=resume_path and trainer.resume_from_path, or "
    check_complete(folder, _contents(facts, config, workflow, "load_contents"), advice)


def check_complete(folder: Path, models: Iterable[Saved], advice: str = "") -> None:
    """Raise UserError if a checkpoint lacks a file of the models. `advice`: what to do besides starting over."""
    if missing := list(missing_files(folder, models)):
        raise UserError(
            f"{folder}: {missing[0]} is missing or torn ({len(missing)} in all), so the run cannot resume from it; "
            f"{advice}start over with trainer.resume_mode=disable"
        )


def shortfall(config: DictConfig, workflow: Workflow) -> str | None:
    """Return a warning if the run's checkpoints will lack contents that a resume loads; None otherwise."""
    names = workflow.trained_policies()
    critics = [name for name in names if workflow.critic_owner(name) == name]
    facts = {"policies": dict.fromkeys(names, 1), "critics": critics}
    lacking: list[str] = []
    to_save = _contents(facts, config, workflow, "save_contents")
    for loaded, saved in zip(_contents(facts, config, workflow, "load_contents"), to_save, strict=True):
        lacking += [f"{kind} of {loaded.folder}" for kind in loaded.contents if kind not in saved.contents]
    if not lacking:
        return None
    return (
        f"the run cannot resume from its checkpoints: `checkpoint.load_contents` asks for {', '.join(lacking)}, which "
        "`checkpoint.save_contents` leaves out"
    )


def _contents(facts: dict[str, Any], config: DictConfig, workflow: Workflow, key: str) -> Iterator[Saved]:
    """Yield, for each model of the run that the checkpoint holds, the files that its `checkpoint.<key>` selects."""
    for name, world_size in facts["policies"].items():
        policy = workflow.policies.get(name)
        if policy is None:
            continue
        critic = name in facts.get("critics", ()) and policy.critic is not None
        if policy.lora is not None:
            yield from adapters_saved(name, world_size, critic=critic)
            continue
        models = {"actor": ("actor_rollout_ref.actor", "actor.", policy.config)}
        if critic and policy.critic is not None:
            models["critic"] = ("critic", "", policy.critic.config)
        for folder, (branch, prefix, overrides) in models.items():
            # what the policy overrides applies, else the run's configuration; a critic has its actor's strategy
            own = {key: value for key, value, _ in flatten(overrides)}
            default = OmegaConf.select(config, f"{branch}.checkpoint.{key}")
            contents = own.get(f"{prefix}checkpoint.{key}", default)
            yield Saved(f"{name}/{folder}", world_size, tuple(contents))
        if name in facts.get("references", ()) and policy.reference is not None and policy.reference.refresh:
            yield Saved(f"{name}/reference", world_size, REFERENCE_CONTENTS)
    yield from (Saved(f"{name}/{SNAPSHOT}", 1, ("hf_model",)) for name in workflow.snapshots())


def _is_whole(path: Path) -> bool:
    """Check that torch's file, a zip archive with its directory at the end, is not truncated."""
    _files(path.parent)  # listing the folder makes a network file system refresh its cache
    try:
        return zipfile.is_zipfile(path)
    except OSError:
        return False


def _files(folder: Path, suffixes: tuple[str, ...] = ("",)) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder) if name.endswith(suffixes)]
    except OSError:
        return []


def link_files(source: Path, target: Path, *left_out: str) -> None:
    """Make `target` a copy of a folder, with hard links where the file system has them, without the files whose names
    match the patterns `left_out`."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=_link, ignore=shutil.ignore_patterns(*left_out))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
