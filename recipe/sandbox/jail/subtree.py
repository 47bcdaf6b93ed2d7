"""The walls without namespaces: Landlock, a system call filter and a separate user for each jail; or none at all.

Invariant: all processes of a job are descendants of its jail's first process, which adopts orphans. With Landlock the
job runs as a user that owns nothing else, so it can neither signal nor trace any other process, opens only what is
listed, and has no network. Without it (`rlimits`) a job runs as the server's user, which bounds accidents only.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from recipe.sandbox.jail import inside, landlock, separation, syscalls
from recipe.sandbox.jail.exposure import SYSTEM, configuration
from recipe.sandbox.jail.seccomp import Filter

USERS = range(60706, 61184)
"""User numbers of jails: unused by distributions (systemd, UIDS-GIDS.md), and below 65536, since a container may map no
others."""
_READABLE = (
    *SYSTEM, "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/dev/zero", "/dev/full", "/dev/random",
    "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system/cpu", "/proc/self",
)  # fmt: skip
_WRITABLE = ("/dev/null",)
_KILLER_LOOKS = 100


class Subtree:
    """See `wall.Wall`. landlocked: whether jobs are confined."""

    sweeps = True

    def __init__(self, settings: Mapping[str, Any], *, landlocked: bool):
        self._settings = settings
        self._landlocked = landlocked
        self._jails: set[int] = set()
        self._user: int | None = None
        self._lease: socket.socket | None = None

    def prepare(self, control: socket.socket) -> Iterator[str]:
        yield "leaving the server"
        separation.die_with(self._settings["server"])
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        yield "listing children"
        _children()
        if self._landlocked:
            yield "asking for Landlock"
            if not landlock.version():
                raise OSError("the kernel has no Landlock (Linux 5.13 with lsm=landlock)")
            yield "taking a user number"
            if os.geteuid() != 0:
                raise OSError("only root can give each program a user of its own")
            yield "opening the interpreter as another user"
            _check_reach([*self._settings["expose"], self._settings["root"]])
            self._visible = _without_configuration(self._settings["expose"])
            self._filter = Filter(families=(), shared_memory=self._settings["counted"])

    def fork(self) -> tuple[int, int]:
        process, descriptor = syscalls.clone(0)
        self._jails.add(process)
        return process, descriptor

    def start(self) -> None:
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGTERM)
        os.setsid()
        if self._landlocked:
            self._user, self._lease = _lease_user()
            self.end_all()  # of an earlier jail that was killed

    def enter(self) -> None:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)

    def grant(self, job: Mapping[str, Any], mounts: Sequence[int]) -> None:
        if self._user is not None:
            for path in (job["scratch"], job["directory"]):
                _hand_over(path, self._user)

    def confine(self, job: Mapping[str, Any]) -> None:
        os.environ.update(self.environment(job))
        if self._user is None:
            return
        os.setgroups([])
        os.setresgid(self._user, self._user, self._user)
        os.setresuid(self._user, self._user, self._user)
        # Changing the user clears it.
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        inside.shield()
        readable = [*_READABLE, *self._visible]
        landlock.restrict(readable, [*_WRITABLE, job["scratch"], job["directory"]])
        self._filter.load()

    def environment(self, job: Mapping[str, Any]) -> dict[str, str]:
        return {"HOME": job["scratch"], "TMPDIR": job["scratch"]}

    def shield(self) -> None:
        """Another user than the job's is shield enough."""

    def end_all(self) -> None:
        with suppress(ChildProcessError):
            while True:
                # A child's number cannot belong to another process until it is collected here.
                for process in _children():
                    os.kill(process, signal.SIGKILL)
                if self._user is not None:
                    self._kill_user(self._user)
                os.waitpid(-1, 0)

    def _kill_user(self, user: int) -> None:
        """Kill all processes of the jail's user at once: no process can fork faster than that."""
        try:
            killer = os.fork()
        except BlockingIOError:
            return  # no process is free: `end_all` has killed children, which frees some, and calls again
        if killer == 0:
            try:
                os.setresuid(user, user, user)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        for _ in range(_KILLER_LOOKS):
            if os.waitpid(killer, os.WNOHANG)[0]:
                return
            time.sleep(0.001)
        # The job may have stopped it, where signals are not scoped (Landlock before version 6).
        os.kill(killer, signal.SIGKILL)
        os.waitpid(killer, 0)

    def read_back(self, job: Mapping[str, Any], work: Callable[[], None]) -> None:
        reader = os.fork()
        if reader == 0:
            try:
                self.confine(job)
                work()
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitpid(reader, 0)[1]:
            raise OSError("the job's files could not be read")

    def sweep(self) -> None:
        children = _children()
        self._jails &= children
        for process in children - self._jails:
            with suppress(OSError):
                user = os.stat(f"/proc/{process}").st_uid
                os.kill(process, signal.SIGKILL)
                lease = _lease(user) if self._landlocked and user in USERS else None
                if lease is not None:  # no living jail has this user
                    with lease, suppress(ChildProcessError):  # this process does not collect its children
                        self._kill_user(user)


