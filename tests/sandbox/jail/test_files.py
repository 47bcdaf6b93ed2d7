"""A job's files: written, fetched, persistent and shared ones."""

from __future__ import annotations

import asyncio
import base64
import os

import pytest

from recipe.sandbox.jail import rootfs
from recipe.sandbox.jail.exposure import SESSION
from recipe.sandbox.job import Job
from recipe.sandbox.outcome import SandboxError


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_files_are_written_and_fetched(box):
    files = {"a.txt": encoded("A"), "deep/er/b.txt": encoded("B"), "skipped": None, "x/IGNORE_THIS_FILE": encoded("no")}
    files |= {"/mnt/b": encoded("M"), "/tmp/c": encoded("C"), "../d": encoded("D"), "./e": encoded("E")}
    code = "import os; print(sorted(os.listdir('.')), open('/tmp/c').read(), open('/tmp/d').read())"
    wanted = ["a.txt", "deep/er/b.txt", "/mnt/b", "../d", "./e", "deep/../a.txt", "missing", "deep"]
    execution = box.run(code, files=files, fetch=wanted)
    assert execution.run.stdout == "['a.txt', 'deep', 'e', 'tmp_program.py'] C D\n"
    found = {"a.txt": "A", "deep/er/b.txt": "B", "/mnt/b": "M", "../d": "D", "./e": "E", "deep/../a.txt": "A"}
    assert execution.files == {name: encoded(text) for name, text in found.items()}


def test_patterns_are_fetched_by_the_names_that_match(box):
    code = (
        "import os\nos.makedirs('d/e')\n"
        "for n in ('1.csv', '2.csv', 'd/3.csv', 'd/e/4.csv', 'x.txt', 'od[d].txt'): open(n, 'w').write(n)"
    )
    execution = box.run(code, fetch=["*.csv", "**/4.csv", "d/?.csv", "od[d].txt", "none*"])
    assert sorted(execution.files) == ["1.csv", "2.csv", "d/3.csv", "d/e/4.csv", "od[d].txt"]
    absolute = box.run("open('/mnt/z.csv', 'w').write('z')", fetch=["/mnt/*.csv"])
    assert absolute.files == {"/mnt/z.csv": encoded("z")}


@pytest.mark.parametrize(
    "how", ["1/0", "import time; time.sleep(60)", "import os; os.kill(os.getpid(), 9)", "import os; os._exit(3)"]
)
def test_files_are_fetched_however_the_job_ended(box, how):
    code = f"f = open('out', 'w'); f.write('kept'); f.flush(); print('written'); {how}"
    execution = box.run_out(code, fetch=["out"], timeout_s=0.5)
    assert execution.files == {"out": encoded("kept")}


def test_only_what_the_program_may_read_is_fetched(box):
    code = (
        "import os\nos.symlink('/etc/shadow', 'link'); os.symlink('/', 'up'); os.mkfifo('fifo'); os.mkdir('dir')\n"
        "os.symlink('/proc/self/environ', 'magic'); os.symlink('/proc/1/ns/net', 'ns'); os.mkdir('d'); "
        "open('secret', 'w').close(); os.chmod('secret', 0); os.link('secret', 'hard')\n"
        "open('sparse', 'wb').truncate(60 << 20); os.symlink('self', 'self')"
    )
    names = "magic ns link fifo dir secret hard sparse self . / /dev/zero /dev/null /proc/self/fd/1".split()
    names += ["", "/proc/self/fd/3"]
    names += ["/proc/self/mem", "/proc/self/environ", "/proc/1/environ", "/proc/1/mem", "/proc/1/root/etc/shadow"]
    names += ["/etc/shadow", "../../../etc/shadow", "up/etc/shadow", "nul\0byte", "x" * 5000, "/.host/x", "/proc/kcore"]
    assert box.run(code, fetch=names).files == {}


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"a": "not base64!"}, "'a'"),
        ({"a": "QQ"}, "'a'.*padding"),
        ({"": "QQ=="}, "''"),
        ({"nul\0": "QQ=="}, "null"),
        ({"x" * 5000: "QQ=="}, "too long"),
        ({"d": "QQ==", "d/e": "QQ=="}, "'d/e'"),
        ({"d/e": "QQ==", "d": "QQ=="}, "'d'"),
        ({"/usr/bin/x": "QQ=="}, "Read-only|denied"),
        ({"/etc/passwd": "QQ=="}, "Read-only|denied"),
        ({"/proc/sys/kernel/core_pattern": "QQ=="}, "Read-only|denied"),
        ({"\ud800": "QQ=="}, "surrogates"),
    ],
)
def test_files_that_cannot_be_written_are_named(box, files, names):
    with pytest.raises(SandboxError, match=names):
        box.run("print(1)", files=files)


