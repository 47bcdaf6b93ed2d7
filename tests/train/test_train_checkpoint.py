from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recipe.dag.core.errors import UserError
from recipe.dag.train import checkpoint
from recipe.dag.train.checkpoint import TRACKER, check_intact, find, policy_folder, read, save

FACTS = {"policies": {"main": 1}, "seed": 0}


def write_weights(text: str):
    def write(folder: Path) -> None:
        target = policy_folder(folder, "main")
        target.mkdir(parents=True)
        (target / "weights").write_text(text)

    return write


def entries(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_a_checkpoint_is_complete_and_found_again(tmp_path):
    folder = save(tmp_path, 20, FACTS, write_weights("a"), keep=2)
    assert (folder / "main" / "actor" / "weights").read_text() == "a"
    assert (tmp_path / TRACKER).read_text() == "20"
    assert entries(tmp_path) == {"global_step_20", TRACKER}
    assert find(tmp_path, mode="auto", path=None) == folder
    assert read(folder) == {"step": 20, **FACTS, "files": {"main/actor/weights": "e8b7be43"}}


def test_a_write_that_fails_leaves_the_old_checkpoint_and_nothing_new(tmp_path):
    old = save(tmp_path, 1, FACTS, write_weights("a"), keep=2)

    def fail(folder: Path) -> None:
        write_weights("b")(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 2, FACTS, fail, keep=2)
    assert entries(tmp_path) == {"global_step_1", TRACKER}
    assert find(tmp_path, mode="auto", path=None) == old


def test_a_run_killed_while_writing_resumes_from_the_old_one_and_is_cleaned_up(tmp_path, monkeypatch):
    old = save(tmp_path, 1, FACTS, write_weights("a"), keep=5)
    monkeypatch.setattr(checkpoint.os, "replace", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, FACTS, write_weights("b"), keep=5)
    assert ".partial_global_step_2" in entries(tmp_path)
    assert find(tmp_path, mode="auto", path=None) == old
    monkeypatch.undo()
    save(tmp_path, 3, FACTS, write_weights("c"), keep=5)
    assert entries(tmp_path) == {"global_step_1", "global_step_3", TRACKER}


def test_the_tracker_is_written_last(tmp_path, monkeypatch):
    save(tmp_path, 1, FACTS, write_weights("a"), keep=5)
    replace, targets = checkpoint.os.replace, []

    def record(source, target):
        targets.append(Path(target).name)
        if targets[-1] == TRACKER:
            assert (tmp_path / "global_step_2" / "run.json").is_file()
            assert (tmp_path / TRACKER).read_text() == "1"
        replace(source, target)

    monkeypatch.setattr(checkpoint.os, "replace", record)
    save(tmp_path, 2, FACTS, write_weights("b"), keep=5)
    assert targets == ["global_step_2", TRACKER]


def test_the_newest_are_kept(tmp_path):
    for step in (2, 4, 10, 12):
        save(tmp_path, step, FACTS, write_weights("a"), keep=2)
    assert entries(tmp_path) == {"global_step_10", "global_step_12", TRACKER}


def test_keep_zero_keeps_all(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, FACTS, write_weights("a"), keep=0)
    assert len(entries(tmp_path)) == 4


def test_an_abandoned_runs_later_steps_do_not_push_out_the_new_one(tmp_path):
    for step in (40, 60):
        save(tmp_path, step, FACTS, write_weights("old"), keep=2)
    folder = save(tmp_path, 20, FACTS, write_weights("new"), keep=2)
    assert find(tmp_path, mode="auto", path=None) == folder
    assert (policy_folder(folder, "main") / "weights").read_text() == "new"


def test_a_step_saved_again_is_replaced(tmp_path):
    save(tmp_path, 1, FACTS, write_weights("a"), keep=1)
    folder = save(tmp_path, 1, FACTS, write_weights("b"), keep=1)
    assert (policy_folder(folder, "main") / "weights").read_text() == "b"


def test_find_without_a_checkpoint(tmp_path):
    assert find(tmp_path / "absent", mode="auto", path=None) is None
    save(tmp_path, 1, FACTS, write_weights("a"), keep=1)
    assert find(tmp_path, mode="disable", path=None) is None


def test_find_by_path(tmp_path):
    folder = save(tmp_path / "other", 7, FACTS, write_weights("a"), keep=1)
    assert find(tmp_path / "mine", mode="resume_path", path=str(folder)) == folder
    for path in (str(tmp_path), None):
        with pytest.raises(UserError, match="resume_from_path.*not a checkpoint"):
            find(tmp_path, mode="resume_path", path=path)


def test_find_refuses_an_unknown_mode_and_a_tracker_that_points_nowhere(tmp_path):
    with pytest.raises(UserError, match="resume_mode=always.*auto, disable, force or resume_path"):
        find(tmp_path, mode="always", path=None)
    (tmp_path / TRACKER).write_text("8")
    with pytest.raises(UserError, match="global_step_8.*resume_mode=disable"):
        find(tmp_path, mode="auto", path=None)


def test_force_resumes_as_auto_and_from_a_path_where_one_is_set(tmp_path):
    assert find(tmp_path, mode="force", path=None) is None
    last = save(tmp_path / "mine", 1, FACTS, write_weights("a"), keep=1)
    other = save(tmp_path / "other", 7, FACTS, write_weights("b"), keep=1)
    assert find(tmp_path / "mine", mode="force", path=None) == last
    assert find(tmp_path / "mine", mode="force", path=str(other)) == other


def test_a_folder_of_the_same_name_that_is_no_checkpoint_of_these_is_kept(tmp_path):
    (tmp_path / "global_step_1" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_1.kept").mkdir()
    save(tmp_path, 1, FACTS, write_weights("a"), keep=1)
    save(tmp_path, 1, FACTS, write_weights("b"), keep=1)
    assert entries(tmp_path) == {"global_step_1", "global_step_1.kept", "global_step_1.kept1", TRACKER}
    assert [path.name for path in (tmp_path / "global_step_1.kept1").iterdir()] == ["actor"]


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_damaged_file_is_refused_and_the_last_intact_checkpoint_is_named(tmp_path):
    folders = [save(tmp_path, step, FACTS, write_weights("a" * 5_000_000), keep=0) for step in (1, 2, 3)]
    for folder in folders:
        check_intact(folder, str)
    weights = [policy_folder(folder, "main") / "weights" for folder in folders]
    for path, position in ((weights[1], 0), (weights[2], 4_999_999)):
        flip(path, position)
    with pytest.raises(UserError) as caught:
        check_intact(folders[2], lambda other: f"use {other}")
    assert str(caught.value).startswith(f"{weights[2]}: damaged") and "\n" not in str(caught.value)
    assert str(caught.value).endswith(f"the last intact checkpoint is {folders[0]}: use {folders[0]}")
    check_intact(folders[2], str, lambda name: name != "main/actor/weights")
    weights[0].write_text("")
    with pytest.raises(UserError, match="no other one there is intact"):
        check_intact(folders[1], str)


def test_a_checkpoint_without_checksums_and_files_that_were_removed_are_not_damaged(tmp_path):
    folder = save(tmp_path, 1, FACTS, write_weights("a"), keep=0)
    (policy_folder(folder, "main") / "weights").unlink()
    check_intact(folder, str)
    (folder / "run.json").write_text(json.dumps({"step": 1, **FACTS}))
    check_intact(folder, str)


def test_a_file_that_was_not_written_as_it_was_in_memory_is_discarded(tmp_path):
    def write(folder: Path) -> None:
        torch.save({"w": torch.arange(1000)}, folder / "model.pt")
        flip(folder / "model.pt", (folder / "model.pt").stat().st_size // 2)

    with pytest.raises(UserError, match=r"discarded, because model\.pt was not written correctly .*data/0"):
        save(tmp_path, 1, FACTS, write, keep=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"step": 1}',
        '{"step": "x", "policies": {}}',
        '{"step": 1, "policies": [], "files": {}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_run_json_is_one_line(tmp_path, content):
    folder = save(tmp_path, 1, FACTS, write_weights("a"), keep=0)
    (folder / "run.json").write_text(content)
    with pytest.raises(UserError, match=r"^[^\n]*run\.json: damaged [^\n]*resume_mode=disable$"):
        read(folder)


@pytest.mark.parametrize("content", ["", "x", "1.5", "\0\0"])
def test_a_damaged_tracker_is_one_line(tmp_path, content):
    (tmp_path / TRACKER).write_text(content)
    with pytest.raises(UserError, match="does not contain the number of a step; delete it"):
        find(tmp_path, mode="auto", path=None)
    save(tmp_path, 4, FACTS, write_weights("a"), keep=0)
    (tmp_path / TRACKER).write_text(content)
    with pytest.raises(UserError, match=r"write the step to resume from into it \(4\)"):
        find(tmp_path, mode="auto", path=None)
