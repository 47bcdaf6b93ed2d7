"""Sets up a jail from inside: its namespaces before it takes a job, and its mounts and rights before the job starts.

Invariant: after `settle` this process and everything that it starts hold no capability, can gain none, make no refused
system call, and see nothing of the host except the read-only base and what was granted.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence

from recipe.sandbox.jail import rootfs, syscalls
from recipe.sandbox.jail.exposure import SESSION, under
from recipe.sandbox.jail.seccomp import Filter

NAMESPACES = syscalls.NEWUSER | syscalls.NEWNS | syscalls.NEWPID | syscalls.NEWIPC | syscalls.NEWUTS | syscalls.NEWNET
SCRATCH = "/tmp/tmp_sandbox"
"""Named as in SandboxFusion, but constant: a random name would make every traceback unique."""
_MASKED = (
    "acpi", "asound", "cmdline", "interrupts", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list",
    "timer_stats",
)  # fmt: skip
"""Entries of /proc that tell about the host: those that Docker hides, and the kernel's command line."""
TCP_BUFFER = 65_536
"""Bytes of each direction, where nothing but the watchdog limits memory."""
_SIOCSIFFLAGS = 0x8914
_LOOPBACK_UP = struct.pack("16sH14x", b"lo", 0x49)  # struct ifreq with the flags up, loopback, running


def readable_masked() -> list[str]:
    """Return the entries of /proc to hide in jails; those that jobs cannot read are not worth a mount."""
    return [path for name in _MASKED if os.access(path := f"/proc/{name}", os.R_OK)]


def enter(
    user: int,
    group: int,
    directories: Sequence[str],
    expose: Sequence[str],
    masked: Sequence[str],
    *,
    fixed_buffers: bool,
) -> None:
    """Set up fresh namespaces: map the user, mount /proc and a writable /tmp, enable loopback. Raises OSError.

    masked: entries of /proc to hide. fixed_buffers: keep the kernel from enlarging buffers of TCP.
    """
    map_user("self", [(rootfs.USER, user, 1)], [(rootfs.USER, group, 1)])
    syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    rootfs.hide(masked)
    _mount_tmp(expose)
    make_directories(directories)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        syscalls.ioctl(any_socket.fileno(), _SIOCSIFFLAGS, _LOOPBACK_UP)
    for name in ("tcp_rmem", "tcp_wmem") if fixed_buffers else ():
        with open(f"/proc/sys/net/ipv4/{name}", "w") as file:  # of this network namespace
            file.write(f"4096 {TCP_BUFFER} {TCP_BUFFER}")


def make_directories(directories: Sequence[str]) -> None:
    """Make the directories of a job's writable file system, and SCRATCH for its program."""
    for path in directories:
        os.mkdir(path, 0o1777)
    os.mkdir(SCRATCH, 0o700)


def grant(work: bool, shares: Sequence[str], mounts: Sequence[int]) -> None:
    """Attach the sessions' mounts that the server sent, the job's own first, if it has one, then the shared ones."""
    targets = [SESSION] if work else []
    if shares:
        syscalls.mount("tmpfs", "/in", "tmpfs", _QUIET, "size=64k,nr_inodes=1k,mode=755")
        targets += [f"/in/{name}" for name in shares]
    for mount, target in zip(mounts, targets, strict=True):
        if target != SESSION:
            os.mkdir(target)
        syscalls.attach_mount(mount, target)
        os.close(mount)
    if shares:
        syscalls.restrict_mount("/in", recursive=False)


def settle(seccomp: Filter) -> None:
    """Give up all rights permanently."""
    shield()
    seccomp.load()


def shield() -> None:
    """Drop all capabilities and the ways to gain any: with no_new_privs the bounding set has no effect either. Until
    the process becomes dumpable again, other processes of the same user can neither read nor trace it."""
    # In this order: a process without capabilities can neither read nor trace one that has them.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    syscalls.drop_capabilities()
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)


def map_user(
    process: str,
    users: Sequence[tuple[int, int, int]],
    groups: Sequence[tuple[int, int, int]],
    *,
    deny: bool = True,
) -> None:
    """Write a user namespace's maps: (inside, outside, count). deny: disable setgroups, which a process without rights
    outside must do."""
    for name, text in (
        *([("setgroups", "deny")] if deny else []),
        ("uid_map", "".join(f"{inside} {outside} {count}\n" for inside, outside, count in users)),
        ("gid_map", "".join(f"{inside} {outside} {count}\n" for inside, outside, count in groups)),
    ):
        descriptor = os.open(f"/proc/{process}/{name}", os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        except OSError as error:
            raise OSError(error.errno, f"write of {name}: {error.strerror}") from error
        finally:
            os.close(descriptor)


_QUIET = syscalls.MS_NOSUID | syscalls.MS_NODEV


def _mount_tmp(expose: Sequence[str]) -> None:
    """Mount a writable /tmp, then bind the exposed directories below it again: the interpreter may be in /tmp."""
    below = [(path, os.open(path, os.O_PATH)) for path in expose if under(path, ("/tmp",))]
    syscalls.mount("tmpfs", "/tmp", "tmpfs", _QUIET, "size=256m,nr_inodes=20000,mode=1777")
    for path, descriptor in below:
        os.makedirs(path, exist_ok=True)
        syscalls.mount(f"/proc/self/fd/{descriptor}", path, None, syscalls.MS_BIND | syscalls.MS_REC)
        os.close(descriptor)
