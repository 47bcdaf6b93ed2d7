"""A process that keeps the sessions' file systems: one tmpfs each, mounted in its own namespaces.

Invariant: the kernel enforces the size and the number of files of each; nothing reaches a disk. It executes no job and
reads no file, and with it, at the latest with the server, everything that it mounted ends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from recipe.sandbox.jail import protocol, separation, syscalls

_QUIET = syscalls.MS_NOSUID | syscalls.MS_NODEV


def serve(number: int) -> NoReturn:
    """Answer the server's requests until it hangs up. number: the descriptor of the connection."""
    control = socket.socket(fileno=number)
    step = "receiving the settings"
    try:
        settings, _ = protocol.receive(control)
        step = "making namespaces"
        separation.separate(settings, control, syscalls.NEWUSER | syscalls.NEWNS)
        step = "mounting"
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        syscalls.mount("tmpfs", "/tmp", "tmpfs", _QUIET, "mode=700")
        os.chdir("/tmp")
    except protocol.Closed:
        os._exit(0)
    except BaseException as error:
        separation.fail(control, step, error)
    owner = settings["user"] if os.getuid() == 0 else os.getuid()
    protocol.send(control, {"ready": True})
    while True:
        try:
            request, _ = protocol.receive(control)
            _answer(control, request, owner)
        except (protocol.Closed, ConnectionError):
            os._exit(0)


def _answer(control: socket.socket, request: Mapping[str, Any], owner: int) -> None:
    descriptors = []
    try:
        descriptors = _do(request, owner)
        protocol.send(control, {"done": True}, descriptors)
    except ConnectionError:
        raise
    except OSError as error:
        protocol.send(control, {"failed": str(error)})
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _do(request: Mapping[str, Any], owner: int) -> list[int]:
    """Return the descriptors to answer with. Raises OSError."""
    name = request["name"]
    match request["do"]:
        case "create":
            os.mkdir(name)
            options = f"size={request['bytes']},nr_inodes={request['entries']},mode=700,uid={owner},gid={owner}"
            syscalls.mount("tmpfs", name, "tmpfs", _QUIET, options)
            return [os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        case "lend":
            tree = syscalls.clone_mount(name)
            if request["read_only"]:
                syscalls.restrict_mount(f"/proc/self/fd/{tree}", recursive=False)
            return [tree]
        case _:
            # The memory is freed when the last descriptor is closed.
            syscalls.unmount(name)
            os.rmdir(name)
            return []
