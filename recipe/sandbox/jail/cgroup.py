"""Control groups for jails, where the machine grants them: memory, processes and CPU share of one job together.

Invariant: a jail's first process enters its group before it forks, so all of the job's processes are in it; what they
have the kernel allocate, shared memory, file systems in memory, socket buffers and page tables included, counts. Only
groups below the server's own group are made, in one directory that the server keeps locked, so that directories of dead
servers can be distinguished from others. It imports only the standard library, so that the reaper can load it by path.
"""

from __future__ import annotations

import fcntl
import math
import os
import signal
import time
from collections import deque
from contextlib import suppress
from typing import NamedTuple

_PREFIX = "verl-dag-sandbox-"
_SERVER = "verl-dag-server"
"""On version 2, the group that the server moves to: a group with processes cannot pass controllers on."""
_CONTROLLERS = ("memory", "pids", "cpu")
"""The first is required."""
_IDLE_BYTES = 8 << 20
"""A group that still holds more after its job is not used again. (What a dead jail leaves takes up to 1 MiB.)"""
_TRIES = 2
"""Groups that are looked at before another is made."""
_REMOVE_S = 2.0


class Version(NamedTuple):
    """The files of one version of control groups. For `kills`, see Group.kills."""

    name: str
    limits: tuple[str, ...]
    usage: str
    events: str
    unlimited: str
    once: tuple[tuple[str, str, str], ...]
    """Controller, file and value that are written to each new group; a missing file is no error."""
    at_first: tuple[tuple[str, str, str], ...] = ()
    """The same for the directory of all groups."""


V1 = Version(
    "cgroup v1",
    ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    "memory.usage_in_bytes",
    "memory.oom_control",
    "-1",
    # Buffers of Internet sockets do not count as memory there.
    (("memory", "memory.kmem.tcp.limit_in_bytes", str(64 << 20)),),
    # Each job has the share of one process, however many it starts. All together have that of four per core; on version
    # 2, the share of the server, which is beside them in its own group.
    (("cpu", "cpu.shares", str(1024 * 4 * len(os.sched_getaffinity(0)))),),
)
V2 = Version(
    "cgroup v2",
    ("memory.max",),
    "memory.current",
    "memory.events",
    "max",
    (("memory", "memory.swap.max", "0"),),
)


