"""Limits on time, memory, disk and output, including those on all of a job's processes together."""

from __future__ import annotations

import math

import pytest

from recipe.sandbox.limits import Limits
from recipe.sandbox.outcome import SandboxError


def test_timeout_keeps_what_was_printed(box):
    outcome = box.run_out("import time; print('so far'); time.sleep(60)", timeout_s=0.5).run
    assert (outcome.status, outcome.return_code, outcome.stdout) == ("timeout", None, "so far\n")
    assert 0.4 <= outcome.seconds < 10


@pytest.mark.parametrize(
    ("seconds", "status"),
    [(0, "timeout"), (-1, "timeout"), (-math.inf, "timeout"), (1e18, "finished"), (math.inf, "finished")],
)
def test_no_time_is_a_timeout_and_endless_time_is_granted(box, seconds, status):
    run = box.run("print(1)", timeout_s=seconds).run
    assert run.status == status and (run.stdout == "1\n" or status == "timeout")


def test_time_that_is_not_a_number_is_refused(box):
    with pytest.raises(SandboxError, match="NaN"):
        box.run("print(1)", timeout_s=math.nan)


def test_cpu_limit_is_a_timeout(box):
    outcome = box.run("while True: pass", timeout_s=20, limits=Limits(cpu_s=1)).run
    assert (outcome.status, outcome.return_code) == ("timeout", None)


@pytest.mark.parametrize("memory_mb", [64, 512])
def test_memory_of_one_process(box, memory_mb):
    outcome = box.run(f"x = bytearray({memory_mb + 200} << 20)", limits=Limits(memory_mb=memory_mb)).run
    assert outcome.return_code == 1 and "MemoryError" in outcome.stderr


def test_memory_limit_counts_from_the_loaded_libraries(box):
    """Libraries that were loaded before the job do not count."""
    code = "import numpy, sympy; x = numpy.ones(20 << 17); print(x.nbytes)"
    assert box.run(code, limits=Limits(memory_mb=256), timeout_s=30).run.stdout == f"{20 << 20}\n"


def test_memory_of_all_processes_together(box):
    code = (
        "import os, time\nprint('started', flush=True)\nfor n in range(6):\n"
        " if os.fork() == 0:\n  x = bytearray(b'x') * (45 << 20); time.sleep(60)\ntime.sleep(60)"
    )
    outcome = box.run(code, limits=Limits(memory_mb=128), timeout_s=20).run
    assert outcome.return_code == -9
    assert "[sandbox] killed: more than 128 MiB of memory" in outcome.stderr and outcome.stdout == "started\n"


def test_the_compiler_has_its_own_memory_limit(box):
    code = "#include <bits/stdc++.h>\nint main() { std::cout << 7; }"
    execution = box.run(code, language="cpp", limits=Limits(memory_mb=32), compile_timeout_s=60)
    assert execution.compile.return_code == 0, execution.compile.stderr
    assert execution.run.stdout == "7"


def test_shared_memory_counts_once(box):
    code = (
        "import os, time\nx = bytearray(b'x') * (80 << 20)\n"
        "for n in range(5):\n if os.fork() == 0: time.sleep(0.7); os._exit(0)\n"
        "while True:\n try: os.wait()\n except ChildProcessError: break\nprint('done')"
    )
    assert box.run(code, limits=Limits(memory_mb=192), timeout_s=30).run.stdout == "done\n"


@pytest.mark.parametrize("place", ["/tmp", ".", "/dev/shm", "/mnt", "/var/tmp"])
def test_all_writable_directories_share_one_disk_limit(box, place):
    code = (
        "import errno, os\nn = 0\ntry:\n for n in range(100):\n"
        f"  with open(f'{place}/{{n}}', 'wb') as f: f.write(bytes(8 << 20))\n"
        "except OSError as e: print(n, errno.errorcode[e.errno])"
    )
    assert box.run(code, timeout_s=40, limits=Limits(memory_mb=0)).run.stdout in ("31 ENOSPC\n", "32 ENOSPC\n")


def test_inodes_are_capped(box):
    code = (
        "import errno\nn = 0\ntry:\n for n in range(100_000): open(str(n), 'w').close()\n"
        "except OSError as e: print(errno.errorcode[e.errno])"
    )
    assert box.run(code, timeout_s=40).run.stdout == "ENOSPC\n"


def test_size_of_a_file(box):
    outcome = box.run("open('big', 'wb').write(bytes(3 << 20))", limits=Limits(file_mb=2)).run
    assert outcome.return_code == 1 and "File too large" in outcome.stderr
    outcome = box.run("open('big', 'wb').truncate(10 << 30)").run
    assert outcome.return_code == 1 and "File too large" in outcome.stderr


def test_open_files_and_cores(box):
    code = (
        "import resource as r; print(*(r.getrlimit(n)[1] for n in (r.RLIMIT_NOFILE, r.RLIMIT_CORE, r.RLIMIT_MSGQUEUE)))"
    )
    assert box.run(code, limits=Limits(open_files=77)).run.stdout == "77 0 0\n"


def test_limits_cannot_be_raised(box):
    code = (
        "import resource as r\nfor n in (r.RLIMIT_NOFILE, r.RLIMIT_NPROC, r.RLIMIT_AS, r.RLIMIT_FSIZE, r.RLIMIT_CPU):\n"
        " try: r.setrlimit(n, (r.getrlimit(n)[1] + 1,) * 2); print('raised')\n"
        " except (ValueError, OSError): print('kept')"
    )
    assert box.run(code).run.stdout == "kept\n" * 5


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_flood_does_not_hang_and_is_truncated(box, stream):
    code = (
        f"import sys\nfor _ in range(50): sys.{stream}.write('x' * 100_000)\n"
        f"sys.{stream}.flush(); open('end', 'w').write('end')"
    )
    execution = box.run(code, limits=Limits(output_bytes=10_000), fetch=["end"], timeout_s=30)
    assert execution.run.return_code == 0 and list(execution.files) == ["end"]
    assert getattr(execution.run, stream) == "x" * 10_000


def test_endless_flood_ends_in_time(box):
    code = "import os\nwhile True: os.write(1, b'y' * 65536)"
    outcome = box.run_out(code, timeout_s=0.7, printed=1 << 20).run
    assert outcome.status == "timeout" and outcome.stdout == "y" * (1 << 20)


def test_output_that_fills_a_pipe_in_small_pieces(box):
    outcome = box.run("for n in range(60_000): print(n)", timeout_s=30).run
    assert outcome.stdout == "".join(f"{n}\n" for n in range(60_000))


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 2_000_000])
def test_stdin_of_any_size(box, size):
    text = ("line\n" * (size // 5 + 1))[:size]
    code = "import sys; s = sys.stdin.read(); print(len(s), sys.stdin.read() == '')"
    assert box.run(code, stdin=text).run.stdout == f"{size} True\n"


def test_stdin_that_is_not_read(box):
    outcome = box.run("print('done')", stdin="x" * 10_000_000).run
    assert outcome.stdout == "done\n" and outcome.return_code == 0


def test_no_stdin_is_its_end(box):
    code = "import sys; print(repr(sys.stdin.read()))\ntry: input()\nexcept EOFError: print('EOF')"
    assert box.run(code).run.stdout == "''\nEOF\n"


def test_stdin_cannot_be_written_back(box):
    code = "import os\ntry: os.write(0, b'x'); print('written')\nexcept OSError: print('refused')"
    for text in ("x", "x" * 100_000):
        assert box.run(code, stdin=text).run.stdout == "refused\n"