def test_names_reach_what_the_program_reaches(box):
    """As in SandboxFusion, ".." needs no directory before it, and a symlink is followed."""
    code = "import os\nopen('a', 'w').write('A'); os.mkdir('d'); os.symlink('../a', 'd/link')"
    found = box.run(code, fetch=["x/../a", "d/link", "d/*"]).files
    assert found == dict.fromkeys(["x/../a", "d/link"], encoded("A"))


NESTED = "import os\nfor n in range({}): os.mkdir('d'); os.chdir('d')\nopen('x.png', 'w').close()"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (NESTED.format(1200), [f"{'d/' * 1200}x.png"]),
        (NESTED.format(3000), []),  # too long a name to be opened
        ("import os\nfor n in range(8): os.symlink('.', f'l{n}')\nopen('x.png', 'w').close()", ["x.png"]),
        ("for n in range(15_000): open(f'{n}.txt', 'w').close()\nopen('x.png', 'w').close()", ["x.png"]),
    ],
    ids=["deep", "deeper", "circles", "wide"],
)
def test_patterns_end_whatever_the_program_left(box, code, found):
    execution = box.run(code, fetch=["**/*.png"], timeout_s=20)
    assert (execution.run.status, execution.run.return_code) == ("finished", 0)
    assert list(execution.files) == found


@pytest.mark.parametrize("pattern", ["*", "**", "**/**/**/*", "*/*", "[a-z]*", "d*/?", "./*", "*" * 5000])
def test_patterns_match_as_glob_does(box, pattern):
    code = (
        "import glob, os\nos.makedirs('da/e'); os.makedirs('.hidden')\n"
        "for n in ('1', 'b', '.c', 'da/f', 'da/e/g', '.hidden/h'): open(n, 'w').close()\nos.symlink('da', 'link')\n"
        f"for n in glob.glob({pattern!r}, recursive=True):\n if os.path.isfile(n) and 'link' not in n: print(n)"
    )
    execution = box.run(code, fetch=[pattern])
    assert execution.run.stderr == ""
    assert sorted(name for name in execution.files if name != "link") == sorted(set(execution.run.stdout.split()))


def test_names_and_code_are_text(box):
    with pytest.raises(SandboxError, match="code"):
        box.run("print('\ud800')")
    assert box.run("open(b'\\xff.csv', 'w').close()", fetch=["*.csv"]).files == {}


def test_too_many_files_are_refused(box):
    with pytest.raises(SandboxError, match="No space"):
        box.run("print(1)", files={f"d/{n}": "" for n in range(30_000)})


def test_code_and_files_of_any_size(box):
    large = os.urandom(3 << 20)
    code = "print(open('large', 'rb').read() == bytes(open('large', 'rb').read()), len(text))"
    code = f"text = '{'x' * 300_000}'\n" + code
    execution = box.run(code, files={"large": base64.b64encode(large).decode()}, fetch=["large"])
    assert execution.run.stdout == "True 300000\n"
    assert base64.b64decode(execution.files["large"]) == large


def test_fetched_files_are_bounded_together(box):
    code = "for n in range(5): open(str(n), 'wb').write(bytes(5 << 20))"
    assert sorted(box.run(code, fetch=["0", "1", "2", "3", "4"]).files) == ["0", "1", "2"]


