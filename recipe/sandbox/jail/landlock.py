"""Landlock: a process gives up the files that it does not need, for good.

Invariant: after `restrict` this process and everything that it starts open only what is listed. Names stay visible: the
kernel does not restrict `stat`, `chdir` and `chmod`, so the process must also be a user who owns nothing else.
Source: the kernel's Documentation/userspace-api/landlock.rst.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress

from recipe.sandbox.jail import syscalls

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""The same numbers on every architecture."""
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_HANDLED = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Rights over files by the version that introduced the last of them."""
_TCP = 0b11  # bind, connect: version 4
_SCOPES = 0b11  # abstract UNIX sockets, signals: version 6


def version() -> int:
    """Return the kernel's version of the interface; 0 without Landlock."""
    try:
        return syscalls.call("landlock_create_ruleset", _CREATE_RULESET, None, 0, _VERSION_FLAG)
    except OSError:
        return 0


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Allow only what is beneath these paths, to read and execute, or to do everything but to make devices; needs
    no_new_privs. Paths that do not exist are skipped. Raises OSError."""
    level = version()
    handled = max(rights for since, rights in _HANDLED.items() if since <= level)
    attributes = struct.pack("=QQQ", handled, _TCP, _SCOPES)[: 8 if level < 4 else 16 if level < 6 else 24]
    ruleset = syscalls.call("landlock_create_ruleset", _CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for paths, rights in ((readable, _READ), (writable, handled & ~(_MAKE_CHAR | _MAKE_BLOCK))):
            for path in paths:
                with suppress(FileNotFoundError):
                    _allow(ruleset, path, handled & rights)
        syscalls.call("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, descriptor)
        syscalls.call("landlock_add_rule", _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
