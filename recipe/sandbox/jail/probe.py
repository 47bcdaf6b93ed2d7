"""Explains why jails cannot be made on this machine, and how to fix it."""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from pathlib import Path

from recipe.sandbox.jail import syscalls
from recipe.sandbox.outcome import Unavailable

_SYSCTLS = (
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
    ("/proc/sys/user/max_net_namespaces", "0", "sysctl -w user.max_net_namespaces=10000"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)
_CONTAINER = (
    "a container's default seccomp profile and masked /proc forbid it: start the container with"
    " --security-opt seccomp=unconfined --security-opt systempaths=unconfined"
)


def refuse_unknown(isolation: str) -> None:
    """Raise Unavailable on a machine where jails cannot work."""
    if not syscalls.supported():
        raise Unavailable(f"isolation {isolation} supports x86_64 and aarch64, not {syscalls.MACHINE}")
    if isolation != "full":
        return
    version = re.match(r"(\d+)\.(\d+)", syscalls.RELEASE)
    # Linux 5.12 added mount_setattr, and 5.14 a limit on processes per user namespace.
    if version is None or (int(version[1]), int(version[2])) < (5, 14):
        raise Unavailable(f"full isolation needs Linux 5.14 or newer; this is {syscalls.RELEASE}")


def explain(step: str, reason: str, number: int | None) -> str:
    """Return why full isolation failed and how to fix it, in one line. step, reason, number: as reported by the
    helper."""
    for path, forbidding, remedy in _SYSCTLS:
        with suppress(OSError):
            if Path(path).read_text().strip() == forbidding:
                return f"{reason}; {path} is {forbidding}: run `{remedy}` as root"
    if number in (errno.EPERM, errno.EACCES) and step in ("making namespaces", "mapping users", _BUILD):
        return f"{reason}; {_CONTAINER}"
    if number in (errno.ENOSYS, errno.EINVAL):
        return f"{reason}; Linux 5.14 or newer with user, mount, pid, net, ipc and uts namespaces is needed"
    if number == errno.ENOSPC:
        return f"{reason}; the limit on namespaces is reached: raise the values in /proc/sys/user/"
    return reason


_BUILD = "building the root file system"
