"""The root file system that all jails of one zygote share.

Invariant: after `build` only the directories in `expose` can be reached of the host, besides the system's, and nothing
can be written. Each jail adds its own mounts on top.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from recipe.sandbox.jail import syscalls
from recipe.sandbox.jail.exposure import SESSION, SYSTEM, configuration, under

COVER = "/.empty"
"""An empty directory, mounted over directories that jobs must not see; NOTHING is the same for files."""
NOTHING = "/.nothing"
NAME = "sandbox"
USER = 61234
"""User and group number in a jail."""
DEVICES = ("null", "zero", "full", "random", "urandom")
WRITABLE_ALIASES = ("/mnt", "/var/tmp", "/dev/shm")
"""Symlinks to directories of a job's only writable file system, /tmp, so that one size limit applies to all."""
_SETTINGS = {
    "passwd": f"{NAME}:x:{USER}:{USER}::/tmp:/bin/sh\n",
    "group": f"{NAME}:x:{USER}:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def build(expose: Sequence[str], *, zero: bool = True) -> None:
    """Build the root file system and enter it, in fresh mount and process namespaces. Raises OSError.

    expose: directories that stay visible. zero: whether to bind /dev/zero, whose shared mappings are memory that only a
    control group counts; else a file of zeros takes its place.
    """
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    # Opened first, since their paths may be under the directory that the new root is mounted on.
    sources = {path: _open(path) for path in (*system_directories(), *expose)}
    devices = {name: _open(f"/dev/{name}") for name in DEVICES if zero or name != "zero"}
    files = settings()
    hidden = configuration(expose)
    symlinks = links()
    syscalls.mount("tmpfs", "/tmp", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=4m,nr_inodes=10k,mode=755")
    os.chdir("/tmp")
    os.umask(0o022)
    for name in ("proc", "dev", "tmp", "etc", "in", SESSION[1:], "var", COVER[1:]):
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
    if not zero:
        with open("dev/zero", "w") as file:
            os.truncate(file.fileno(), 1 << 60)
    for name, content in files.items():
        with open(f"etc/{name}", "wb") as file:
            file.write(content)
    _link_aliases(expose)
    with open(NOTHING[1:], "wb"):
        pass
    hidden += ["/usr/src"] * _hides_sources(expose)
    hide(hidden, ".")
    for path in hidden:
        syscalls.restrict_mount(path[1:], recursive=False)
    syscalls.mount("proc", "proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    for descriptor in (*sources.values(), *devices.values()):
        os.close(descriptor)
    syscalls.pivot_into_cwd()
    syscalls.restrict_mount("/", recursive=False)


def _link_aliases(expose: Sequence[str]) -> None:
    for path in WRITABLE_ALIASES:
        if not os.path.lexists(path[1:]) and not any(under(exposed, (path,)) for exposed in expose):
            os.symlink(backing(path), path[1:])


def _hides_sources(expose: Sequence[str]) -> bool:
    """Return whether to hide /usr/src, which may hold the code of this machine's users."""
    return os.path.isdir("usr/src") and not any(under(exposed, ("/usr/src",)) for exposed in expose)


def hide(paths: Sequence[str], root: str = "") -> None:
    """Mount nothing over files and directories below `root`."""
    for path in paths:
        target = root + path
        syscalls.mount(root + (COVER if os.path.isdir(target) else NOTHING), target, None, syscalls.MS_BIND)


def backing(path: str) -> str:
    """Return the directory in /tmp that one of WRITABLE_ALIASES links to."""
    return "/tmp/." + path[1:].replace("/", "-")


def backing_directories() -> list[str]:
    """Return the directories that a job's /tmp needs for the aliases that exist. Call it after `build`."""
    return [os.readlink(path) for path in WRITABLE_ALIASES if os.path.islink(path)]


def system_directories() -> list[str]:
    return [path for path in SYSTEM if os.path.isdir(path) and not os.path.islink(path)]


def links() -> dict[str, str]:
    """Return the symlinks of the root as path: target, for merged directories, the streams and update-alternatives."""
    symlinks = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}
    symlinks |= {"/dev/fd": "/proc/self/fd"}
    symlinks |= {f"/dev/{name}": f"/proc/self/fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))}
    with suppress(OSError):
        for entry in os.scandir("/etc/alternatives"):
            if entry.is_symlink():
                symlinks[entry.path] = os.readlink(entry.path)
    return symlinks


def settings() -> dict[str, bytes]:
    """Return the files of /etc: made up, except the host's library cache and time zone."""
    files = {name: text.encode() for name, text in _SETTINGS.items()}
    for name in ("ld.so.cache", "localtime"):
        with suppress(OSError), open(f"/etc/{name}", "rb") as file:
            files[name] = file.read(1 << 20)
    return files


def _open(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def _bind(source: int, target: str) -> None:
    syscalls.mount(f"/proc/self/fd/{source}", target, None, syscalls.MS_BIND | syscalls.MS_REC)
