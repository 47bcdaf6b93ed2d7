"""Separates a zygote from the server: its own namespaces, and no root rights.

Invariant: when the server has ended, in whatever way, the kernel kills the keeper, and with it the helper.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from recipe.sandbox.jail import inside, protocol, syscalls

FAILED = 70


def separate(settings: Mapping[str, Any], control: socket.socket, namespaces: int) -> None:
    """Continue as the first process of fresh namespaces. The original process remains as its keeper, and both die with
    the server. Raises OSError."""
    die_with(settings["server"])
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        os.setgroups([])
    reader, writer = os.pipe()
    process, descriptor = syscalls.clone(namespaces)
    if process:
        os.close(descriptor)
        _keep(process, writer, _maps(user, settings["user"]), _maps(group, settings["user"]), control)
    os.close(writer)
    if os.read(reader, 1) != b"+":
        os._exit(0)
    os.close(reader)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()


def die_with(server: int) -> None:
    """Let the kernel kill this process when the server ends. Lifts its limits to what jobs' own limits start from."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (hard, hard))


def fail(control: socket.socket, step: str, error: BaseException) -> NoReturn:
    """Report a failure to the server and exit."""
    number = error.errno if isinstance(error, OSError) else None
    protocol.send(control, {"failed": step, "reason": f"{type(error).__name__}: {error}", "errno": number})
    os._exit(FAILED)


def _keep(process: int, go: int, users: list, groups: list, control: socket.socket) -> NoReturn:
    """Map the child's users, which needs rights outside of its namespace, and exit when the child does."""
    try:
        inside.map_user(str(process), users, groups, deny=os.geteuid() != 0)
    except OSError as error:
        os.kill(process, signal.SIGKILL)
        fail(control, "mapping users", error)
    os.write(go, b"+")
    os.close(go)
    control.close()
    os._exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) & 0xFF)


def _maps(own: int, other: int) -> list[tuple[int, int, int]]:
    return [(0, 0, 1), (other, other, 1)] if own == 0 else [(own, own, 1)]


def leave_root(user: int) -> tuple[int, int]:
    """Become `user` if this is root, whose processes escape the limit on processes and own the server's files. Returns
    the user and group numbers."""
    if os.geteuid() == 0:
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        # Changing the user clears both.
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
    return os.getuid(), os.getgid()
