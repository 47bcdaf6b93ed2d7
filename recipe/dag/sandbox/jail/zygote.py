"""A process that has loaded an interpreter, and perhaps libraries, and forks itself into fresh jails.

Invariant: it is single-threaded, holds no secret and never sees a job; it dies with the server, and everything that it
ever started dies with it, since it is the first process of a process namespace. It is started anew (exec) with a
scrubbed environment, so it shares no memory with the server.

Started as `python -c STARTER`; its stdin says which descriptor is the connection, and where to import this from.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import socket
import sys
from typing import Any, NoReturn

from recipe.dag.sandbox.jail import inside, program, protocol, rootfs, supervisor, syscalls
from recipe.dag.sandbox.jail.seccomp import Filter

_JAIL_CONNECTION = 3
STARTER = """
import os, sys
number, sys.path[0] = os.read(0, 65536).decode().split("\\0")
from recipe.dag.sandbox.jail.zygote import serve
with serve(int(number)) as job: exec(vars().pop("job"))
"""
PROTOCOL_FAILED = 70


def serve(number: int) -> program.Program:
    """Fork jails until the server hangs up. Returns in a job's process only."""
    control = socket.socket(fileno=number)
    step = "receiving the settings"
    try:
        settings, _ = protocol.receive(control)
        step = "making namespaces"
        _separate(settings, control)
        step = "building the root file system"
        rootfs.build(settings["expose"], settings["host"])
        settings["places"] = rootfs.writable_places()
        step = "leaving root"
        user, group = _leave_root(settings)
        step = "loading libraries"
        _load(settings)
        step = "loading the filter"
        seccomp = Filter()
    except protocol.Closed:
        os._exit(0)
    except BaseException as error:
        number = error.errno if isinstance(error, OSError) else None
        protocol.send(control, {"failed": step, "why": f"{type(error).__name__}: {error}", "errno": number})
        os._exit(PROTOCOL_FAILED)
    # Nobody waits for jails here: the server holds a descriptor of each, and the kernel collects them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    gc.disable()
    protocol.send(control, {"ready": True, "modules": _modules(settings["foreign"])})
    return _fork_jails(control, settings, user, group, seccomp)


def _fork_jails(control: socket.socket, settings: dict[str, Any], user: int, group: int, seccomp: Filter):
    taken = _address_space()
    while True:
        try:
            request, _ = protocol.receive(control)
        except protocol.Closed:
            os._exit(0)
        for _ in range(request["jails"]):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            process, descriptor = syscalls.clone(inside.NAMESPACES)
            if process == 0:
                ours.detach()
                control.detach()
                os.dup2(theirs.fileno(), _JAIL_CONNECTION)
                theirs.detach()
                syscalls.close_from(_JAIL_CONNECTION + 1)
                connection = socket.socket(fileno=_JAIL_CONNECTION)
                try:
                    inside.enter(
                        user, group, settings["disk_mb"], settings["inodes"], settings["places"], settings["expose"]
                    )
                    return supervisor.Supervisor(connection, settings, seccomp, taken).run()
                except BaseException as error:
                    protocol.send(connection, {"refused": f"the jail broke: {type(error).__name__}: {error}"})
                    os._exit(PROTOCOL_FAILED)
            protocol.send(control, {"jail": True}, [ours.fileno(), descriptor])
            ours.close()
            theirs.close()
            os.close(descriptor)


def _separate(settings: dict[str, Any], control: socket.socket) -> None:
    """Go on as the first process of namespaces of our own; the caller's process stays behind as its keeper."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings["server"]:
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (hard, hard))
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        os.setgroups([])
    reader, writer = os.pipe()
    process, descriptor = syscalls.clone(inside.NAMESPACES)
    if process:
        os.close(descriptor)
        _keep(process, writer, _maps(user, settings["user"]), _maps(group, settings["user"]), control)
    os.close(writer)
    if os.read(reader, 1) != b"+":
        os._exit(0)
    os.close(reader)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    socket.sethostname(rootfs.NAME)


def _keep(process: int, go: int, users: list, groups: list, control: socket.socket) -> NoReturn:
    """Map the child's users, which takes rights outside of its namespace, and end when it does."""
    try:
        inside.map_user(str(process), users, groups, deny=os.geteuid() != 0)
    except OSError as error:
        protocol.send(control, {"failed": "mapping users", "why": str(error), "errno": error.errno})
        os.kill(process, signal.SIGKILL)
        os._exit(PROTOCOL_FAILED)
    os.write(go, b"+")
    os.close(go)
    control.close()
    os._exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) & 0xFF)


def _maps(own: int, other: int) -> list[tuple[int, int, int]]:
    return [(0, 0, 1), (other, other, 1)] if own == 0 else [(own, own, 1)]


def _leave_root(settings: dict[str, Any]) -> tuple[int, int]:
    """Root's processes escape the limit on processes, and own too much."""
    if os.geteuid() == 0:
        os.setresgid(settings["user"], settings["user"], settings["user"])
        os.setresuid(settings["user"], settings["user"], settings["user"])
        # A change of user clears both.
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
    return os.getuid(), os.getgid()


def _load(settings: dict[str, Any]) -> None:
    """Import what jobs of this kind need, from the paths that jobs will see."""
    sys.path.pop(0)
    sys.path += [path for path in settings["packages"] if path not in sys.path]
    sys.stdout.reconfigure(line_buffering=True)
    settings["foreign"] = [name for name in sys.modules if name.partition(".")[0] == "recipe"]
    for name in settings["preload"]:
        importlib.import_module(name)
    for statement in settings["warm_up"]:
        exec(statement, {})


def _modules(foreign: list[str]) -> list[str]:
    """What a program that imports one of these names would get from here, rather than from its own files."""
    return sorted({name.partition(".")[0] for name in sys.modules if name not in foreign})


def _address_space() -> int:
    """Of this process, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
