"""The files that are deleted after a job, and those that must not be touched."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.sandbox import beneath, removal
from recipe.sandbox.launch import LocalSandbox

REAPER = Path(removal.__file__).with_name("reaper.py")
RLIMITS = {"isolation": "rlimits", "accept_unsandboxed": True}


def reaper(root: Path) -> None:
    """Run the reaper as after the end of a server."""
    command = [sys.executable, "-I", "-S", str(REAPER), str(root)]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=60)


def facts(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink


def outside(tmp_path: Path) -> tuple[Path, dict[str, tuple[int, ...]]]:
    """A shared folder such as /tmp, with files of other users."""
    shared = tmp_path / "shared"
    (shared / "other").mkdir(parents=True)
    (shared / "other" / "file").write_text("kept")
    (shared / "other").chmod(0o750)
    shared.chmod(0o1777)
    return shared, {str(path): facts(path) for path in (shared, shared / "other", shared / "other" / "file")}


@pytest.mark.parametrize("remove", [removal.remove, reaper])
def test_removing_a_directory_that_is_gone_leaves_its_parent_as_it_was(remove, tmp_path):
    shared, before = outside(tmp_path)
    remove(shared / "gone")
    assert {path: facts(Path(path)) for path in before} == before


@pytest.mark.parametrize("remove", [removal.remove, reaper])
def test_only_the_directory_is_deleted_and_no_link_out_of_it_is_followed(remove, tmp_path):
    shared, before = outside(tmp_path)
    root = shared / "root"
    (root / "locked" / "deep").mkdir(parents=True)
    (root / "locked" / "deep" / "file").write_text("x")
    (root / "away").symlink_to(shared / "other")
    (root / "locked" / "up").symlink_to("../..")
    (root / "locked" / "file").symlink_to(shared / "other" / "file")
    os.mkfifo(root / "pipe")
    (root / "locked" / "deep").chmod(0)
    (root / "locked").chmod(0)
    root.chmod(0)
    remove(root)
    assert not os.path.lexists(root)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777
    # Only the attributes that the missing entry itself changes may differ.
    inner = [path for path in before if path != str(shared)]
    assert {path: facts(Path(path)) for path in inner} == {path: before[path] for path in inner}


def test_a_symlink_in_the_place_of_the_directory_is_not_followed(tmp_path):
    shared, before = outside(tmp_path)
    link = tmp_path / "session"
    link.symlink_to(shared)
    removal.remove(link)
    assert not os.path.lexists(link)
    assert {path: facts(Path(path)) for path in before} == before


def test_another_directory_that_took_the_name_is_left_alone(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_text("x")
    meant = os.open(root, os.O_RDONLY)
    root.rename(tmp_path / "moved")
    root.mkdir(mode=0o500)
    (root / "kept").symlink_to("elsewhere")
    before = facts(root)
    removal.remove(root, meant)
    os.close(meant)
    assert facts(root) == before and os.path.lexists(root / "kept")
    assert not any((tmp_path / "moved").iterdir()), "what was meant is emptied, wherever it is now"


def test_a_tree_too_deep_for_recursion_or_a_path_is_deleted(tmp_path):
    root, here = tmp_path / "root", os.open(".", os.O_RDONLY)
    root.mkdir()
    try:
        os.chdir(root)
        for _ in range(3000):
            os.mkdir("directory")
            os.chdir("directory")
    finally:
        os.fchdir(here)
        os.close(here)
    try:
        removal.remove(root)
        assert not root.exists()
    finally:
        # Otherwise pytest could not delete this folder later.
        subprocess.run(["rm", "-rf", str(root)], check=True)


def test_the_content_of_a_mount_is_not_deleted(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "file").write_text("kept")
    (tmp_path / "root" / "inner" / "mount").mkdir(parents=True)
    (tmp_path / "root" / "mount").mkdir()
    (tmp_path / "root" / "file").write_text("x")
    script = (
        'mount --bind "$1/home" "$1/root/mount" && mount --bind "$1/home" "$1/root/inner/mount" && shift && exec "$@"'
    )
    forked = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", str(tmp_path)]
    try:
        if subprocess.run([*forked, "true"], capture_output=True).returncode:
            pytest.skip("this user may not mount here")
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    code = "import sys; from recipe.sandbox import removal; removal.remove(sys.argv[1])"
    subprocess.run([*forked, sys.executable, "-c", code, str(tmp_path / "root")], check=True)
    assert (tmp_path / "home" / "file").read_text() == "kept"
    assert not (tmp_path / "root" / "file").exists()


def test_a_local_sandbox_leaves_the_folder_for_temporary_files_as_it_was(tmp_path, monkeypatch):
    shared, before = outside(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    monkeypatch.setenv("TMPDIR", str(shared))
    local = LocalSandbox(max_concurrent=1, **RLIMITS)
    asyncio.run(local.start())
    local.close()
    assert sorted(path.name for path in shared.iterdir()) == ["other"]
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777
    inner = [path for path in before if path != str(shared)]
    assert {path: facts(Path(path)) for path in inner} == {path: before[path] for path in inner}


def test_links_that_a_job_left_are_not_followed_when_a_file_is_written(tmp_path):
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    (home / "data").write_text("kept")
    (work / "data").symlink_to(home / "data")
    os.link(home / "data", work / "hard")
    (work / "folder").symlink_to(home)
    opened = os.open(work, os.O_RDONLY)
    for name in ("data", "hard", "deep/er"):
        beneath.write_file(opened, name, b"new")
        assert (work / name).read_text() == "new"
    with pytest.raises(OSError):
        beneath.write_file(opened, "folder/data", b"new")
    os.close(opened)
    assert (home / "data").read_text() == "kept"


def test_a_forked_child_that_exits_leaves_the_sandbox_to_its_parent():
    local = LocalSandbox(max_concurrent=1, **RLIMITS)
    asyncio.run(local.start())
    try:
        root = local.root
        child = os.fork()
        if child == 0:
            try:
                local.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert root.is_dir() and local._answers()
    finally:
        local.close()
