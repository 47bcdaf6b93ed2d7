"""The wall for machines without user namespaces: the same jobs, and attacks that must fail, as in a container."""

from __future__ import annotations

import base64
import os
import secrets
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from recipe.sandbox import descent
from recipe.sandbox.jail import subtree
from tests.sandbox.jail.elsewhere import Elsewhere, python_for_landlock
from tests.sandbox.processes import until


@pytest.fixture(scope="module")
def place():
    """An engine that chose its isolation itself, in a folder that every user can reach."""
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        engine = Elsewhere(Path(root), "auto", python_for_landlock())
        engine.root = Path(root)
        yield engine
        engine.close()
        assert os.listdir(root) == []


def stdout(place, code: str, **fields) -> str:
    outcome = place.run(code, **fields)
    assert outcome.run.return_code == 0, outcome
    return outcome.run.stdout


def test_auto_falls_back_to_landlock_and_never_below(place, tmp_path):
    assert place.isolation == "landlock"


def test_what_is_missing_for_full_isolation_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="full isolation cannot be set up.*seccomp=unconfined"):
        Elsewhere(tmp_path, "full", sys.executable)


def test_extended_attributes_of_the_hosts_files_cannot_be_set(place):
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        os.chmod(file.name, 0o666)
        try:
            os.setxattr(file.name, "user.mine", b"1")
        except OSError:
            pytest.skip("needs a file system with extended attributes")
        code = "import os, shutil\nopen('a', 'w').close(); shutil.copy2('a', 'b')\n"
        for call in (f"os.setxattr({file.name!r}, 'user.x', b'1')", f"os.removexattr({file.name!r}, 'user.mine')"):
            code += f"try: {call}\nexcept OSError as error: print(error.errno)\n"
        assert stdout(place, code) == "95\n95\n"
        assert os.listxattr(file.name) == ["user.mine"]


def test_programs_run_as_in_full_isolation(place):
    assert stdout(place, "import numpy, sympy; print(numpy.arange(4).sum(), sympy.sqrt(8))") == "6 2*sqrt(2)\n"
    assert stdout(place, "print(input() + '!')", stdin="typed") == "typed!\n"
    assert stdout(place, "echo $((6 * 7)); ls", language="bash") == "42\ntmp_program.sh\n"
    assert "int main" not in stdout(place, '#include <cstdio>\nint main() { puts("42"); }', language="cpp")
    code = "import subprocess as s; print(s.run('echo a | tr a b', shell=True, capture_output=True).stdout)"
    assert stdout(place, code) == "b'b\\n'\n"
    code = "import threading as t; w = t.Thread(target=print, args=(1,)); w.start(); w.join()"
    assert stdout(place, code) == "1\n"
    failed = place.run("1 / 0").run
    assert 'File "/tmp/tmp_sandbox/tmp_program.py", line 1' in failed.stderr and failed.return_code == 1
    assert place.run("import time; print('so far', flush=True); time.sleep(60)", timeout_s=1.0).run.status == "timeout"


def test_files_are_put_and_fetched_with_the_programs_rights(place):
    content = base64.b64encode(b"1,2\n").decode()
    code = "import os; open('out.txt', 'w').write(open('in.csv').read()); os.symlink('/etc/shadow', 'link')"
    outcome = place.run(code, files={"in.csv": content}, fetch=["*.txt", "link", "/etc/shadow", "/etc/passwd"])
    assert outcome.files == {"out.txt": content}
    assert "files" in place.run("pass", files={"/etc/verl-dag-test": content}).error
    assert not os.path.exists("/etc/verl-dag-test")


def test_a_directory_that_the_program_closed_has_no_files(place):
    outcome = place.run("import os; open('out', 'w').close(); os.chmod('.', 0)", fetch=["**/*", "out"])
    assert (outcome.run.return_code, outcome.files) == (0, {})


def test_every_job_has_a_user_of_its_own_and_no_rights(place):
    code = "import os; print(os.getresuid(), os.getgroups(), open('/proc/self/status').read())"
    status = stdout(place, code)
    assert "CapEff:\t0000000000000000" in status and "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status
    first, *_ = status.split(",")
    assert 60706 <= int(first.strip("(")) < 61184


def attempt(expression: str) -> str:
    return (
        "import ctypes, glob, os, signal, socket, subprocess\n"
        f"try:\n    {expression}\nexcept OSError:\n    print('held')\nelse:\n    print('got in')"
    )


