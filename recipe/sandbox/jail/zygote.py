"""A process that has loaded an interpreter, and perhaps libraries, and forks itself into fresh jails.

Invariant: it is single-threaded, holds no secret and never sees a job; it dies with the server, and everything that it
started dies with it. It is started by exec with a scrubbed environment, so it shares no memory with the server.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any

from recipe.sandbox.jail import program, protocol, separation, supervisor, syscalls, wall

_JAIL_CONNECTION = 3
_SWEEP_S = 1.0
_FORK_AGAIN_MS = 50


def serve(number: int) -> program.Program:
    """Fork jails until the server hangs up. Returns in a job's process only.

    number: the descriptor of the connection to the server.
    """
    control = socket.socket(fileno=number)
    step = "receiving the settings"
    try:
        settings, _ = protocol.receive(control)
        barrier = wall.make(settings)
        for name in barrier.prepare(control):
            step = name
        step = "loading libraries"
        _load(settings)
    except protocol.Closed:
        os._exit(0)
    except BaseException as error:
        separation.fail(control, step, error)
    # Jails are not waited for here: the server holds a descriptor of each, and the kernel collects them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    gc.collect()
    gc.freeze()
    gc.disable()
    protocol.send(control, {"ready": True, "modules": _modules()})
    return _fork_jails(control, settings, barrier)


def _fork_jails(control: socket.socket, settings: dict[str, Any], barrier: wall.Wall) -> program.Program:
    taken = _address_space()
    swept = time.monotonic()
    while True:
        heard = not barrier.sweeps
        while not heard:
            heard = bool(select.select([control], [], [], _SWEEP_S)[0])
            if time.monotonic() - swept >= _SWEEP_S:
                barrier.sweep()
                swept = time.monotonic()
        try:
            request, entrances = protocol.receive(control)
        except protocol.Closed:
            os._exit(0)
        per_jail = len(entrances) // request["jails"]
        for number in range(request["jails"]):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            process, descriptor = _fork(control, barrier)
            if process == 0:
                ours.detach()
                control.detach()
                for entrance in entrances[number * per_jail :][:per_jail]:
                    os.write(entrance, b"0")
                os.dup2(theirs.detach(), _JAIL_CONNECTION)
                syscalls.close_from(_JAIL_CONNECTION + 1)
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, _JAIL_CONNECTION)
                return _start(connection, settings, barrier, taken)
            protocol.send(control, {"jail": True}, [ours.fileno(), descriptor])
            ours.close()
            theirs.close()
            os.close(descriptor)
        for entrance in entrances:
            os.close(entrance)


def _fork(control: socket.socket, barrier: wall.Wall) -> tuple[int, int]:
    """Fork a jail. If the machine has no process left, wait for programs to end: the death of this process would be the
    death of all its jails."""
    while True:
        try:
            return barrier.fork()
        except BlockingIOError:
            poll = select.poll()
            poll.register(control, select.POLLRDHUP)
            if poll.poll(_FORK_AGAIN_MS):
                os._exit(0)


def _start(connection: socket.socket, settings: dict[str, Any], barrier: wall.Wall, taken: int) -> program.Program:
    """Run a jail. A failure ends it without a message: this process's stderr is not read, and a write to a full pipe
    would block."""
    try:
        return supervisor.Supervisor(connection, settings, barrier, taken).run()
    except BaseException:
        os._exit(program.PREPARATION_FAILED)


def _load(settings: dict[str, Any]) -> None:
    """Import the libraries of this kind, from the paths that jobs will see."""
    sys.path.pop(0)
    sys.path += [path for path in settings["packages"] if path not in sys.path]
    assert isinstance(sys.stdout, io.TextIOWrapper)  # a pipe
    sys.stdout.reconfigure(line_buffering=True)
    for name in settings["preload"]:
        importlib.import_module(name)
    # The first call of compile creates about two hundred types, and every job calls it.
    compile(b"", "<warm-up>", "exec")
    for statement in settings["warm_up"]:
        exec(statement, {})
    # A program must not find this package's modules; it may have modules of the same name.
    for name in [name for name in sys.modules if name.partition(".")[0] == "recipe"]:
        del sys.modules[name]


def _modules() -> list[str]:
    """Return the top-level names that a program would import from this process instead of from its own files."""
    return sorted({name.partition(".")[0] for name in sys.modules})


def _address_space() -> int:
    """Return the size of this process's address space in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
