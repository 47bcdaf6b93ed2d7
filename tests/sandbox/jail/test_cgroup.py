"""Control groups: what counts as a job's memory, and that no group is left."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipe.sandbox.jail import cgroup
from recipe.sandbox.launch import LocalSandbox
from recipe.sandbox.limits import Limits
from tests.sandbox.processes import until

SMALL = Limits(memory_mb=128)
KILLED = "[sandbox] killed: more than 128 MiB of memory\n"
SHARED = """
import mmap, os, time
for _ in range(6):
    if os.fork() == 0:
        area = mmap.mmap(-1, 100 << 20)
        for _ in range(100): area.write(bytes(1 << 20))
        area.madvise(mmap.MADV_DONTNEED)
        time.sleep(60)
time.sleep(60)
"""
SOCKETS = """
import socket, os, time
for _ in range(8):
    if os.fork() == 0:
        pairs = [socket.socketpair() for _ in range(100)]
        for one, _ in pairs:
            one.setblocking(False)
            try:
                while True: one.send(bytes(1 << 16))
            except BlockingIOError: pass
        time.sleep(60)
time.sleep(60)
"""
FILES = "for n in range(10): open(f'/tmp/{n}', 'wb').write(bytes(24 << 20))"


@pytest.fixture
def grouped(box):
    if not box.engine.status()["memory"].startswith("cgroup"):
        pytest.skip("this machine grants no memory control group")
    return box


def groups_of(pid: int) -> set[str]:
    """Return the directories of one server: other tests start servers at the same time."""
    folders = set()
    for version in (cgroup.V1, cgroup.V2):
        for above in cgroup._hierarchies(version).values():
            folders |= {f"{above}/{name}" for name in os.listdir(above) if name.startswith(f"{cgroup._PREFIX}{pid}-")}
    return folders


@pytest.mark.parametrize("code", [SHARED, SOCKETS, FILES])
def test_everything_that_a_job_has_allocated_counts(grouped, code):
    started = time.monotonic()
    outcome = grouped.run(code, limits=SMALL, timeout_s=50).run
    assert (outcome.status, outcome.return_code) == ("finished", -signal.SIGKILL)
    assert outcome.stderr.endswith(KILLED) and time.monotonic() - started < 40


def test_a_child_that_is_killed_ends_the_job(grouped):
    code = (
        "import os, signal\nprint('started', flush=True)\n"
        "if os.fork() == 0:\n for n in range(4):\n  if os.fork() == 0:\n"
        "   x = bytearray(b'x') * (90 << 20); signal.pause()\n signal.pause()\nsignal.pause()"
    )
    outcome = grouped.run(code, limits=SMALL, timeout_s=50).run
    assert (outcome.return_code, outcome.stdout, outcome.stderr) == (-signal.SIGKILL, "started\n", KILLED)


def test_a_limit_is_that_of_the_job_not_of_the_group_before(grouped):
    code = "x = bytearray(b'x') * (300 << 20); print(len(x) >> 20)"
    for memory_mb, printed in ((64, ""), (512, "300\n"), (0, "300\n"), (64, ""), (1024, "300\n")):
        for _ in range(12):
            assert grouped.run(code, limits=Limits(memory_mb=memory_mb), timeout_s=50).run.stdout == printed


def test_compiler_and_program_have_their_own_limits(grouped):
    code = "#include <cstdlib>\n#include <cstring>\nint main() { for (;;) memset(malloc(8 << 20), 1, 8 << 20); }"
    execution = grouped.run(code, language="cpp", limits=SMALL, timeout_s=50, compile_timeout_s=60)
    assert execution.compile.return_code == 0 and execution.run.return_code not in (0, None)


def test_every_process_of_a_job_is_in_one_group(grouped):
    code = (
        "import os\nif os.fork() == 0: os.setsid(); print(open('/proc/self/cgroup').read()); os._exit(0)\nos.wait()\n"
        "print(open('/proc/1/cgroup').read()); print(open('/proc/self/cgroup').read())"
    )
    seen = grouped.run(code).run.stdout.strip().split("\n\n")
    assert len(seen) == 3 and len(set(seen)) == 1 and cgroup._PREFIX in seen[0]


def test_groups_are_removed_with_their_processes(tmp_path):
    before = groups_of(os.getpid())
    groups = cgroup.granted()
    if groups is None:
        pytest.skip("this machine grants no memory control group")
    with subprocess.Popen(["sleep", "60"]) as process:
        group = groups.take()
        for entrance in group.entrances():
            os.write(entrance, str(process.pid).encode())
            os.close(entrance)
        assert len(groups_of(os.getpid()) - before) == groups.per_jail and not group.remove()
        groups.close()
        assert process.wait(10) == -signal.SIGKILL
    assert groups_of(os.getpid()) == before


def test_a_group_that_still_holds_memory_is_not_used_again(tmp_path):
    groups = cgroup.granted()
    if groups is None:
        pytest.skip("this machine grants no memory control group")
    try:
        full, idle = groups.take(), groups.take()
        full.is_idle = lambda: False
        groups.give_back(full)
        groups.give_back(idle)
        assert groups.take() is idle and not os.path.exists(full._directories["memory"])
    finally:
        groups.close()


@pytest.mark.parametrize("killed", ["server", "both"])
def test_groups_of_a_killed_server_are_removed(killed):
    """By its reaper, or, if that is killed too, when the next server starts."""
    local = LocalSandbox(max_concurrent=2)
    try:
        asyncio.run(local.start())
        if not local.memory.startswith("cgroup"):
            pytest.skip("this machine grants no memory control group")
        assert groups_of(local.pid)
        children = Path(f"/proc/{local.pid}/task/{local.pid}/children").read_text().split()
        reapers = [int(pid) for pid in children if b"reaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(reapers) == 1
        for pid in reapers if killed == "both" else []:
            os.kill(pid, signal.SIGKILL)
        os.kill(local.pid, signal.SIGKILL)
        if killed == "both":
            assert until(lambda: subprocess.run(["true"]).returncode == 0)
            command = "from recipe.sandbox.jail import cgroup; cgroup.granted().close()"
            subprocess.run([sys.executable, "-c", command], check=True, cwd=Path(__file__).parents[3])
        assert until(lambda: not groups_of(local.pid))
    finally:
        local.close()


class Tree:
    """Directories that behave like version 2 of control groups, as far as files go."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch):
        self.made: list[str] = []
        self._make, self._remove = os.mkdir, os.rmdir
        root.mkdir()
        self._fill(str(root))
        (root / "cgroup.controllers").write_text("cpu io memory pids\n")
        (root / "cgroup.procs").write_text(f"{os.getpid()}\n")
        patch.setattr(os, "mkdir", self.mkdir)
        patch.setattr(os, "rmdir", self.rmdir)
        patch.setattr(cgroup, "_hierarchies", lambda version: dict.fromkeys(cgroup._CONTROLLERS, str(root))
                      if version is cgroup.V2 else {})  # fmt: skip

    def mkdir(self, path: str) -> None:
        self._make(path)
        self._fill(path)

    def rmdir(self, path: str) -> None:
        if any(entry.is_dir() for entry in os.scandir(path)):
            raise OSError("not empty")
        for entry in os.scandir(path):
            os.unlink(entry)
        self._remove(path)

    def _fill(self, path: str) -> None:
        for name in ("cgroup.procs", "cgroup.subtree_control", "memory.max", "memory.swap.max", "pids.max"):
            Path(path, name).touch()
        Path(path, "memory.current").write_text("4096\n")
        Path(path, "memory.events").write_text("low 0\nmax 3\noom 2\noom_kill 1\noom_group_kill 0\n")


