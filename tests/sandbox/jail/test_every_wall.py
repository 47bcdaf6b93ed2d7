"""The attacks of an outsider's audit, as root, as an ordinary user, and in a container without user namespaces."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from recipe.sandbox.jail import program
from tests.sandbox.jail.elsewhere import NOBODY, Elsewhere, python_for_landlock

PRELUDE = """
import ctypes, errno, fcntl, mmap, os, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0: raise OSError(ctypes.get_errno(), '')
def attempt(name, act):
    try: act(); print(name, 'done')
    except OSError as error: print(name, errno.errorcode[error.errno])
"""


@pytest.fixture(scope="module", params=["root", "ordinary user", "container"])
def place(request):
    python = python_for_landlock()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        root = Path(folder, "root")
        root.mkdir()
        options = NOBODY if request.param == "ordinary user" else {}
        if options:
            os.chown(root, 65534, 65534)
        container = request.param == "container"
        try:
            engine = Elsewhere(root, "auto", python, namespaces=not container, **options)
        except RuntimeError as reason:
            pytest.skip(str(reason))
        assert engine.isolation == ("landlock" if container else "full")
        yield engine
        engine.close()
        assert os.listdir(root) == []


def finished(place, code: str, **fields) -> list[str]:
    outcome = place.run(code, **fields)
    assert outcome.run.return_code == 0, outcome
    return outcome.run.stdout.splitlines()


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
def test_budgets_of_the_host_are_closed(place):
    """Rows 7 and 13."""
    code = f"""{PRELUDE}
attempt('inotify', lambda: call(294, 0))
attempt('aio', lambda: call(206, 8, ctypes.create_string_buffer(8)))
attempt('lease', lambda: fcntl.fcntl(os.open(sys.executable, os.O_RDONLY), 1024, 0))
attempt('notify', lambda: fcntl.fcntl(os.open('/usr/bin', os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_ACCESS))
attempt('netlink', lambda: socket.socketpair(16, socket.SOCK_RAW))
attempt('memfd', lambda: os.memfd_create('x'))
attempt('userns', lambda: call(272, 0x10000000))
"""
    refused = {f"{name} EPERM" for name in ("inotify", "aio", "lease", "notify", "userns")}
    assert {*finished(place, code)} == refused | {"netlink EAFNOSUPPORT", "memfd ENOSYS"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
def test_queued_signals_are_few_and_stop_nothing(place):
    """Rows 7 and 10."""
    code = """
import ctypes, os, signal, struct, time
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
call, sent = ctypes.CDLL(None).syscall, 0
own = struct.pack('4iii', 40, 0, -1, 0, os.getpid(), os.getuid()).ljust(128, b'\\0')
while sent < 200_000 and call(129, os.getpid(), 40, own) == 0: sent += 1
for target in (1, os.getppid()):
    for number in (15, 17):
        try: os.kill(target, number)
        except OSError: pass
time.sleep(0.2)
print(sent)
"""
    (sent,) = finished(place, code, timeout_s=30)
    assert 0 < int(sent) <= program.MAX_PENDING_SIGNALS


@pytest.mark.parametrize(
    "code",
    [
        "import os, shutil\nshutil.rmtree(os.getcwd(), True); os._exit(3)",
        "import os\nos.chmod('.', 0); os._exit(3)",
        "import os\nfor n in range(1200): os.mkdir('d'); os.chdir('d')\nos._exit(3)",
        "import os\nos.symlink('.', 'loop'); os.mkfifo('x'); os.symlink('x', 'y'); os.mkdir('d', 0); os._exit(3)",
    ],
    ids=["removed", "locked", "deep", "loops and pipes"],
)
def test_no_program_chooses_a_fault(place, code):
    """Rows 4 and 8."""
    outcome = place.run(code, fetch=["a", "**/*.png", "*/*", "x", "y"], timeout_s=20)
    assert (outcome.run.status, outcome.run.return_code, outcome.files) == ("finished", 3, {})


def test_a_program_cannot_send_itself_a_time_out(place):
    """Row 10."""
    run = place.run("import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)").run
    assert (run.status, run.return_code) == ("finished", -signal.SIGXCPU)
    spent = place.run("while True: pass", timeout_s=60, limits={"cpu_s": 1}).run
    assert spent.status == "timeout", spent


def test_memory_counts_over_all_processes(place):
    """Row 3. Where it is refused, since nothing counts it, the program fails, too."""
    code = """
import mmap, os, time
for _ in range(8):
    if os.fork() == 0:
        shared = mmap.mmap(-1, 100 << 20)
        for at in range(0, 100 << 20, 4096): shared[at] = 1
        time.sleep(20)
while True: os.wait()
"""
    outcome = place.run(code, limits={"memory_mb": 256}, timeout_s=30)
    assert outcome.run.return_code in (1, -9), outcome
    assert "more than 256 MiB" in outcome.run.stderr or "Cannot allocate memory" in outcome.run.stderr


def test_a_single_process_can_handle_its_limit(place):
    code = "try: bytearray(600 << 20)\nexcept MemoryError: print('handled')"
    assert finished(place, code, limits={"memory_mb": 256}) == ["handled"]


def test_jobs_go_before_the_trainer_when_memory_ends(place):
    """Row 3."""
    assert finished(place, "print(open('/proc/self/oom_score_adj').read().strip(), __import__('os').nice(0))") == [
        f"1000 {os.nice(0) + 10}"
    ]


def test_generators_differ_between_programs(place):
    """Row 12."""
    code = (
        "import random; r = [random.random()]\ntry:\n  import numpy, sympy, sympy.core.random as s\n"
        "  r += [numpy.random.rand(), s.rng.random(), sympy.randprime(10**6, 10**9)]\nexcept ImportError: pass\n"
        "print(r)"
    )
    drawn = [finished(place, code)[0].strip("[]").split(", ") for _ in range(3)]
    assert all(len(set(values)) == 3 for values in zip(*drawn, strict=True))


def test_output_and_input_pass_whole(place):
    """Row 2."""
    code = "import os, sys\nfor _ in range(4): os.write(1, b'x' * 3003)\nprint(len(sys.stdin.read()))"
    (line,) = finished(place, code, stdin="y" * 200_000)
    assert line == "x" * 12_012 + "200000"


def test_the_kernels_command_line_and_the_servers_files_are_hidden(place):
    """Row 15."""
    code = f"""{PRELUDE}
for path in ('/proc/cmdline', '/proc/kcore', '/proc/1/environ', '/etc/shadow', {sys.executable!r} + '/../../pip.conf'):
    try: print(repr(open(path, 'rb').read(20)))
    except OSError: print("b''")
"""
    assert set(finished(place, code)) == {"b''"}
