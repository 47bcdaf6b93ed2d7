"""Checkpoints of supervised fine-tuning, in the form of a run's (`recipe.dag.train.checkpoint`).

Invariant: a checkpoint is complete or absent, and belongs to one experiment: data, model and settings that determine
the weights are recorded in it and compared on resuming. `checkpoints/global_step_N/<policy>/actor/huggingface` is the
model, as in a checkpoint of reinforcement learning.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from recipe.dag.core.errors import UserError
from recipe.dag.policy.safe_load import weights_only
from recipe.dag.policy.shards import Saved, adapters_saved, check_complete, check_written, link_files
from recipe.dag.settings.learned_config import learned_values
from recipe.dag.train import checkpoint
from recipe.dag.train.digest import model_digest
from recipe.dag.train.fingerprint import Fingerprint, Items, differences
from recipe.dag.train.resume import check_processes, report_differences
from recipe.dag.train.sft.compose import adapter_shape

DIGITS = 16
"""Of the digest of a training file."""
_ELSEWHERE = "pass another --output, or start over with trainer.resume_mode=disable"


def experiment(config: DictConfig) -> Items:
    """Return what determines the weights of a step, JSON-compatible: settings by dotted key, and the content of the
    model and of the training files."""
    files = [config.data.train_files] if isinstance(config.data.train_files, str) else config.data.train_files
    values = learned_values(config, "sft")
    if _depends_on_end(config.optim):
        end = "total_epochs" if config.trainer.total_training_steps is None else "total_training_steps"
        values[f"trainer.{end}"] = config.trainer[end]
    return {
        **values,
        "model.path": {"name": config.model.path, "digest": model_digest(config.model.path)},
        "data.train_files": {"name": ", ".join(files), "digest": ",".join(_digest(Path(file)) for file in files)},
    }


def _depends_on_end(optim: DictConfig) -> bool:
    """Return whether the learning rate of a step depends on the number of all steps."""
    warmup_of_all = optim.lr_warmup_steps <= 0 and optim.lr_warmup_steps_ratio > 0
    return optim.lr_scheduler_type == "cosine" or warmup_of_all


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:DIGITS]


def find_start(config: DictConfig, now: Items, *, processes: int) -> Path | None:
    """Return the checkpoint to resume from, or None. Raises UserError for one of another experiment (unless
    trainer.resume_mode=force), of another number of processes, and for one that is incomplete."""
    folder = checkpoint.find(Path(config.trainer.default_local_dir), mode=config.trainer.resume_mode, path=None)
    if folder is None:
        return None
    stored = checkpoint.read(folder)
    if "sft" not in stored:
        raise UserError(f"{folder}: not a checkpoint of verl-dag sft; pass another --output")
    if config.policy not in stored["policies"]:
        names = ", ".join(stored["policies"])
        raise UserError(
            f"{folder}: holds the policy {names}, not {config.policy}; set policy={names}, or pass another --output"
        )
    check_processes(folder, stored, {config.policy: processes}, advice=_ELSEWHERE)
    differing = _differences(stored["sft"], now)
    report_differences(
        folder, differing, forced=config.trainer.resume_mode == "force", elsewhere="pass another --output"
    )
    check_complete(folder, _saved(config, processes, "load_contents"))
    return folder


def _saved(config: DictConfig, processes: int, key: str) -> list[Saved]:
    """Return what a checkpoint has. `key`: of the configuration of a whole model's checkpoints."""
    if adapter_shape(config) is not None:
        return [*adapters_saved(config.policy, processes, critic=False)]
    return [Saved(f"{config.policy}/actor", processes, tuple(config.checkpoint[key]))]


def check_intact(folder: Path) -> None:
    """Raise UserError if a file of the checkpoint is not as it was saved."""
    checkpoint.check_intact(
        folder,
        lambda other: f"write {checkpoint.step_of(other)} into {folder.parent / checkpoint.TRACKER} to resume from it",
    )