def test_version_2_by_its_files(tmp_path, monkeypatch):
    own = tmp_path / "own"
    Tree(own, monkeypatch)
    groups = cgroup.granted()
    assert groups is not None and (groups.version, groups.per_jail) == ("cgroup v2", 1)
    assert (own / cgroup._SERVER / "cgroup.procs").read_text() == str(os.getpid())
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    (base,) = own.glob(f"{cgroup._PREFIX}*")
    assert (base / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    group = groups.take()
    group.limit(300 << 20, 65)
    folder = base / "1"
    files = {name: (folder / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max")}
    assert files == {"memory.max": str(300 << 20), "memory.swap.max": "0", "pids.max": "65"}
    (folder / "memory.max").write_text("")
    group.limit(math.inf, 65)
    assert (folder / "memory.max").read_text() == "max" and group.kills() == 1 and group.is_idle()
    groups.give_back(group)
    assert groups.take() is group
    groups.close()
    assert not base.exists()


def test_version_2_moves_only_its_own_processes(tmp_path, monkeypatch):
    own = tmp_path / "own"
    Tree(own, monkeypatch)
    (own / "cgroup.procs").write_text(f"{os.getpid()}\n{os.getppid()}\n")
    assert cgroup.granted() is None and not (own / cgroup._SERVER).exists()