@pytest.mark.parametrize(
    "expression",
    [
        "open('/etc/passwd')", "open('/proc/1/environ')", "open('/proc/1/cmdline')", "os.listdir('/proc')",
        "os.listdir('/tmp')", "os.listdir('/dev/shm')", "os.listdir('/root')", "os.listdir('/')",
        "open('/dev/shm/x', 'w')", "open('/tmp/x', 'w')", "open('/var/tmp/x', 'w')", "os.mkdir('/tmp/verl-dag-x')",
        "os.symlink('a', '/tmp/verl-dag-x')", "open('/dev/zero', 'r+b')", "open('/dev/tty')",
        "socket.socket()", "socket.socket(socket.AF_UNIX)", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)", "socket.socketpair()[0].bind(chr(0) + 'name')",
        "socket.socketpair()[0].connect(chr(0) + 'name')", "socket.socketpair()[0].listen()",
        "socket.create_connection(('127.0.0.1', 22), 2)", "os.kill(1, 0)", "os.kill(os.getppid(), 9)",
        "os.setuid(0)", "os.setgid(0)", "os.chown('.', 0, 0)", "os.chmod('/tmp', 0o777)",
        "os.link('/usr/bin/env', 'env')", "os.mknod('device', 0o20666, os.makedev(1, 3))", "os.chroot('.')",
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    ],
)  # fmt: skip
def test_attacks_fail(place, expression):
    assert stdout(place, attempt(expression)) == "held\n"


def test_secrets_of_the_machine_are_not_readable(place):
    number = secrets.token_hex(16)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file, socket.socket() as listener:
        file.write(number)
        file.flush()
        os.chmod(file.name, 0o666)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        name = repr(file.name)
        acts = [f"open({name}).read()", f"open({name}, 'a')", f"os.remove({name})", f"os.truncate({name}, 0)"]
        for act in (*acts, f"socket.create_connection({listener.getsockname()!r}, 3)"):
            assert stdout(place, attempt(act)) == "held\n", act
        assert Path(file.name).read_text() == number


def test_jobs_neither_see_nor_signal_each_other(place):
    first = stdout(place, "import os; open('/dev/null'); print(os.getuid()); open('mine', 'w').write('x')")
    second = stdout(place, "import os; print(os.getuid(), os.listdir('.'))")
    assert "mine" not in second and first.strip() not in second


@pytest.mark.parametrize(
    "code",
    [
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep({n})\n    os._exit(0)",
        "import subprocess; subprocess.Popen(['sleep', '{n}'], start_new_session=True, env={{}}, cwd='/usr')",
        "import os\nfor _ in range(5): os.fork()\nimport signal, time\nfor n in range(1, 32):\n"
        "    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\ntime.sleep({n})",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    ],
    ids=["daemon", "other folder and environment", "ignores signals", "fork bomb"],
)
def test_nothing_outlives_its_call(place, code):
    outcome = place.run(code.format(n=7_000_000), timeout_s=2.0)
    assert outcome.run.status in ("finished", "timeout")
    assert until(lambda: not any(map(in_range, descent.descendants(place.pid))))
    assert stdout(place, "print(6 * 7)") == "42\n"


def test_configuration_of_package_indexes_is_left_out(tmp_path):
    for name in ("lib", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "pip.conf").write_text("index-url = https://user:password@example.org")
    plain = tmp_path / "lib"
    assert sorted(subtree._without_configuration([str(tmp_path), str(plain)])) == [
        *(str(tmp_path / "bin"), str(plain), str(plain))
    ]


def test_limits_hold(place):
    outcome = place.run("bytearray(600 << 20)", limits={"memory_mb": 256}).run
    assert outcome.return_code == 1 and "MemoryError" in outcome.stderr
    code = "import subprocess\nfor _ in range(40): subprocess.Popen(['sleep', '60'])"
    assert "BlockingIOError" in place.run(code, limits={"processes": 8}).run.stderr
    assert "File too large" in place.run("open('f', 'wb').write(bytes(3 << 20))", limits={"file_mb": 2}).run.stderr


def test_nothing_is_left_of_an_engine_that_is_killed():
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        engine = Elsewhere(Path(root), "landlock", python_for_landlock())
        engine.run("import os, time\nif os.fork() == 0: os.setsid(); time.sleep(600)")
        everything = descent.descendants(engine.pid) - {engine.pid}
        assert len(everything) >= 3
        engine.kill()
        assert until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in everything))


def in_range(pid: int) -> bool:
    try:
        return 60706 <= os.stat(f"/proc/{pid}").st_uid < 61184
    except OSError:
        return False
