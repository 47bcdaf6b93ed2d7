"""Checkpoints: complete or absent.

Invariant: a checkpoint is written under a temporary name and renamed once it is complete; the tracker file
`latest_checkpointed_iteration.txt` (verl's name) is replaced last. A run killed at any moment resumes from the
checkpoint that the tracker names.

    checkpoints/global_step_20/<policy>/actor/...     verl's FSDP shards, and `huggingface/` to load elsewhere
    checkpoints/global_step_20/<policy>/critic/...    the same for its critic, if the policy owns one
    checkpoints/global_step_20/mixer.pt               state of vdn and qmix (train/team_critic.py)
    checkpoints/global_step_20/run.json               step, policies and their processes, batches of samples consumed,
                                                      state of the bias monitor (coach/bias.py), and the run's
                                                      fingerprint (train/fingerprint.py)
    checkpoints/latest_checkpointed_iteration.txt
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipe.dag.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"


def step_folder(root: Path, step: int) -> Path:
    return root / f"global_step_{step}"


def policy_folder(folder: Path, policy: str) -> Path:
    return folder / policy / "actor"


def save(root: Path, step: int, run_info: dict[str, Any], write: Callable[[Path], None], *, keep: int) -> Path:
    """Write the checkpoint of `step` with `run_info` in its run.json, and delete all but the last `keep` (0: none).

    `write(folder)` writes the policies and raises if one of their files is missing afterwards; the folder gets its
    final name only after `write` returns."""
    final = step_folder(root, step)
    for abandoned in root.glob(".partial_*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    partial = root / f".partial_{final.name}"
    partial.mkdir(parents=True)
    try:
        write(partial)
        (partial / "run.json").write_text(json.dumps({"step": step, **run_info}, indent=1))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if final.exists() and not (final / "run.json").is_file():
        os.replace(final, _free_name(final))  # not ours: verl's own trainer uses the same names
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    tracker = root / f".{TRACKER}"
    tracker.write_text(str(step))
    os.replace(tracker, root / TRACKER)
    if keep > 0:  # later steps belong to an abandoned run and must not push out this one
        for old in sorted(s for s in _steps(root) if s <= step)[:-keep]:
            shutil.rmtree(step_folder(root, old), ignore_errors=True)
    return final


def _free_name(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}.kept{number or ''}") for number in itertools.count())
    return next(name for name in names if not os.path.lexists(name))


def _steps(root: Path) -> list[int]:
    return [int(p.name.rpartition("_")[2]) for p in root.glob("global_step_*") if (p / "run.json").is_file()]


def find(root: Path, *, mode: str, path: str | None) -> Path | None:
    """Return the checkpoint to resume from, or None. `mode` is auto (the one that the tracker names), disable,
    resume_path, or force, which means resume_path if `path` is given and auto otherwise. Raises UserError."""
    if mode == "force":
        mode = "auto" if path is None else "resume_path"
    if mode == "disable":
        return None
    if mode == "resume_path":
        folder = Path(path or "")
        if not (folder / "run.json").is_file():
            raise UserError(f"trainer.resume_from_path: {path} is not a checkpoint (run.json is missing)")
        return folder
    if mode != "auto":
        raise UserError(f"trainer.resume_mode={mode} is unknown; choose auto, disable, force or resume_path")
    tracker = root / TRACKER
    if not tracker.is_file():
        return None
    folder = step_folder(root, int(tracker.read_text().strip()))
    if not (folder / "run.json").is_file():
        raise UserError(
            f"{tracker} names {folder.name}, which does not exist; set trainer.resume_mode=disable to start over"
        )
    return folder


def read(folder: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's run.json."""
    return json.loads((folder / "run.json").read_text())
