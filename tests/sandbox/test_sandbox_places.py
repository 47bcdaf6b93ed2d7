"""Sessions' directories where the engine cannot mount."""

from __future__ import annotations

import asyncio
import os

from recipe.sandbox.beneath import DEEPEST
from recipe.sandbox.places import Folders, most_entries

QUOTA = 1 << 20


def test_usage_is_the_space_on_disk(tmp_path):
    async def scenario() -> None:
        folder = await Folders(tmp_path).create(QUOTA)
        (folder.path / "d").mkdir()
        (folder.path / "d" / "a").write_bytes(bytes(100_000))
        with open(folder.path / "sparse", "wb") as file:
            file.truncate(1 << 40)
        (folder.path / "loop").symlink_to(".")
        assert 100_000 <= await folder.used() < 200_000
        folder.remove()

    asyncio.run(scenario())
    assert not any(tmp_path.iterdir())


def test_too_many_entries_exceed_the_quota(tmp_path):
    async def scenario() -> None:
        folder = await Folders(tmp_path).create(QUOTA)
        for number in range(most_entries(QUOTA)):
            (folder.path / str(number)).touch()
        assert await folder.used() == 0
        (folder.path / "more").touch()
        assert await folder.used() > QUOTA
        folder.remove()

    asyncio.run(scenario())


def test_a_tree_too_deep_to_measure_exceeds_the_quota(tmp_path):
    async def scenario() -> None:
        folder = await Folders(tmp_path).create(QUOTA)
        (folder.path / "/".join("d" * (DEEPEST - 1))).mkdir(parents=True)
        assert await folder.used() < QUOTA
        (folder.path / "/".join("d" * DEEPEST)).mkdir()
        assert await folder.used() > QUOTA
        folder.remove()

    asyncio.run(scenario())


def test_a_folder_is_unlocked_for_each_use(tmp_path):
    async def scenario() -> None:
        folder = await Folders(tmp_path).create(QUOTA)
        folder.path.chmod(0)
        descriptor = await folder.for_job(read_only=False)
        assert os.fstat(descriptor).st_mode & 0o777 == 0o700
        os.close(descriptor)
        folder.remove()

    asyncio.run(scenario())


def settling(tmp_path, scenario) -> list[list[str]]:
    """Return what `settle` removed after each step of a scenario, in folders with earlier files; afterwards the folder
    must be within its quota."""

    async def main() -> list[list[str]]:
        folder = await Folders(tmp_path).create(QUOTA)
        removed = []
        for step in scenario:
            step(folder.path)
            removed.append(await folder.settle())
            assert await folder.used() <= QUOTA and await folder.settle() == []
        names = sorted(str(path.relative_to(folder.path)) for path in folder.path.rglob("*"))
        folder.remove()
        return [*removed, names]

    return asyncio.run(main())


def early(path) -> None:
    (path / "d" / "e").mkdir(parents=True)
    (path / "d" / "kept").write_bytes(bytes(400_000))
    (path / "grown").write_bytes(b"x")


def test_settling_removes_new_and_changed_files_the_largest_first(tmp_path):
    def fill(path) -> None:
        (path / "d" / "small").write_bytes(b"x")
        (path / "grown").write_bytes(bytes(800_000))
        (path / "d" / "e" / "big").write_bytes(bytes(900_000))

    kept = ["d", "d/e", "d/kept", "d/small"]
    assert settling(tmp_path, [early, fill]) == [[], ["d/e/big", "grown"], kept]


def test_settling_removes_new_entries_if_no_size_is_the_excess(tmp_path):
    def fill(path) -> None:
        (path / "d" / "kept").chmod(0o400)
        (path / "d" / "e" / "/".join("f" * 98)).mkdir(parents=True)
        (path / "d" / "e" / "link").symlink_to(path / "d")
        os.link(path / "d" / "kept", path / "second")
        os.mkfifo(path / "pipe")
        (path / os.fsdecode(b"\xff")).touch()
        (path / "d" / "e").chmod(0o500)

    first, second, names = settling(tmp_path, [early, fill])
    assert first == [] and names == ["d", "d/e", "d/kept", "grown"]
    assert sorted(second) == sorted(["d/e/f", "d/e/link", "pipe", "second", "\udcff"])


def test_settling_removes_files_that_pose_as_earlier_ones_last(tmp_path):
    """A sparse file takes up room without a change of its size, and a program can set its time."""

    def sparse(path) -> None:
        early(path)
        with open(path / "sparse", "wb") as file:
            file.truncate(4 << 20)

    def fill(path) -> None:
        status = (path / "sparse").stat()
        with open(path / "sparse", "r+b") as file:
            file.write(os.urandom(4 << 20))
        os.utime(path / "sparse", ns=(status.st_mtime_ns, status.st_mtime_ns))

    assert settling(tmp_path, [sparse, fill])[1:] == [["d", "grown", "sparse"], []]


def test_settling_follows_no_link_out_of_the_folder(tmp_path):
    (outside := tmp_path / "outside").mkdir()
    (outside / "file").write_bytes(b"x")

    def swap(path) -> None:
        (path / "d" / "e").rmdir()
        (path / "d" / "e").symlink_to(outside)
        (path / "link").symlink_to(outside / "file")
        (path / "/".join("f" * DEEPEST)).mkdir(parents=True)

    assert settling(tmp_path, [early, swap])[-1] == ["d", "d/kept", "grown"]
    assert (outside / "file").read_bytes() == b"x"
