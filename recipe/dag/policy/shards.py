"""The files of a checkpoint: which there must be, and whether they are whole.

Invariant: a checkpoint that `check_written` has passed can be resumed from: each rank of each policy has left all that
it was asked to save, in the folder as this process sees it, to the last byte.
"""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.dag.errors import UserError
from recipe.dag.workflow.dotted import flat
from recipe.dag.workflow.schema import Workflow

SHARDS = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""verl's name of a content to that of its files."""
VISIBLE_S = 30
"""How long a shared file system may take until one machine sees what another has written."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What one model of a policy, its actor or critic, leaves in a checkpoint."""

    folder: str
    """Inside the checkpoint, such as `main/actor`."""
    world_size: int
    contents: tuple[str, ...]
    """verl's: model, optimizer, extra, hf_model; none where verl's engine names its files otherwise."""

    @classmethod
    def of(cls, folder: str, world_size: int, strategy: str, contents: Sequence[str]) -> Saved:
        """Return what a model leaves that verl's engine `strategy` trains and that saves or loads `contents`."""
        return cls(folder, world_size, tuple(contents) if strategy.startswith("fsdp") else ())


def missing_files(step_folder: Path, models: Iterable[Saved]) -> Iterator[str]:
    """Yield what `step_folder` lacks, by the names of files inside it; torn files count as missing."""
    for model in models:
        folder = step_folder / model.folder
        for kind in model.contents:
            if kind in SHARDS:
                names = [f"{SHARDS[kind]}_world_size_{model.world_size}_rank_{r}.pt" for r in range(model.world_size)]
                yield from (f"{model.folder}/{name}" for name in names if not _is_whole(folder / name))
            elif kind == "hf_model" and not any(_files(folder / "huggingface", (".safetensors", ".bin"))):
                yield f"{model.folder}/huggingface/*.safetensors"


def check_written(step_folder: Path, models: Iterable[Saved], *, patience_s: float = VISIBLE_S) -> None:
    """Raise UserError where what the workers have saved is not seen in `step_folder` after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while missing := list(missing_files(step_folder, models)):
        if time.monotonic() >= deadline:
            raise UserError(
                f"{step_folder.parent}: the checkpoint was not kept, because {missing[0]} ({len(missing)} missing in "
                "all) did not arrive: the workers write to a folder that this process does not see, or the disk is "
                "full; set trainer.default_local_dir to a folder that all machines share"
            )
        time.sleep(0.2)


def check_loadable(folder: Path, facts: dict[str, Any], config: DictConfig, workflow: Workflow) -> None:
    """Raise UserError where the checkpoint `folder` lacks a file that the run would load. `facts`: its own, which say
    how many processes have written it."""
    if missing := list(missing_files(folder, _to_load(facts, config, workflow))):
        raise UserError(
            f"{folder}: {missing[0]} is missing or torn ({len(missing)} in all), so the run cannot go on from there; "
            "name another with trainer.resume_mode=resume_path and trainer.resume_from_path, or start anew with "
            "trainer.resume_mode=disable"
        )


def shortfall(config: DictConfig, workflow: Workflow) -> str | None:
    """Say which contents the run's checkpoints will lack to resume from; None where they will lack none."""
    names = workflow.trained_policies()
    critics = [name for name in names if workflow.critic_owner(name) == name]
    facts = {"policies": dict.fromkeys(names, 1), "critics": critics}
    lacking = [
        f"{kind} of {loaded.folder}"
        for loaded, saved in zip(
            _to_load(facts, config, workflow), _to_load(facts, config, workflow, "save_contents"), strict=True
        )
        for kind in loaded.contents
        if kind not in saved.contents
    ]
    if not lacking:
        return None
    return (
        f"the run cannot resume from its checkpoints: `checkpoint.load_contents` asks for {', '.join(lacking)}, which "
        "`checkpoint.save_contents` leaves out"
    )


def _to_load(
    facts: dict[str, Any], config: DictConfig, workflow: Workflow, key: str = "load_contents"
) -> Iterator[Saved]:
    for name, world_size in facts["policies"].items():
        policy = workflow.policies.get(name)
        if policy is None:
            continue
        models = {"actor": ("actor_rollout_ref.actor", "actor.", policy.config)}
        if name in facts.get("critics", ()) and policy.critic is not None:
            models["critic"] = ("critic", "", policy.critic.config)
        for folder, (branch, prefix, overrides) in models.items():
            own = {key: value for key, value, _ in flat(overrides)}
            strategy = own.get(f"{prefix}strategy", config.actor_rollout_ref.actor.strategy)
            default = OmegaConf.select(config, f"{branch}.checkpoint.{key}")
            contents = own.get(f"{prefix}checkpoint.{key}", default)
            yield Saved.of(f"{name}/{folder}", world_size, strategy, contents)


def _is_whole(path: Path) -> bool:
    """Whether torch's file, a zip archive whose list of contents stands last, has its end."""
    _files(path.parent)  # a listing makes a network file system look again
    try:
        return zipfile.is_zipfile(path)
    except OSError:
        return False


def _files(folder: Path, suffixes: tuple[str, ...] = ("",)) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder) if name.endswith(suffixes)]
    except OSError:
        return []
