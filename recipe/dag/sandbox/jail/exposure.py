"""What of this machine a job may see.

Invariant: only what the interpreter needs to run is exposed, read-only and at the same paths, so that modules imported
before and after a fork agree: the system's /usr, the interpreter's prefixes, its site-packages, its libraries.
"""

from __future__ import annotations

import os
import sys

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
"""Directories are bound; where a distribution has merged them into /usr, they are symlinks and stay such."""
SESSION = "/session"
"""Inside a jail: the directory that lasts from one job of a session to the next, and such a job's working directory."""
_TOO_MUCH = ("/", "/home", "/root", "/var", "/etc", "/tmp", "/mnt", "/opt", "/srv", "/proc", "/sys", "/dev", SESSION)


def interpreter() -> list[str]:
    """Directories that hold this interpreter and its packages, none inside another, none inside /usr.

    Raises ValueError for a prefix that would expose far more than an interpreter.
    """
    found = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *packages(), *libraries()]
    # A virtual environment's python is a chain of links; each may lead through another directory.
    link = sys.executable
    for _ in range(40):
        if not os.path.islink(link):
            break
        link = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
        found.append(os.path.dirname(os.path.dirname(link)))
    found += [os.path.realpath(path) for path in found]
    wanted: list[str] = []
    for path in sorted({os.path.normpath(path) for path in found}):
        if under(path, SYSTEM) or under(path, wanted) or not os.path.isdir(path):
            continue
        if path in _TOO_MUCH or path == os.path.expanduser("~"):
            raise ValueError(f"the interpreter's prefix {path} holds more than that; use a virtual environment")
        wanted.append(path)
    return wanted


def packages() -> list[str]:
    """Package directories outside of the prefixes, such as a user's own."""
    prefixes = [sys.prefix, sys.base_prefix]
    return [
        path
        for path in sys.path
        if os.path.basename(path) in ("site-packages", "dist-packages") and not under(path, prefixes)
    ]


def libraries() -> list[str]:
    """What LD_LIBRARY_PATH names."""
    named = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return [path for path in named if os.path.isabs(path) and os.path.basename(path).startswith("lib")]


def under(path: str, directories: list[str] | tuple[str, ...]) -> bool:
    return any(path == directory or path.startswith(directory.rstrip("/") + "/") for directory in directories)
