"""The directories of this machine that a job may see.

Invariant: only what the interpreter needs to run is exposed, read-only and at the same paths, so that modules imported
before and after a fork agree: the system's /usr, the interpreter's prefixes, its site-packages, its libraries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
"""Directories are bound; where a distribution has merged them into /usr, the symlinks are kept."""
SESSION = "/session"
"""The path of a session's directory in a jail: it persists between jobs, and is such a job's working directory."""
CONFIGURATION = (".conf", ".ini", ".env", "condarc", ".netrc", ".pypirc")
"""Ends of the names of files that may hold passwords of package indexes."""
_TOO_BROAD = ("/", "/home", "/root", "/var", "/etc", "/tmp", "/mnt", "/opt", "/srv", "/proc", "/sys", "/dev", SESSION)


def interpreter() -> list[str]:
    """Return the directories of this interpreter and its packages, none inside another, none inside /usr.

    Raises ValueError for a prefix that would expose far more than an interpreter.
    """
    candidates = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *packages(), *libraries()]
    # A virtual environment's python is a chain of links; each may lead through another directory.
    link = sys.executable
    for _ in range(40):
        if not os.path.islink(link):
            break
        link = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
        candidates.append(os.path.dirname(os.path.dirname(link)))
    candidates += [os.path.realpath(path) for path in candidates]
    directories: list[str] = []
    # Sorted, so that a directory comes before those inside it.
    for path in sorted({os.path.normpath(path) for path in candidates}):
        if under(path, SYSTEM) or under(path, directories) or not os.path.isdir(path):
            continue
        if path in _TOO_BROAD or path == os.path.expanduser("~"):
            raise ValueError(f"the interpreter's prefix {path} exposes too much; use a virtual environment")
        directories.append(path)
    return directories


def packages() -> list[str]:
    """Return the package directories outside of the prefixes, such as a user's own."""
    prefixes = [sys.prefix, sys.base_prefix]
    return [
        path
        for path in sys.path
        if os.path.basename(path) in ("site-packages", "dist-packages") and not under(path, prefixes)
    ]


def configuration(expose: Sequence[str]) -> list[str]:
    """Return the files to hide in the roots of the exposed directories, such as a virtual environment's pip.conf."""
    return [
        entry.path
        for path in expose
        for entry in os.scandir(path)
        if entry.name.endswith(CONFIGURATION) and entry.is_file()
    ]


def libraries() -> list[str]:
    """Return the absolute directories in LD_LIBRARY_PATH whose name starts with "lib"."""
    paths = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return [path for path in paths if os.path.isabs(path) and os.path.basename(path).startswith("lib")]


def under(path: str, directories: list[str] | tuple[str, ...]) -> bool:
    """Return whether `path` is one of the directories or inside one."""
    return any(path == directory or path.startswith(directory.rstrip("/") + "/") for directory in directories)
