"""Attacks of a hostile program and their results. Every test also asserts, in its fixture, that the next call
answers within a second and that no process, mount, descriptor or file is left."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from recipe.sandbox import engines
from recipe.sandbox.jail import exposure
from recipe.sandbox.jail.exposure import SESSION
from recipe.sandbox.job import Job

TRIES = """
import errno, os, sys
def attempt(name, act):
    try:
        print(name, 'DONE', act())
    except OSError as error:
        print(name, errno.errorcode.get(error.errno, error.errno))
    except Exception as error:
        print(name, type(error).__name__)
"""
CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if libc.syscall(number, *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]) < 0:
        raise OSError(ctypes.get_errno(), '')
    return 'called'
"""


def answers(execution) -> dict[str, str]:
    """Return what `attempt` printed, by name."""
    assert execution.run.return_code == 0, execution
    return dict(line.split(" ", 1) for line in execution.run.stdout.splitlines())


# What becomes of its outcome.


@pytest.mark.parametrize(
    "code",
    [
        "import os, shutil\nshutil.rmtree(os.getcwd()); os._exit(3)",
        "import os\nos.chmod('.', 0); os._exit(3)",
        "import os\nos.rename('/tmp/tmp_sandbox', '/tmp/away'); os.symlink('/tmp/tmp_sandbox', '/tmp/tmp_sandbox'); "
        "os._exit(3)",
        "import os\nfor n in range(1200): os.mkdir('d'); os.chdir('d')\nos._exit(3)",
        "import os\nos.mkfifo('x'); os.symlink('x', 'y'); os.mkdir('d', 0); os._exit(3)",
    ],
    ids=["removed", "locked", "replaced", "deep", "fifo"],
)
def test_files_that_cannot_be_fetched_change_no_outcome(box, code):
    """A program must not choose SandboxError, nor to be run again."""
    jobs = box.engine.status()["jobs"]
    execution = box.run(code, fetch=["a", "**/*.png", "d/**/*", "x", "y", "/tmp/a*"], timeout_s=20)
    assert (execution.run.status, execution.run.return_code, execution.files) == ("finished", 3, {})
    assert box.engine.status()["jobs"] == jobs + 1


def test_a_session_that_is_locked_changes_no_outcome(box):
    with box.session() as work:
        execution = box.run("import os\nos.chmod('.', 0); os._exit(3)", work=work, fetch=["a", "*"])
        assert (execution.run.return_code, execution.files) == (3, {})


# What it can see.


