"""One run at a time in an output folder."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.dag.app.launch import Evaluation, launch
from recipe.dag.core.errors import UserError
from recipe.dag.core.output_lock import locked
from recipe.dag.train.sft import launch as sft

ROOT = Path(__file__).parents[2]
HOLDER = """
import os, subprocess, sys, time
from recipe.dag.core.output_lock import locked

with locked([sys.argv[2]]) as descriptors:
    if sys.argv[1] == "forks":
        reading, writing = os.pipe()
        if not os.fork():
            os.write(writing, b"forked")
            time.sleep(60)
            os._exit(0)
        os.read(reading, 6)
    child = subprocess.Popen(["sleep", "60"], pass_fds=descriptors if sys.argv[1] == "hands over" else ())
    print(child.pid, flush=True)
    time.sleep(60)
"""


def hold(folder: Path, how: str) -> tuple[subprocess.Popen, int]:
    """Start a process, a group of its own, that holds the lock; return it and its child's pid."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, how, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize(
    ("how", "free"), [("alone", True), ("forks", True), ("hands over", False)], ids=["alone", "fork", "descriptor"]
)
def test_a_killed_run_frees_its_folder_unless_a_child_goes_on_writing(tmp_path, how, free):
    folder = tmp_path / "out"
    process, child = hold(folder, how)
    try:
        with pytest.raises(UserError) as caught, locked([folder]):
            pass
        holder = f"{folder}: another run writes to it (host {socket.gethostname()}, pid {process.pid})"
        assert str(caught.value).startswith(holder) and "\n" not in str(caught.value)
        process.kill()  # its children live on
        process.wait()
        if not free:
            with pytest.raises(UserError, match="another run writes to it"), locked([folder]):
                pass
            exit_of_child = os.pidfd_open(child)
            os.kill(child, signal.SIGKILL)
            select.select([exit_of_child], [], [])
            os.close(exit_of_child)
        with locked([folder]):
            assert (folder / ".lock").is_file()
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_what_the_lock_created_is_removed_and_what_the_run_wrote_stays(tmp_path):
    with locked([tmp_path / "a" / "b", tmp_path / "a" / "b", tmp_path / "a"]):
        assert (tmp_path / "a" / "b" / ".lock").is_file()
    assert not list(tmp_path.iterdir())
    with locked([tmp_path / "a"]):
        (tmp_path / "a" / "metrics.jsonl").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["metrics.jsonl"]


def test_a_lock_whose_file_was_removed_meanwhile_is_not_taken_for_the_folders(tmp_path, monkeypatch):
    from recipe.dag.core import output_lock

    flock, taken = output_lock._flock, []

    def late(descriptor: int, folder: Path) -> None:
        flock(descriptor, folder)
        if not taken:  # the run that held it ended between opening and locking
            (folder / ".lock").unlink()
        taken.append(descriptor)

    monkeypatch.setattr(output_lock, "_flock", late)
    with locked([tmp_path]):
        assert len(taken) == 2
        with pytest.raises(UserError, match="another run"), locked([tmp_path]):
            pass


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def unsupported(descriptor, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("recipe.dag.core.output_lock.fcntl.flock", unsupported)
    with locked([tmp_path]):
        pass
    assert "has no locks (Function not implemented)" in capsys.readouterr().err


DATA = {"train": f"data.train_files={ROOT}/README.md", "eval": f"data.val_files={ROOT}/README.md"}


@pytest.mark.parametrize("entry", ["train", "checkpoints", "eval", "sft"])
def test_a_second_run_in_a_folder_is_refused(tmp_path, entry):
    workflow = [f"workflow={ROOT}/workflows/workflow_retool_ma.yaml", "model_path=models/any"]
    with (
        locked([tmp_path]),
        pytest.raises(UserError, match=f"^{tmp_path}: another run writes to it .*pid {os.getpid()}"),
    ):
        if entry == "sft":
            sft.launch([f"data.train_files={ROOT}/README.md", "model.path=any", f"output_dir={tmp_path}"])
        elif entry == "checkpoints":
            folders = [f"output_dir={tmp_path}/other", f"trainer.default_local_dir={tmp_path}"]
            launch("dag", [*workflow, DATA["train"], *folders])
        else:
            evaluation = Evaluation() if entry == "eval" else None
            launch("dag", [*workflow, DATA[entry], f"output_dir={tmp_path}"], evaluation=evaluation)