def _differences(stored: Items, now: Items) -> list[str]:
    chosen = now
    if not isinstance(model := stored.get("model.path"), dict):  # an earlier version, which recorded fewer settings
        recorded = ("data.", "optim.", "model.override_config.", "trainer.") if "model" in stored else ()
        chosen = {key: value for key, value in now.items() if key.startswith(recorded)}
        files = ",".join(digest[:DIGITS] for digest in stored.get("data.train_files", ()))
        contents = {
            "model.path": {"name": model, "digest": stored.pop("model", "")},
            "data.train_files": {"name": "other files", "digest": files},
        }
        stored = stored | contents
    return differences({"learned": stored}, Fingerprint({"learned": now}, {"learned": chosen}, {}))[0]


class Checkpoints:
    """Writes and reads the checkpoints of one run; every process calls each method. `engine`: verl's, of FSDP."""

    def __init__(self, config: DictConfig, engine: Any, facts: Items, *, rank: int, processes: int):
        self._config, self._engine, self._facts = config, engine, facts
        self._rank, self._processes = rank, processes
        self._root = Path(config.trainer.default_local_dir)
        self._start = find_start(config, facts, processes=processes)

    def load_checkpoint(self) -> int:
        """Load the checkpoint to resume from and return its step; 0 without one."""
        if self._start is None:
            return 0
        folder = checkpoint.policy_folder(self._start, self._config.policy)
        with weights_only(folder), keep_options(self._engine.optimizer, self._engine.lr_scheduler):
            if adapter_shape(self._config) is not None:
                self._engine.load(self._config.policy, folder)
            else:
                self._engine.load_checkpoint(str(folder), del_local_after_load=False)
        return int(checkpoint.read(self._start)["step"])

    def save(self, step: int) -> Path:
        """Write the checkpoint of `step` and return its folder. Raises UserError if the disk is full, in whichever
        process finds that out; torchrun then ends the others."""
        final = checkpoint.step_folder(self._root, step)
        facts = {"policies": {self._config.policy: self._processes}, "sft": self._facts}
        with checkpoint.full_disk_named(self._root, step):
            if self._rank != 0:
                self._write(self._root / f".partial_{final.name}", step)
                return final
            return checkpoint.save(
                self._root,
                step,
                facts,
                lambda folder: self._write(folder, step),
                keep=int(self._config.trainer.max_ckpt_to_keep),
            )

    def _write(self, folder: Path, step: int) -> None:
        import torch

        torch.distributed.barrier()  # the first process has made the folder
        own = checkpoint.policy_folder(folder, self._config.policy)
        if adapter_shape(self._config) is not None:
            self._engine.save(self._config.policy, own)
        else:
            self._engine.save_checkpoint(str(own), global_step=step)
        torch.distributed.barrier()
        if self._rank == 0:
            check_written(folder, _saved(self._config, self._processes, "save_contents"))


@contextmanager
def keep_options(optimizer: Optimizer, scheduler: LambdaLR) -> Iterator[None]:
    """Keep learning rate and other options of an optimizer while its state is loaded: a checkpoint has those of the run
    that wrote it, and a forced resume may have others. The schedule goes on at the step that is loaded."""
    rates = list(scheduler.base_lrs)
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    yield
    scheduler.base_lrs = rates
    rates_now = [rate * factor(scheduler.last_epoch) for rate, factor in zip(rates, scheduler.lr_lambdas, strict=True)]
    for group, kept, rate in zip(optimizer.param_groups, options, rates_now, strict=True):
        group.update(kept)
        group["lr"] = rate
    scheduler._last_lr = rates_now


def published(config: DictConfig) -> Path:
    """Return the folder that gets the trained model, or the adapter."""
    return Path(config.output_dir) / ("huggingface" if adapter_shape(config) is None else "adapter")


def publish_model(config: DictConfig, folder: Path) -> Path:
    """Put the model or the adapter of the checkpoint `folder` at `published`, without another copy of its files where
    the file system has hard links."""
    source, target = checkpoint.policy_folder(folder, config.policy), published(config)
    source = source if adapter_shape(config) is not None else source / "huggingface"
    partial = target.with_name(f".{target.name}.partial")
    try:
        link_files(source, partial, "optim_*")
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error}); the model is {source}") from error
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    return target
