"""The file system that all jails of one zygote start from.

Invariant: after `build` nothing of the host can be reached but what `expose` names, and nothing can be written. A
jail's own mounts come on top of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from recipe.dag.sandbox.jail import syscalls
from recipe.dag.sandbox.jail.exposure import SESSION, SYSTEM, under

HOST = "/.host"
"""Where the engine's root directory is mounted, out of sight of jobs: each jail covers it before its job starts."""
COVER = "/.empty"
NAME = "sandbox"
USER = 61234
"""User and group number inside."""
DEVICES = ("null", "zero", "full", "random", "urandom")
WRITABLE_ELSEWHERE = ("/mnt", "/var/tmp", "/dev/shm")
"""Names for directories of a job's one writable file system, so that one cap holds for all."""
_SETTINGS = {
    "passwd": f"{NAME}:x:{USER}:{USER}::/tmp:/bin/sh\n",
    "group": f"{NAME}:x:{USER}:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def build(expose: Sequence[str], host: str | None) -> None:
    """Make and enter it. Needs mount and process namespaces of its own and the rights over them. Raises OSError.

    expose: directories that stay visible. host: directory that shows up at HOST, writable; None: none does.
    """
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    # Opened first: what they are named after may lie under the directory that the new root is mounted on.
    sources = {path: _open(path) for path in (*system_directories(), *expose)}
    devices = {name: _open(f"/dev/{name}") for name in DEVICES}
    outside = _open(host) if host is not None else None
    files = settings()
    symlinks = links()
    syscalls.mount("tmpfs", "/tmp", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=4m,nr_inodes=10k,mode=755")
    os.chdir("/tmp")
    os.umask(0o022)
    for name in ("proc", "dev", "tmp", "etc", "in", SESSION[1:], "var", COVER[1:], HOST[1:]):
        os.mkdir(name)
    for path, source in sources.items():
        os.makedirs(path[1:], exist_ok=True)
        _bind(source, path[1:])
        syscalls.restrict_mount(path[1:])
    for path, target in symlinks.items():
        with suppress(FileExistsError):
            os.makedirs(os.path.dirname(path[1:]) or ".", exist_ok=True)
            os.symlink(target, path[1:])
    for name, source in devices.items():
        with open(f"dev/{name}", "w"):
            _bind(source, f"dev/{name}")
        syscalls.restrict_mount(f"dev/{name}", writable=True, devices=True)
    for name, content in files.items():
        with open(f"etc/{name}", "wb") as file:
            file.write(content)
    for path in WRITABLE_ELSEWHERE:
        if not os.path.lexists(path[1:]) and not any(under(exposed, (path,)) for exposed in expose):
            os.symlink(place(path), path[1:])
    # The code of whoever builds in /usr/src is none of a job's business.
    if os.path.isdir("usr/src") and not any(under(exposed, ("/usr/src",)) for exposed in expose):
        syscalls.mount(COVER[1:], "usr/src", None, syscalls.MS_BIND)
        syscalls.restrict_mount("usr/src")
    if outside is not None:
        _bind(outside, HOST[1:])
        syscalls.restrict_mount(HOST[1:], writable=True)
    syscalls.mount("proc", "proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    for descriptor in (*sources.values(), *devices.values(), *([outside] if outside is not None else [])):
        os.close(descriptor)
    syscalls.pivot_into_cwd()
    syscalls.restrict_mount("/", recursive=False)


def place(path: str) -> str:
    """Where in /tmp one of WRITABLE_ELSEWHERE really is."""
    return "/tmp/." + path[1:].replace("/", "-")


def writable_places() -> list[str]:
    """Directories that a job's writable file system must have for the names above."""
    return [os.readlink(path) for path in WRITABLE_ELSEWHERE if os.path.islink(path)]


def system_directories() -> list[str]:
    return [path for path in SYSTEM if os.path.isdir(path) and not os.path.islink(path)]


def links() -> dict[str, str]:
    """Symlinks that the root has: /lib64 and the like, the streams, what update-alternatives manages."""
    found = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}
    found |= {"/dev/fd": "/proc/self/fd"}
    found |= {f"/dev/{name}": f"/proc/self/fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))}
    with suppress(OSError):
        for entry in os.scandir("/etc/alternatives"):
            if entry.is_symlink():
                found[entry.path] = os.readlink(entry.path)
    return found


def settings() -> dict[str, bytes]:
    """The files of /etc: made up, but for where libraries lie and what time it is."""
    found = {name: text.encode() for name, text in _SETTINGS.items()}
    for name in ("ld.so.cache", "localtime"):
        with suppress(OSError), open(f"/etc/{name}", "rb") as file:
            found[name] = file.read(1 << 20)
    return found


def _open(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def _bind(source: int, target: str) -> None:
    syscalls.mount(f"/proc/self/fd/{source}", target, None, syscalls.MS_BIND | syscalls.MS_REC)
