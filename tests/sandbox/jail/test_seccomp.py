"""The filter, run by a BPF interpreter for both architectures, so that both tables are tested."""

from __future__ import annotations

import errno
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.sandbox.jail.allowed_calls import MACHINES, allowed
from recipe.sandbox.jail.seccomp import program

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW = 0x7FFF0000
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
REFUSED = """
    acct add_key adjtimex bpf capset chroot clock_adjtime clock_settime clone3 create_module delete_module
    fanotify_init fanotify_mark finit_module fsconfig fsmount fsopen fspick get_mempolicy init_module inotify_add_watch
    inotify_init inotify_init1 io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit io_uring_enter
    io_uring_register io_uring_setup ioperm iopl ioprio_set kcmp kexec_file_load kexec_load keyctl listmount
    lookup_dcookie mbind memfd_create memfd_secret migrate_pages mlock mlock2 mlockall modify_ldt mount mount_setattr
    move_mount move_pages mq_notify mq_open mq_timedreceive mq_timedsend msgctl msgget msgrcv msgsnd name_to_handle_at
    nfsservctl open_by_handle_at open_tree perf_event_open pidfd_getfd pivot_root process_madvise process_mrelease
    process_vm_readv process_vm_writev ptrace quotactl quotactl_fd reboot remap_file_pages request_key
    sched_setattr sched_setparam sched_setscheduler semctl semget semop semtimedop set_mempolicy
    set_mempolicy_home_node setdomainname sethostname setns settimeofday shmat shmctl shmdt shmget statmount swapoff
    swapon sync syncfs sysfs syslog umount2 unshare uselib userfaultfd ustat vhangup vmsplice
""".split()


def verdict(machine: str, call: str | int, *arguments: int, architecture: int | None = None, **options) -> int:
    """Return an errno, or 0 if the call is allowed."""
    number = allowed(machine)[call] if isinstance(call, str) else call
    padded = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("=IIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *padded)
    code = list(struct.iter_unpack("=HBBI", program(machine, **options)))
    accumulator, position = 0, 0
    while True:
        operation, taken, otherwise, value = code[position]
        position += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif operation == 0x54:
            accumulator &= value
        elif operation == 0x06:
            return 0 if value == ALLOW else value & 0xFFFF
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value}[operation]
            position += taken if holds else otherwise


def numbers_of_header(machine: str) -> dict[str, int]:
    """Return the kernel's numbers by name; names of the generic header are those of a 64-bit architecture."""
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    text = HEADERS[machine].read_text()
    shared = {name: int(number) for name, number in re.findall(r"__NR3264_(\w+) (\d+)$", text, re.M)}
    defined = re.findall(r"#define __NR_(\w+) (?:__NR3264_)?(\w+)$", text, re.M)
    return {name: int(value) if value.isdigit() else shared.get(value, -1) for name, value in defined}


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_kernels_header(machine):
    known = numbers_of_header(machine)
    # Calls that are newer than the installed header cannot be compared.
    wrong = {name: number for name, number in allowed(machine).items() if known.get(name, number) != number}
    unknown = {number for name, number in allowed(machine).items() if name not in known}
    assert wrong == {} and all(number > max(known["futex_waitv"], 449) for number in unknown)


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_unique_and_new_ones_are_the_same_everywhere(machine):
    numbers = allowed(machine)
    assert len(set(numbers.values())) == len(numbers)
    new = {name: number for name, number in numbers.items() if number >= 424}
    assert new == {name: number for name, number in allowed("x86_64").items() if number >= 424}


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_not_listed_is_refused(machine):
    listed, absent = set(allowed(machine).values()), {"x86_64": 319, "aarch64": 279}[machine]
    answers = {number: verdict(machine, number) for number in range(700) if number not in listed}
    expected = {number: errno.EPERM if number < 424 and number != absent else errno.ENOSYS for number in answers}
    assert answers == expected and len(answers) > 400


