"""The seccomp filter of jobs, as a BPF program.

Invariant: a call that is not in `allowed_calls`, or that belongs to a foreign ABI, is refused, and so is an allowed
call with an argument that would make a namespace, load a kernel module, watch or delay the host, or take memory that no
limit counts. A refusal is an errno, never a kill, since libraries probe for calls and continue without them: EPERM,
or ENOSYS for calls that are newer than Linux 5.0, as from a kernel without them.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Sequence
from socket import AF_INET, AF_INET6, AF_UNIX, SOCK_SEQPACKET, SOCK_STREAM

from recipe.sandbox.jail import syscalls
from recipe.sandbox.jail.allowed_calls import allowed

# Instructions (operation, jump if true, jump if false, value); every path through a block ends in a return.
Block = list[tuple[int, int, int, int]]

_LOAD, _AND, _EQUAL, _NOT_LESS, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data
_MODE_FILTER = 2
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_FIRST_NEWER = 424
"""The first call with the same number everywhere, of Linux 5.1. The numbers of x32 are above it, too."""
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
"""Memory that no limit counts. Absent rather than refused, since callers expect that of older kernels."""

_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_HUGE_PAGES = 0x40000  # MAP_HUGETLB: from the host's pool, and not counted as resident
_SHARED_ANONYMOUS = 0x21  # MAP_SHARED | MAP_ANONYMOUS
_FAMILIES = (AF_UNIX, AF_INET, AF_INET6)
_SOCKET_TYPE, _SOCKET_TYPES = 0xF, (1, 2, 3, 5)  # stream, datagram, raw, sequenced packets
_PROTOCOLS = (0, 1, 6, 17)  # default, UNIX or ICMP, TCP, UDP; for others the host would load modules
# All but leases and directory notification, which reach the host's files, and the size of pipes, which uses up a
# budget of the host's user. Frequent commands first: GETFD to SETFL, DUPFD_CLOEXEC, DUPFD, locks.
_FCNTL_COMMANDS = (1, 2, 3, 4, 1030, 0, 5, 6, 7, 36, 37, 38, 8, 9, 10, 11, 15, 16, 1027, 1032)
# TIOCSTI and TIOCLINUX type into a terminal; for those of bridges, VLANs and DLCIs the host would load modules.
_REFUSED_IOCTLS = (0x5412, 0x541C, 0x8940, 0x8941, 0x8980, 0x8981, 0x8982, 0x8983, 0x89A0, 0x89A1)
_CORE_SCHEDULING = 62  # PR_SCHED_CORE: would keep others off this core's second thread
_QUERY = 0xFFFFFFFF
_SOL_SOCKET = 1
_BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and those that exceed the host's limits


def _answer(value: int) -> Block:
    return [(_RETURN, 0, 0, value)]


def _refuse(error: int) -> Block:
    return _answer(0x00050000 | error)  # SECCOMP_RET_ERRNO


_ALLOWED = _answer(0x7FFF0000)
_REFUSED, _ABSENT = _refuse(errno.EPERM), _refuse(errno.ENOSYS)


def program(
    machine: str = syscalls.MACHINE, *, families: Sequence[int] = _FAMILIES, shared_memory: bool = True
) -> bytes:
    """Return the filter as an array of `struct sock_filter`.

    families: of `socket`; without any, as behind Landlock, connected pairs of UNIX stream sockets are left, and no
    extended attributes can be set. shared_memory: whether
    anonymous memory that processes share, and larger socket buffers, are allowed, which only a memory cgroup counts.
    """
    socket = _if(1, _SOCKET_TYPES, _ALLOWED, _refuse(errno.ESOCKTNOSUPPORT), mask=_SOCKET_TYPE)
    socket = _if(2, _PROTOCOLS, socket, _refuse(errno.EPROTONOSUPPORT))
    mmap = _ALLOWED
    inspected = {}
    if not shared_memory:
        mmap = _if(3, (_SHARED_ANONYMOUS,), _refuse(errno.ENOMEM), _ALLOWED, mask=_SHARED_ANONYMOUS)
        inspected["setsockopt"] = _if(1, (_SOL_SOCKET,), _if(2, _BUFFER_SIZES, _REFUSED, _ALLOWED), _ALLOWED)
    inspected |= {
        "clone": _if(0, (0,), _ALLOWED, _REFUSED, mask=_NAMESPACES),
        "fcntl": _if(1, _FCNTL_COMMANDS, _ALLOWED, _REFUSED),
        "ioctl": _if(1, _REFUSED_IOCTLS, _REFUSED, _ALLOWED),
        "mmap": _if(3, (0,), mmap, _refuse(errno.ENOMEM), mask=_HUGE_PAGES),
        "personality": _if(0, (_QUERY,), _ALLOWED, _REFUSED),
        "prctl": _if(0, (_CORE_SCHEDULING,), _REFUSED, _ALLOWED),
        "socket": _if(0, families, socket, _refuse(errno.EAFNOSUPPORT)),
        "socketpair": _if(0, (AF_UNIX,), _ALLOWED, _refuse(errno.EAFNOSUPPORT)),
    }
    if not families:
        # A datagram socket of a pair could be bound, and could send, like any other.
        streams = _if(1, (SOCK_STREAM, SOCK_SEQPACKET), _ALLOWED, _refuse(errno.ESOCKTNOSUPPORT), mask=_SOCKET_TYPE)
        inspected["socketpair"] = _if(0, (AF_UNIX,), streams, _refuse(errno.EAFNOSUPPORT))
        inspected |= dict.fromkeys(("bind", "connect", "listen", "accept", "accept4"), _REFUSED)
        # Landlock does not know them, so they would reach the host's world-writable files.
        names = (f"{sign}{call}" for sign in ("", "l", "f") for call in ("setxattr", "removexattr"))
        inspected |= dict.fromkeys(names, _refuse(errno.EOPNOTSUPP))
    answers = [_REFUSED] * _FIRST_NEWER + [_ABSENT] * 100  # by number
    answers[_MEMFD_CREATE[machine]] = _ABSENT
    for name, number in allowed(machine).items():
        answers[number] = inspected.get(name, _ALLOWED)
    starts = [number for number, block in enumerate(answers) if number == 0 or block is not answers[number - 1]]
    code = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, _ARCHITECTURES[machine]), *_ABSENT]
    code += [(_LOAD, 0, 0, _NUMBER_AT), *_search([(number, answers[number]) for number in starts])]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _search(blocks: Sequence[tuple[int, Block]]) -> Block:
    """Return a binary search for the last of the sorted `blocks` whose number is not above the loaded one."""
    if len(blocks) == 1:
        return blocks[0][1]
    middle = len(blocks) // 2
    below, others = _search(blocks[:middle]), _search(blocks[middle:])
    return [(_NOT_LESS, len(below), 0, blocks[middle][0]), *below, *others]


def _if(argument: int, values: Sequence[int], then: Block, otherwise: Block, *, mask: int = 0xFFFFFFFF) -> Block:
    """Return a test whether an argument's lower 32 bits, which hold all that these calls read, are one of `values`."""
    code = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), (_AND, 0, 0, mask)]
    for left, value in zip(reversed(range(len(values))), values, strict=True):
        code.append((_EQUAL, left + len(otherwise), 0, value))
    return [*code, *otherwise, *then]


class Filter:
    """The filter in memory, prepared once so that loading it is one call. Takes the options of `program`."""

    def __init__(self, *, families: Sequence[int] = _FAMILIES, shared_memory: bool = True) -> None:
        code = program(families=families, shared_memory=shared_memory)
        self._code = ctypes.create_string_buffer(code, len(code))
        self._header = ctypes.create_string_buffer(
            struct.pack("@HP", len(code) // 8, ctypes.addressof(self._code)), struct.calcsize("@HP")
        )

    def load(self) -> None:
        """Apply the filter to this process and everything that it starts; needs no_new_privs."""
        syscalls.prctl(syscalls.PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(self._header))