class Group:
    """The group of one jail at a time. directories: by controller."""

    def __init__(self, version: Version, directories: dict[str, str]):
        self._version = version
        self._directories = directories
        self._limit = math.inf
        self._processes = 0
        for directory in dict.fromkeys(directories.values()):
            os.mkdir(directory)
        _write_present(directories, version.once)

    def entrances(self) -> list[int]:
        """Open the files to which a process writes 0 to enter the group. The kernel checks the rights of the process
        that opened them."""
        return [
            os.open(f"{directory}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            for directory in dict.fromkeys(self._directories.values())
        ]

    def limit(self, memory: float, processes: int) -> None:
        """Limit the group to `memory` bytes, math.inf for no limit, and `processes`. Raises OSError.

        Most jobs have the limits of the one before, for which nothing is written.
        """
        if memory != self._limit:
            value = self._version.unlimited if math.isinf(memory) else str(int(memory))
            # Memory with swap may never be limited to less than memory.
            names = self._version.limits if memory < self._limit else self._version.limits[::-1]
            for name in names:
                with suppress(FileNotFoundError):
                    _write(f"{self._directories['memory']}/{name}", value)
            self._limit = memory
        if processes != self._processes and "pids" in self._directories:
            _write(f"{self._directories['pids']}/pids.max", str(processes))
            self._processes = processes

    def kills(self) -> int:
        """Return how many processes the kernel has ended so far because the group reached its limit; 0 if the group was
        removed."""
        with suppress(OSError):
            for line in _read(f"{self._directories['memory']}/{self._version.events}").splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return 0

    def is_idle(self) -> bool:
        return int(_read(f"{self._directories['memory']}/{self._version.usage}")) < _IDLE_BYTES

    def remove(self) -> bool:
        """Remove the group and return True; False if it still has processes. Memory that outlives it, such as files of
        a session, counts for the group above."""
        return all([_remove(directory) for directory in dict.fromkeys(self._directories.values())])


class Groups:
    """The groups of one server. `version` is its name, for status."""

    def __init__(self, version: Version, above: dict[str, str]):
        """above: the server's own directory by controller. Raises OSError."""
        self._version = version
        self.version = version.name
        name = f"{_PREFIX}{os.getpid()}-{time.monotonic_ns()}"
        self._directories = {controller: f"{path}/{name}" for controller, path in above.items()}
        self._free: deque[Group] = deque()
        self._made = 0
        self._locks: list[int] = []
        self.per_jail = len(set(above.values()))
        """Number of entrances of a group."""
        try:
            for directory in dict.fromkeys(self._directories.values()):
                os.mkdir(directory)
                self._locks.append(_lock(directory))
            if version is V2:
                _pass_on(self._directories["memory"], tuple(above))
            _write_present(self._directories, version.at_first)
            self._free.append(self._make())
        except OSError:
            self.close(0.0)
            raise

    def take(self) -> Group:
        """Return a group without processes. Raises OSError."""
        for _ in range(min(_TRIES, len(self._free))):
            group = self._free.popleft()
            if group.is_idle():
                return group
            if not group.remove():
                self._free.append(group)
        return self._make()

    def give_back(self, group: Group) -> None:
        """Accept a group whose jail is dead, or dying."""
        self._free.append(group)

    def close(self, patience_s: float = _REMOVE_S) -> None:
        """Kill what is left in the groups and remove them. What dies later is left to `remove_leftovers`."""
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()
        for directory in dict.fromkeys(self._directories.values()):
            _clear(directory, patience_s)

    def _make(self) -> Group:
        self._made += 1
        return Group(self._version, {name: f"{path}/{self._made}" for name, path in self._directories.items()})


def granted() -> Groups | None:
    """Return the groups that this process may make; None if the machine grants none that count memory."""
    remove_leftovers()
    for version, places in ((V1, _hierarchies(V1)), (V2, _hierarchies(V2))):
        if "memory" in places:
            with suppress(OSError):
                if version is V2:
                    _step_aside(places["memory"], tuple(places))
                return Groups(version, places)
    return None


def remove_leftovers() -> None:
    """Remove the groups of dead servers that had the same own group as this process. Never raises."""
    for version in (V1, V2):
        for above in dict.fromkeys(_hierarchies(version).values()):
            with suppress(OSError):
                for name in os.listdir(above):
                    if name.startswith(_PREFIX):
                        _remove_unlocked(f"{above}/{name}")


def _remove_unlocked(directory: str) -> None:
    with suppress(OSError):
        lock = _lock(directory)
        try:
            _clear(directory, _REMOVE_S)
        finally:
            os.close(lock)


def _lock(directory: str) -> int:
    """Lock a directory for as long as the descriptor is open. Raises BlockingIOError if its server lives."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _hierarchies(version: Version) -> dict[str, str]:
    """Return this process's own directory for each controller that this version of control groups offers here."""
    own: dict[str, str] = {}
    with suppress(OSError):
        for line in _read("/proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            own |= dict.fromkeys(controllers.split(","), path)
    directories: dict[str, str] = {}
    for kind, options, root, mount_point in _mounts():
        if kind == "cgroup" and version is V1:
            for controller in set(_CONTROLLERS) & set(options) & set(own):
                directories[controller] = _below(root, mount_point, own[controller])
        elif kind == "cgroup2" and version is V2 and "" in own:
            directory = _below(root, mount_point, own[""])
            if os.path.basename(directory) == _SERVER:
                directory = os.path.dirname(directory)
            with suppress(OSError):
                offered = _read(f"{directory}/cgroup.controllers").split()
                directories |= dict.fromkeys([name for name in _CONTROLLERS if name in offered], directory)
    return {name: path for name, path in directories.items() if os.access(path, os.W_OK)}


def _mounts() -> list[tuple[str, list[str], str, str]]:
    """Return the kind, options, root and mount point of each mount."""
    mounts = []
    for line in _read("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, mount_point = before.split()[3:5]
        mounts.append((kind, options.split(","), root, mount_point))
    return mounts


def _below(root: str, mount_point: str, path: str) -> str:
    """Return where a mount of `root` at `mount_point` shows `path`."""
    relative = os.path.relpath(path, root)
    return mount_point if relative == "." else f"{mount_point.rstrip('/')}/{relative}"


def _step_aside(own: str, controllers: tuple[str, ...]) -> None:
    """On version 2, move this process and its children to a group of their own, and pass the controllers on. Raises
    OSError, BlockingIOError if other processes are in this process's group, which may not be moved."""
    present = {int(pid) for pid in _read(f"{own}/cgroup.procs").split()}
    children = _read(f"/proc/{os.getpid()}/task/{os.getpid()}/children").split()
    if present - {os.getpid(), *map(int, children)}:
        raise BlockingIOError(f"{own} has other processes")
    with suppress(FileExistsError):
        os.mkdir(f"{own}/{_SERVER}")
    for pid in present:
        _write(f"{own}/{_SERVER}/cgroup.procs", str(pid))
    _pass_on(own, controllers)


def _pass_on(directory: str, controllers: tuple[str, ...]) -> None:
    _write(f"{directory}/cgroup.subtree_control", " ".join(f"+{name}" for name in controllers))


def _write_present(directories: dict[str, str], values: tuple[tuple[str, str, str], ...]) -> None:
    """Write the values whose controllers and files exist."""
    for controller, name, value in values:
        with suppress(FileNotFoundError, KeyError):
            _write(f"{directories[controller]}/{name}", value)


def _clear(directory: str, patience_s: float) -> None:
    """Kill the processes in the groups below a directory, and remove it with them. Never raises."""
    deadline = time.monotonic() + patience_s
    while True:
        remaining = False
        for path, _, _ in os.walk(directory, topdown=False):
            remaining |= not _remove(path)
        if not remaining or time.monotonic() >= deadline:
            return
        time.sleep(0.01)


def _remove(directory: str) -> bool:
    """Remove one group; if it has processes, kill them and return False."""
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError:
        with suppress(OSError, ValueError):
            for pid in _read(f"{directory}/cgroup.procs").split():
                os.kill(int(pid), signal.SIGKILL)
        return False
    return True


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _write(path: str, value: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)