@pytest.mark.parametrize("machine", MACHINES)
def test_dangerous_calls_are_refused(machine):
    assert set(allowed(machine)) & set(REFUSED) == set()
    known = numbers_of_header(machine)
    assert {name for name in REFUSED if name in known and verdict(machine, known[name]) == 0} == set()


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_listed_is_allowed(machine):
    arguments = {"socket": (1, 1), "socketpair": (1,), "personality": (0xFFFFFFFF,), "mmap": (0, 0, 3, 0x22)}
    names = allowed(machine)
    assert {name for name in names if verdict(machine, name, *arguments.get(name, ())) != 0} == set()
    assert len(names) > 200


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("call", "arguments", "answer"),
    [
        ("clone", (0x11,), 0),
        ("clone", (0x3D0F00,), 0),  # a thread
        *[("clone", (flag | 0x11,), errno.EPERM) for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000)],
        *[("clone", (flag | 0x11,), errno.EPERM) for flag in (0x10000000, 0x20000000, 0x40000000)],
        *[("fcntl", (3, command), 0) for command in (0, 1, 4, 7, 38, 1030)],
        *[("fcntl", (3, command), errno.EPERM) for command in (1024, 1026, 1031, 1040)],
        ("fcntl", (3, 1 << 32 | 1024), errno.EPERM),
        ("ioctl", (0, 0x5401), 0),
        ("ioctl", (0, 0x5412), errno.EPERM),
        ("ioctl", (0, 1 << 32 | 0x5412), errno.EPERM),
        *[("ioctl", (0, request), errno.EPERM) for request in (0x541C, 0x8940, 0x8982, 0x89A0)],
        ("mmap", (0, 1, 3, 0x40022), errno.ENOMEM),
        ("mmap", (0, 1, 3, 0x21), 0),
        ("personality", (0,), errno.EPERM),
        ("personality", (0x40000,), errno.EPERM),
        ("prctl", (15,), 0),
        ("prctl", (62,), errno.EPERM),
        *[("socket", (family, 0x80001), 0) for family in (1, 2, 10)],
        *[("socket", (family, 1), errno.EAFNOSUPPORT) for family in (0, 16, 17, 38, 40)],
        *[("socket", (2, kind), errno.ESOCKTNOSUPPORT) for kind in (4, 6, 10)],
        *[("socket", (2, 1, protocol), errno.EPROTONOSUPPORT) for protocol in (33, 132, 262)],
        ("socketpair", (1, 5), 0),
        *[("socketpair", (family, 1), errno.EAFNOSUPPORT) for family in (2, 10, 16)],
    ],
)
def test_arguments(machine, call, arguments, answer):
    assert verdict(machine, call, *arguments) == answer


@pytest.mark.parametrize("machine", MACHINES)
def test_options(machine):
    assert verdict(machine, "socket", socket.AF_UNIX, 1, families=()) == errno.EAFNOSUPPORT
    assert verdict(machine, "socket", socket.AF_INET, 1, families=(socket.AF_UNIX,)) == errno.EAFNOSUPPORT
    assert verdict(machine, "socket", socket.AF_UNIX, 1, families=(socket.AF_UNIX,)) == 0
    assert verdict(machine, "socketpair", socket.AF_UNIX, 1, families=()) == 0
    flags = {0x21: errno.ENOMEM, 0x1: 0, 0x22: 0, 0x2: 0, 0x40021: errno.ENOMEM}
    assert {flag: verdict(machine, "mmap", 0, 1, 3, flag, shared_memory=False) for flag in flags} == flags


def test_foreign_calling_conventions_are_refused():
    assert verdict("x86_64", 1, architecture=0x40000003) == errno.ENOSYS
    assert verdict("aarch64", 1, architecture=0x40000028) == errno.ENOSYS
    assert {verdict("x86_64", 0x40000000 + number) for number in range(700)} == {errno.ENOSYS}
    assert verdict("x86_64", 0xFFFFFFFF) == errno.ENOSYS


def test_the_kernel_accepts_the_options():
    code = """
import mmap, multiprocessing, socket
from recipe.sandbox.jail import syscalls
from recipe.sandbox.jail.seccomp import Filter
syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
Filter(families=(), shared_memory=False).load()
for act in (lambda: socket.socket(socket.AF_UNIX), lambda: mmap.mmap(-1, 4096)):
    try: act()
    except OSError as error: print(error.errno)
print(len(socket.socketpair()), multiprocessing.Array("i", [1, 2])[:])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{errno.EAFNOSUPPORT}\n{errno.ENOMEM}\n2 [1, 2]\n", done.stderr