def _without_configuration(expose: Sequence[str]) -> list[str]:
    """Return the exposed directories; instead of one that holds configuration files, its other entries."""
    hidden = set(configuration(expose))
    visible: list[str] = []
    for root in expose:
        if any(os.path.dirname(path) == root for path in hidden):
            visible += [entry.path for entry in os.scandir(root) if entry.path not in hidden]
        else:
            visible.append(root)
    return visible


def _check_reach(paths: Sequence[str]) -> None:
    """Raise OSError if a process cannot become a jail's user, or cannot reach one of the paths then."""
    trial = os.fork()
    if trial == 0:
        code = len(paths) + 1
        with suppress(OSError):
            os.setresuid(USERS[0], USERS[0], USERS[0])
            readable = [os.access(path, os.X_OK) for path in paths]
            code = 0 if all(readable) else 1 + readable.index(False)
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1])
    if 0 < code <= len(paths):
        path = paths[code - 1]
        raise OSError(f"other users cannot read {path}: `chmod o+x` the folders above it, or install it elsewhere")
    if code:
        raise OSError(f"this container cannot become user {USERS[0]}")


def _children() -> set[int]:
    """Return this process's children. Raises OSError."""
    with open("/proc/thread-self/children") as file:
        return {int(number) for number in file.read().split()}


def _lease_user() -> tuple[int, socket.socket]:
    """Return a user number that no other jail on this machine has, and what holds it."""
    first = int.from_bytes(os.urandom(2), "big")
    for number in range(len(USERS)):
        user = USERS[(first + number) % len(USERS)]
        lease = _lease(user)
        if lease is not None:
            return user, lease
    raise OSError(f"all {len(USERS)} user numbers for programs are taken")


def _lease(user: int) -> socket.socket | None:
    """Return what holds a user number; None if a jail has it. Unique in a network namespace."""
    lease = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        lease.bind(f"\0verl-dag-sandbox-user-{user}")
    except OSError:
        lease.close()
        return None
    return lease


def _hand_over(directory: str, user: int) -> None:
    """Give a directory with its content to `user`: what the server or an earlier jail made, never another's file that
    was linked there. Raises OSError."""
    # By the working directory, which any depth can be reached with; nothing else writes there meanwhile.
    os.chdir(directory)
    todo = [os.listdir()]
    os.chown(".", user, user)
    while todo:
        if not todo[-1]:
            todo.pop()
            os.chdir("..")
            continue
        name = todo[-1].pop()
        status = os.stat(name, follow_symlinks=False)
        if status.st_uid in USERS or (status.st_uid == 0 and status.st_nlink == 1) or stat.S_ISDIR(status.st_mode):
            os.chown(name, user, user, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            os.fchdir(folder)
            os.close(folder)
            todo.append(os.listdir())