def test_a_directory_that_persists(box):
    with box.session() as work:
        first = box.run("import os; open('kept', 'w').write('text'); print(os.getcwd())", work=work)
        assert first.run.stdout == f"{SESSION}\n"
        code = "import helper\nprint(open('kept').read(), helper.x, __file__)"
        second = box.run(code, work=work, files={"helper.py": encoded("x = 5")})
        assert second.run.stdout == "text 5 /tmp/tmp_sandbox/tmp_program.py\n"
        assert sorted(os.listdir(work.directory())) in (["helper.py", "kept"], ["__pycache__", "helper.py", "kept"])
        fresh = box.run(f"import os; print(os.path.exists('{SESSION}/kept'), os.getcwd())")
        assert fresh.run.stdout == "False /tmp/tmp_sandbox\n"
        assert box.run("cat kept; pwd", language="bash", work=work).run.stdout == f"text{SESSION}\n"
        found = box.run("", work=work, fetch=["kept", "*.py"]).files
        assert found == {"kept": encoded("text"), "helper.py": encoded("x = 5")}


def test_shares_are_read_only_and_named(box):
    with box.session() as a, box.session() as b:
        box.run("open('table.csv', 'w').write('1,2')", work=a)
        code = (
            "import os\nprint(open('/in/planner/table.csv').read(), os.listdir('/in'))\n"
            "for act in (lambda: open('/in/planner/x', 'w'), lambda: os.remove('/in/planner/table.csv'), lambda: "
            "open('/in/y', 'w'),\n"
            "            lambda: os.chmod('/in/planner/table.csv', 0o777), lambda: os.utime('/in/planner')):\n"
            "  try: act(); print('done')\n  except OSError as e: print(e.errno == 30)"
        )
        for options in ({"work": b}, {}):
            assert box.run(code, shares={"planner": a}, **options).run.stdout == "1,2 ['planner']\n" + "True\n" * 5
        assert os.listdir(a.directory()) == ["table.csv"]


def test_other_sessions_are_out_of_sight(box):
    with box.session() as mine, box.session() as other:
        box.run("open('secret', 'w')", work=other)
        code = (
            "import glob\nprint([p for top in ('tmp', 'session', 'in', 'root', 'var', 'proc/self/fd', 'proc/1/root') "
            "for p in glob.glob(f'/{top}/**/secret', recursive=True)])"
        )
        assert box.run(code, work=mine).run.stdout == "[]\n"


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "nul\0", "-x", "x" * 100])
def test_invalid_names_of_shares_are_refused(box, name):
    with box.session() as share, pytest.raises(SandboxError, match="shares"):
        box.run("print(1)", shares={name: share})


def test_too_many_shares_are_refused(box):
    with box.session() as share:
        names = [str(number) for number in range(33)]
        shares = dict.fromkeys(names[:32], share)
        assert box.run("import os; print(len(os.listdir('/in')))", shares=shares).run.stdout == "32\n"
        with pytest.raises(SandboxError, match="at most 32"):
            box.run("print(1)", shares=dict.fromkeys(names, share))


def test_traps_in_a_session_for_the_next_call(box):
    """FIFOs do not block, and symlinks reach only what the job itself could reach."""
    with box.session() as work:
        box.run(
            "import os; os.mkfifo('fifo'); os.symlink('/etc/passwd', 'link'); os.symlink('/root', 'dir')", work=work
        )
        for name in ("fifo", "link", "dir/x"):
            with pytest.raises(SandboxError, match=name):
                box.run("print(1)", work=work, files={name: encoded("x")})
        found = box.run("print(1)", work=work, fetch=["fifo", "link", "dir/x"]).files
        assert found == {"link": base64.b64encode(rootfs.settings()["passwd"]).decode()}


def test_cancelled_call_leaves_its_session_usable(box):
    with box.session() as work:

        async def cancel() -> None:
            task = asyncio.create_task(box.engine.execute(Job("open('x', 'w').close()\nwhile True: pass", work=work)))
            while not os.listdir(work.directory()):
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        box.wait(cancel())
        assert box.run("import os; print(os.listdir())", work=work).run.stdout == "['x']\n"