def test_environment_holds_nothing_of_the_server(box, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-value")
    code = (
        "import os, subprocess\nprint(dict(os.environ), open('/proc/self/environ').read())\n"
        "print(subprocess.run(['cat', '/proc/self/environ', '/proc/self/cmdline'], capture_output=True).stdout)"
    )
    stdout = box.run(code).run.stdout
    assert "secret-value" not in stdout and "HF_TOKEN" not in stdout and "PATH" in stdout


def test_own_command_line_does_not_name_the_servers_files(box):
    stdout = box.run("print(open('/proc/self/cmdline').read())").run.stdout
    assert os.path.dirname(os.path.dirname(__file__)) not in stdout and str(box.root) not in stdout


@pytest.mark.parametrize("what", ["environ", "mem", "maps", "fd", "cwd", "root"])
def test_supervisor_cannot_be_inspected(box, what):
    act = "os.listdir('/proc/1/fd')" if what == "fd" else f"open('/proc/1/{what}').read(1)"
    act = f"os.readlink('/proc/1/{what}')" if what in ("cwd", "root") else act
    assert answers(box.run(TRIES + f"attempt('x', lambda: {act})"))["x"] in ("EACCES", "EPERM")


def test_only_its_own_processes_are_visible(box):
    code = "import os; print(sorted(int(n) for n in os.listdir('/proc') if n.isdigit()))"
    assert box.run(code).run.stdout == "[1, 2]\n"


def test_host_files_are_not_there(box, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    places = "/etc/shadow /root/.ssh /root/.bashrc /home /sys /var/log /boot /run /opt /srv /etc/hostname".split()
    places += [str(secret), str(box.root), __file__, "/proc/1/root/etc/shadow", "/proc/1/cwd", "/dev/pts/0"]
    places += ["/dev/vda", "/dev/kvm", "/dev/mem", "/dev/tty", "/dev/fuse"]
    assert box.run(f"import os\nprint([p for p in {places!r} if os.path.exists(p)])").run.stdout == "[]\n"


def test_proc_tells_little_about_the_host(box):
    places = ["cmdline", "interrupts", "kcore", "keys", "latency_stats", "sched_debug", "timer_list", "scsi", "acpi"]
    code = TRIES + (
        "import os\nread = lambda p: len(os.listdir(p) if os.path.isdir(p) else open(p, 'rb').read(1))\n"
        f"for p in {places!r}: attempt(p, lambda: read('/proc/' + p))\n"
        "attempt('machine', lambda: bool(os.cpu_count() and read('/proc/meminfo') and read('/proc/cpuinfo')))"
    )
    said = answers(box.run(code))
    assert said.pop("machine") == "DONE True"
    assert set(said.values()) <= {"DONE 0", "EACCES", "EPERM", "ENOENT"}, said


def test_configuration_of_package_indexes_is_hidden(tmp_path, box_of, monkeypatch):
    box_of("full")  # skips where the engine cannot run
    (tmp_path / "prefix").mkdir()
    for name in ("pip.conf", ".condarc", "pyvenv.cfg"):
        (tmp_path / "prefix" / name).write_text("index-url = https://user:password@host")
    expose = exposure.interpreter()
    monkeypatch.setattr(exposure, "interpreter", lambda: [*expose, str(tmp_path / "prefix")])
    (tmp_path / "root").mkdir()
    code = f"for n in ('pip.conf', '.condarc', 'pyvenv.cfg'): print(len(open('{tmp_path}/prefix/' + n).read()))"

    async def look() -> str:
        engine = await engines.start("full", False, root=tmp_path / "root")
        try:
            return (await engine.execute(Job(code, timeout_s=60))).run.stdout
        finally:
            await engine.close()

    assert asyncio.run(look()) == "0\n0\n38\n"


def test_users_are_those_of_the_jail(box):
    code = (
        "import os, pwd; print(os.getuid(), os.getgid(), os.getgroups(), pwd.getpwuid(os.getuid()).pw_name, "
        "os.uname()[1])"
    )
    assert box.run(code).run.stdout in ("61234 61234 [] sandbox sandbox\n", "61234 61234 [65534] sandbox sandbox\n")


def test_no_capabilities_and_no_way_to_gain_any(box):
    code = (
        "print({k: v.strip() for k, v in (l.split(':', 1) for l in open('/proc/self/status')) if k[:3] in "
        "('Cap', 'NoN', 'Sec')})"
    )
    stdout = box.run(code).run.stdout
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert f"'{name}': '{'0' * 16}'" in stdout
    assert "'NoNewPrivs': '1'" in stdout and "'Seccomp': '2'" in stdout


def test_setuid_programs_gain_nothing(box):
    code = (
        "import os, subprocess\nfor p in ('/usr/bin/su', '/usr/bin/passwd', '/usr/bin/mount', '/usr/bin/newgrp'):\n"
        " if os.path.exists(p): subprocess.run([p], stdin=subprocess.DEVNULL, capture_output=True, timeout=5)\n"
        "print(subprocess.run(['id', '-u'], capture_output=True, text=True).stdout)"
    )
    assert "61234" in box.run(code).run.stdout


def test_system_cannot_be_written(box):
    code = TRIES + (
        "import sysconfig\nsite = sysconfig.get_path('purelib')\n"
        "places = ['/usr/bin/x', '/usr/lib/x', '/x', '/etc/x', '/etc/passwd', '/dev/x', "
        "'/proc/sys/kernel/core_pattern',\n"
        " '/proc/sysrq-trigger', '/proc/sys/kernel/hostname', site + '/x.pth', sys.prefix + '/x', "
        "sys.executable, '/in/x',\n"
        f" '{SESSION}/x', '/var/x', '/usr/src/x', '/.host/x', '/.empty/x', '/.code/x']\n"
        "for p in places: attempt(p, lambda: open(p, 'a'))"
    )
    for place, answer in answers(box.run(code)).items():
        assert answer in ("EROFS", "EACCES", "EPERM", "ENOENT", "ETXTBSY"), (place, answer)


# The network.


def test_network_is_cut(box):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = TRIES + (
            "import socket\nsocket.setdefaulttimeout(2)\n"
            f"for host, port in (('127.0.0.1', {port}), ('169.254.169.254', 80), ('1.1.1.1', 53), ('::1', {port})):\n"
            " attempt(host, lambda: socket.create_connection((host, port)))\n"
            "attempt('dns', lambda: socket.gethostbyname('example.org'))\n"
            "attempt('udp', lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('1.1.1.1', 53)))\n"
            "attempt('raw', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))\n"
            "attempt('packet', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))\n"
            "attempt('netlink', lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))\n"
            "attempt('vsock', lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))"
        )
        said = answers(box.run(code))
    assert said.pop("dns") in ("-2", "-3")
    assert {name: answer for name, answer in said.items() if answer.startswith("DONE")} == {}
    assert said["127.0.0.1"] == "ECONNREFUSED" and said["1.1.1.1"] == "ENETUNREACH"
    assert said["netlink"] == "EAFNOSUPPORT"


def test_abstract_sockets_of_the_host_are_out_of_reach(box):
    with socket.socket(socket.AF_UNIX) as server:
        name = f"verl-dag-test-{os.getpid()}"
        server.bind(f"\0{name}")
        server.listen()
        code = TRIES + f"import socket\nattempt('x', lambda: socket.socket(socket.AF_UNIX).connect('\\0{name}'))"
        assert answers(box.run(code))["x"] == "ECONNREFUSED"


def test_each_job_has_a_private_loopback(box):
    code = (
        "import socket, time\ns = socket.create_server(('127.0.0.1', 8080)); a = socket.socket(socket.AF_UNIX)\n"
        "a.bind('\\0name'); c = socket.create_connection(('127.0.0.1', 8080)); time.sleep(0.5); print('bound')"
    )
    assert [execution.run.stdout for execution in box.many([code, code, code])] == ["bound\n"] * 3


# The kernel.


REFUSED = """
unshare 272 97 0x10000000
mount 165 40 b"tmpfs" b"/tmp" b"tmpfs" 0 0
umount 166 39 b"/usr" 2
setns 308 268 0 0
ptrace 101 117 16 1 0 0
process_vm_readv 310 270 1 0 0 0 0 0
bpf 321 280 0 0 0
keyctl 250 219 0
perf_event_open 298 241 0 0 0 0 0
userfaultfd 323 282 0
chroot 161 51 b"/"
open_by_handle_at 304 265 0 0 0
shmget 29 194 0 4096 0o1600
msgget 68 186 0 0o1600
pidfd_getfd 438 438 0 0 0
reboot 169 142 0 0 0 0
personality 135 92 0x40000
clone_newuser 56 220 0x10000011 0 0 0 0
clone_newnet 56 220 0x40000011 0 0 0 0
clone3 435 435 0 0
io_uring_setup 425 425 1 0
memfd_create 319 279 b"x" 0
"""


def test_refused_system_calls(box):
    code = TRIES + CALL
    code += f"import platform\nx86 = platform.machine() == 'x86_64'\nfor line in {REFUSED.strip().splitlines()!r}:\n"
    code += " name, first, second, *rest = line.split()\n"
    code += " attempt(name, lambda: call(int(first if x86 else second), *map(eval, rest)))\n"
    code += "if x86: attempt('x32', lambda: call(0x40000000 + 39))"
    said = answers(box.run(code))
    absent = {"clone3", "io_uring_setup", "memfd_create", "pidfd_getfd", "x32"}
    assert {name for name, answer in said.items() if answer != ("ENOSYS" if name in absent else "EPERM")} == set()
    assert len(said) >= 22


def test_siblings_cannot_be_traced_or_signalled(box):
    code = TRIES + (
        "import time\nprint('self', os.getpid())\ntime.sleep(0.3)\n"
        "attempt('kill', lambda: [os.kill(n, 0) for n in range(3, 400)])\n"
        "attempt('mem', lambda: open('/proc/3/mem'))"
    )
    for execution in box.many([code, code]):
        assert answers(execution) == {"self": "2", "kill": "ESRCH", "mem": "ENOENT"}


def test_no_descriptor_is_inherited(box):
    code = "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')))"
    assert box.run(code).run.stdout == "[0, 1, 2] 4\n"
    bash = box.run("ls /proc/self/fd | wc -l", language="bash").run.stdout
    assert bash.strip() == "4"


def test_descriptors_cannot_be_passed_between_jobs(box):
    listen = (
        "import socket, time\ns = socket.socket(socket.AF_UNIX); s.bind('/tmp/s'); s.listen(); s.settimeout(0.6)\n"
        "try: s.accept(); print('met')\nexcept TimeoutError: print('alone')"
    )
    join = (
        "import socket, time\ntime.sleep(0.3)\n"
        "try: socket.socket(socket.AF_UNIX).connect('/tmp/s'); print('met')\nexcept OSError: print('alone')"
    )
    assert [execution.run.stdout for execution in box.many([listen, join])] == ["alone\n"] * 2


def test_earlier_jobs_leave_nothing_in_memory(box):
    word = "".join(("needle", "in", "a", "haystack", str(os.getpid())))
    for _ in range(3):
        box.run(f"x = {word!r}", stdin=word, files={"name": "bmVlZGxlaW5h"})
    halves = word[:10], word[10:]
    code = (
        "import re\nword = ({!r} + '_')[:-1].encode() + {!r}.encode()\nfound = 0\n"
        "for line in open('/proc/self/maps'):\n"
        "  area, rights = line.split()[:2]\n  start, end = (int(n, 16) for n in area.split('-'))\n"
        "  if 'r' in rights and '[v' not in line and '[heap]' in line or ' 00:00 0' in line and 'r' in rights:\n"
        "    with open('/proc/self/mem', 'rb') as m:\n"
        "      try: m.seek(start); found += m.read(end - start).count(word)\n      except OSError: pass\n"
        "print(found <= 3)"
    ).format(*halves)
    # The program's own copies: the constant that it searches for, and the buffer that it searches.
    assert box.run(code).run.stdout == "True\n"
