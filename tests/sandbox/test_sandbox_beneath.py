"""Files of a session, opened by the server: no name and no trap in the directory leads out of it."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from recipe.sandbox import beneath, removal


@pytest.fixture(params=[True, False], ids=["openat2", "fallback"])
def folder(request, tmp_path, monkeypatch):
    if request.param and not beneath._has_openat2():
        pytest.skip("openat2: the kernel, or a container's filter, does not have it")
    monkeypatch.setattr(beneath, "_has_openat2", lambda: request.param)
    (tmp_path / "outside").write_text("secret")
    inside = tmp_path / "inside"
    (inside / "deep").mkdir(parents=True)
    (inside / "deep" / "file").write_text("mine")
    handle = os.open(inside, os.O_RDONLY | os.O_DIRECTORY)
    yield inside, handle
    os.close(handle)


def read(handle: int, name: str) -> str:
    with open(beneath.open_file(handle, name)) as file:
        return file.read()


def test_files_inside_are_read(folder):
    _, handle = folder
    assert read(handle, "deep/file") == read(handle, "./deep//file") == "mine"


@pytest.mark.parametrize("name", ["", "/", "..", "../outside", "deep/../../outside", "/etc/passwd", "a\0b"])
def test_names_outside_of_the_directory_are_refused(folder, name):
    with pytest.raises(ValueError, match="not a relative name"):
        read(folder[1], name)


def test_traps_are_refused_and_nothing_blocks(folder):
    inside, handle = folder
    (inside / "link").symlink_to("../outside")
    (inside / "absolute").symlink_to("/etc/passwd")
    (inside / "up").symlink_to("..")
    (inside / "near").symlink_to("deep/file")
    os.link(inside.parent / "outside", inside / "hard")
    os.mkfifo(inside / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(inside / "socket"))
    for name in ("link", "absolute", "up/outside", "near", "hard", "fifo", "socket", "deep", "deep/file/x", "missing"):
        with pytest.raises(OSError):
            read(handle, name)


def test_created_folders_are_inside_too(folder):
    inside, handle = folder
    os.close(beneath.open_folder(handle, ("a", "b"), create=True, owner=os.getuid()))
    assert (inside / "a" / "b").is_dir()
    (inside / "up").symlink_to("..")
    with pytest.raises(OSError):
        beneath.open_folder(handle, ("up", "made"), create=True)
    assert not (inside.parent / "made").exists()


def test_a_name_that_is_swapped_during_the_open_never_leads_out(folder):
    inside, handle = folder
    (inside.parent / "trap").mkdir()
    (inside.parent / "trap" / "file").write_text("secret")
    stop = threading.Event()

    def swap() -> None:
        Path(inside / "swap").mkdir()
        (inside / "swap" / "file").write_text("mine")
        (inside / "link").symlink_to("../trap")
        while not stop.is_set():
            os.rename(inside / "swap", inside / "kept")
            os.rename(inside / "link", inside / "swap")
            os.rename(inside / "swap", inside / "link")
            os.rename(inside / "kept", inside / "swap")

    thread = threading.Thread(target=swap)
    thread.start()
    seen = set()
    try:
        deadline = time.monotonic() + 60
        tries = 0
        while tries < 2000 or ("mine" not in seen and time.monotonic() < deadline):
            tries += 1
            try:
                seen.add(read(handle, "swap/file"))
            except OSError:
                seen.add("refused")
    finally:
        stop.set()
        thread.join()
    assert "mine" in seen and "secret" not in seen


def test_a_walk_goes_through_every_directory_once_and_follows_no_symlink(folder):
    inside, handle = folder
    (inside / "deep" / "folder").mkdir()
    (inside / "deep" / "folder" / "f").touch()
    (inside / "link").symlink_to("..")
    names = [name for name, _ in beneath.walk(handle, 100)]
    assert names == ["deep", "link", "deep/file", "deep/folder", "deep/folder/f"]


def test_a_walk_is_bounded_in_width_and_depth(folder):
    inside, handle = folder
    for number in range(30):
        (inside / "deep" / str(number)).touch()
    assert len(list(beneath.walk(handle, 20))) == 20
    here = os.open(inside, os.O_RDONLY)
    for _ in range(3 * beneath.DEEPEST):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    deepest = max(beneath.level_of(name) for name, _ in beneath.walk(handle, 10_000))
    removal.remove(inside)
    assert deepest == beneath.DEEPEST


def test_writing_replaces_what_a_job_left_and_goes_through_no_symlink(folder):
    inside, handle = folder
    (inside / "link").symlink_to("../outside")
    (inside / "up").symlink_to("..")
    beneath.write_file(handle, "link", b"new")
    beneath.write_file(handle, "made/here", b"new")
    assert (inside / "link").read_text() == (inside / "made" / "here").read_text() == "new"
    with pytest.raises(OSError):
        beneath.write_file(handle, "up/new", b"new")
    assert (inside.parent / "outside").read_text() == "secret"
    assert sorted(os.listdir(inside)) == ["deep", "link", "made", "up"]


@pytest.mark.parametrize("code", sorted(beneath.EXHAUSTED))
@pytest.mark.parametrize("below", [False, True])
def test_a_directory_is_not_taken_for_empty_when_the_server_cannot_open_it(folder, monkeypatch, code, below):
    def refuse(*_args, **_kwargs):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(*((beneath, "open_beneath") if below else (os, "open")), refuse)
        with pytest.raises(OSError) as error:
            list(beneath.walk(folder[1], 100))
    assert error.value.errno == code
