"""System calls for which Python has no function.

Invariant: every call either succeeds or raises OSError with the call's name. Nothing here starts a thread, and the
interpreter lock is held throughout, so a fork may follow at any time.
"""

from __future__ import annotations

import ctypes
import os
import signal

_libc = ctypes.PyDLL(None, use_errno=True)

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_CLONE_PIDFD = 0x1000

MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1000, 0x4000, 0x40000, 2, 4, 8
MNT_DETACH = 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 1, 4

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
_CAPABILITY_HEADER = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
_NO_CAPABILITIES = (ctypes.c_uint32 * 6)()

_NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91},
}
# These have the same number on all architectures.
_OPEN_TREE, _MOVE_MOUNT, _CLOSE_RANGE, _MOUNT_SETATTR = 428, 429, 436, 442

MACHINE, RELEASE = os.uname().machine, os.uname().release


def supported() -> bool:
    """Return whether this module and the filter support this architecture."""
    return MACHINE in _NUMBERS


def _checked(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def call(name: str, number: int, *arguments: object) -> int:
    """Make a system call that libc has no function for. Raises OSError with its name."""
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *wide), name)


def clone(flags: int) -> tuple[int, int]:
    """Fork into new namespaces; return (0, -1) in the child, (pid, pidfd) in the parent.

    Python's fork hooks do not run, since the child forks again before it runs any other code.
    """
    descriptor = ctypes.c_int(-1)
    pid = call(
        "clone", _NUMBERS[MACHINE]["clone"], flags | _CLONE_PIDFD | signal.SIGCHLD, 0, ctypes.byref(descriptor), 0, 0
    )
    return pid, descriptor.value


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [os.fsencode(text) if text is not None else None for text in (source, target, kind, data)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _checked(result, f"mount of {kind or source} on {target}")


def restrict_mount(target: str, *, recursive: bool = True, writable: bool = False, devices: bool = False) -> None:
    """Make a mount, and those below it if `recursive`, nosuid, and by default read-only and without devices."""
    flags_to_set = _ATTR_NOSUID | (0 if writable else _ATTR_RDONLY) | (0 if devices else _ATTR_NODEV)
    attributes = (ctypes.c_uint64 * 4)(flags_to_set, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    path = os.fsencode(target)
    call("mount_setattr", _MOUNT_SETATTR, _AT_FDCWD, path, flags, ctypes.byref(attributes), ctypes.sizeof(attributes))


def clone_mount(path: str) -> int:
    """Return a descriptor of a copy of the mount at `path`, which is attached nowhere."""
    return call("open_tree", _OPEN_TREE, _AT_FDCWD, os.fsencode(path), _OPEN_TREE_CLONE | os.O_CLOEXEC)


def attach_mount(descriptor: int, target: str) -> None:
    """Mount a copy made by `clone_mount`, perhaps in other namespaces, at `target`. It can be attached once."""
    call("move_mount", _MOVE_MOUNT, descriptor, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)


def unmount(target: str) -> None:
    """Remove a mount from the tree; it ends with its last user."""
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount of {target}")


def pivot_into_cwd() -> None:
    """Make the working directory, which must be a mount, the root, and unmount the old root."""
    call("pivot_root", _NUMBERS[MACHINE]["pivot_root"], b".", b".")
    unmount(".")
    os.chdir("/")


def prctl(option: int, value: object = 0, more: object = 0) -> None:
    wide = [ctypes.c_ulong(item) if isinstance(item, int) else item for item in (value, more)]
    _checked(_libc.prctl(option, *wide, ctypes.c_ulong(0), ctypes.c_ulong(0)), f"prctl {option}")


def drop_capabilities() -> None:
    """Drop the permitted, effective, inheritable and ambient capabilities."""
    call("capset", _NUMBERS[MACHINE]["capset"], _CAPABILITY_HEADER, _NO_CAPABILITIES)


def ioctl(descriptor: int, request: int, argument: bytes) -> None:
    _checked(_libc.ioctl(descriptor, ctypes.c_ulong(request), argument), "ioctl")


def close_from(first: int) -> None:
    call("close_range", _CLOSE_RANGE, first, 0x7FFFFFFF, 0)
