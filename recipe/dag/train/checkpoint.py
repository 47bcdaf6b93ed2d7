"""Checkpoints: complete or absent.

Invariant: a checkpoint is written under a temporary name and renamed once it is complete; the tracker file
`latest_checkpointed_iteration.txt` (verl's name) is replaced last. A run killed at any moment resumes from the
checkpoint that the tracker names.

    checkpoints/global_step_20/<policy>/actor/...     verl's FSDP shards, and `huggingface/` to load elsewhere
    checkpoints/global_step_20/<policy>/critic/...    the same for its critic, if the policy owns one
    checkpoints/global_step_20/<policy>/snapshot/...  the weights of a past self (policy/snapshot.py)
    checkpoints/global_step_20/<policy>/reference/... its reference, if it is renewed
    checkpoints/global_step_20/mixer.pt               state of vdn and qmix (train/team_critic.py)
    checkpoints/global_step_20/run.json               step, policies and their processes, batches of samples consumed,
                                                      states of the bias monitor (coach/bias.py), of the user's
                                                      metrics and of the moving averages (train/role_baselines.py),
                                                      the run's fingerprint (train/fingerprint.py), and every file's
                                                      checksum
    checkpoints/latest_checkpointed_iteration.txt
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.train.digest import file_checksum

CHECKSUMS = "files"
"""Key of run.json: the checksum of each file, by its path relative to the checkpoint."""
FIELDS = {
    "step": 0,
    "policies": {},
    CHECKSUMS: {},
    "coach_bias": {},
    "user_metrics": {},
    "role_baselines": {},
    "api_usage": {},
}
"""Keys of run.json and values of their types."""
TRACKER = "latest_checkpointed_iteration.txt"


def step_folder(root: Path, step: int) -> Path:
    return root / f"global_step_{step}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("global_step_"))


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
        run_info = {"step": step, **run_info, CHECKSUMS: _checksums_as_written(partial)}
        (partial / "run.json").write_text(json.dumps(run_info, indent=1))
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


@contextmanager
def full_disk_named(root: Path, step: int) -> Iterator[None]:
    """Turn the errors by which a checkpoint on a full disk fails into one line."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        free = shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).free
        if isinstance(error, RuntimeError) and free > 2**20:  # torch reports a full disk as a RuntimeError
            raise
        cause = getattr(error, "cause", error)  # of Ray's copy of a worker's error, whose text is a traceback
        raise UserError(
            f"{root}: the checkpoint of step {step} cannot be written ({str(cause).splitlines()[0]}; "
            f"{free / 1e9:.1f} GB free); make room, and the same command resumes from the last complete checkpoint"
        ) from error


def _free_name(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}.kept{number or ''}") for number in itertools.count())
    return next(name for name in names if not os.path.lexists(name))


def _steps(root: Path) -> list[int]:
    return [step_of(path) for path in root.glob("global_step_*[0-9]") if (path / "run.json").is_file()]


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
    try:
        folder = step_folder(root, int(tracker.read_text().strip()))
    except (OSError, ValueError) as error:
        steps = sorted(_steps(root))
        last = f"write the step to resume from into it ({', '.join(map(str, steps))})" if steps else "delete it"
        raise UserError(f"{tracker}: does not contain the number of a step; {last}") from error
    if not (folder / "run.json").is_file():
        raise UserError(
            f"{tracker} names {folder.name}, which does not exist; set trainer.resume_mode=disable to start over"
        )
    return folder


def read(folder: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's run.json. Raises UserError."""
    file = folder / "run.json"
    try:
        contents = json.loads(file.read_text())
        if not {"step", "policies"} <= contents.keys() or not all(
            isinstance(contents.get(key, default), type(default)) for key, default in FIELDS.items()
        ):
            raise TypeError(f"{', '.join(FIELDS)} are missing or of other types")
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{file}: damaged ({reason}); pass another checkpoint, or start over with trainer.resume_mode=disable"
        ) from error
    return contents


def check_intact(folder: Path, advice: Callable[[Path], str], needed: Callable[[str], bool] = bool) -> None:
    """Raise UserError if a file is not as it was saved. A checkpoint of an earlier version has no checksums.

    needed: of a file's path relative to `folder`, whether it is to be checked; by default, all are
    advice: how to use another checkpoint, for the message
    """
    damaged = next(_damaged(folder, needed), None)
    if damaged is None:
        return
    others = (step_folder(folder.parent, step) for step in sorted(_steps(folder.parent), reverse=True))
    intact = next((other for other in others if other != folder and _is_intact(other)), None)
    remedy = f"the last intact checkpoint is {intact}: {advice(intact)}" if intact else "no other one there is intact"
    raise UserError(f"{folder / damaged}: damaged, its contents are not those that were saved; {remedy}")


def _is_intact(folder: Path) -> bool:
    try:
        return CHECKSUMS in read(folder) and not any(_damaged(folder, bool))
    except UserError:
        return False


def _damaged(folder: Path, needed: Callable[[str], bool]) -> Iterator[str]:
    """Yield the files that differ from their checksums; those that were removed since are not among them."""
    saved = {name: sum_ for name, sum_ in read(folder).get(CHECKSUMS, {}).items() if needed(name)}
    present = [name for name in saved if (folder / name).exists()]
    for name, checksum in zip(present, _checksums(folder / name for name in present), strict=True):
        if checksum != saved[name]:
            yield name


def _checksums_as_written(folder: Path) -> dict[str, str]:
    """Return the checksums of all files. Raises UserError if a file of torch's is not what was in memory: its archives
    hold the checksum of each tensor."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [str(path.relative_to(folder)) for path in files]
    with ThreadPoolExecutor() as pool:
        for name, bad in zip(names, pool.map(_bad_record, files), strict=True):
            if bad:
                raise UserError(
                    f"{folder.parent}: the checkpoint was discarded, because {name} was not written correctly ({bad} "
                    "differs from what was in memory); check the disk and the memory of the machine"
                )
    return dict(zip(names, _checksums(files), strict=True))


def _bad_record(file: Path) -> str | None:
    if file.suffix != ".pt" or not zipfile.is_zipfile(file):
        return None
    with zipfile.ZipFile(file) as archive:
        return archive.testzip()


def _checksums(files: Iterable[Path]) -> Iterator[str]:
    with ThreadPoolExecutor() as pool:  # reading and zlib release the GIL
        yield from pool.map(_checksum, files)


def _checksum(file: Path) -> str:
    try:
        return file_checksum(file)
    except OSError as error:  # such as a bad sector
        return str(error)
