"""A warm interpreter behaves like a fresh one, for the program and for the reader of its output."""

from __future__ import annotations

import sys

import pytest

from recipe.sandbox.limits import Limits

PATH = "/tmp/tmp_sandbox/tmp_program.py"

SAME = {
    "zero division": "def f():\n    1 / 0\nf()",
    "chained": "try:\n    {}['x']\nexcept KeyError as e:\n    raise ValueError('second') from e",
    "syntax error": "x = = 1",
    "indentation": "def f():\nreturn 1",
    "null byte": "x = 1\0",
    "name error": "print(undefined)",
    "exit number": "raise SystemExit(3)",
    "exit text": "import sys; sys.exit('bye')",
    "exit none": "import sys; sys.exit()",
    "exit large": "import sys; sys.exit(256 + 7)",
    "exit negative": "import sys; sys.exit(-1)",
    "exit bool": "import sys; sys.exit(True)",
    "exit tuple": "import sys; sys.exit((1, 2))",
    "quit": "quit(4)",
    "group": "raise ExceptionGroup('many', [ValueError(1), TypeError('x')])",
    "excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\n1 / 0",
    "excepthook that fails": "import sys\ndef hook(*a): raise KeyError('h')\nsys.excepthook = hook\n1 / 0",
    "keyboard interrupt": "raise KeyboardInterrupt",
    "atexit": "import atexit\natexit.register(print, 'bye')\nprint('hi')",
    "atexit after error": "import atexit\natexit.register(print, 'bye')\n1 / 0",
    "thread outlives main": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()"
    ),
    "thread error": (
        "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t'); t.start(); t.join(); print('on')"
    ),
    "finalizer": "class A:\n    def __del__(self): print('gone')\na = A()",
    "finalizer of a cycle": "class A:\n    def __del__(self): print('gone')\na = A(); a.me = a",
    "unclosed file": "f = open('x', 'w'); f.write('kept')\nimport atexit\nprint('end')",
    "main": "print(__name__, __package__, __spec__, __doc__, __file__, __cached__, sorted(k for k in globals()))",
    "docstring": "'''text'''\nprint(__doc__)",
    "annotations": "x: int = 1\nprint(__annotations__)",
    "arguments": "import sys; print(sys.argv, sys.path[0], sys.orig_argv[1:])",
    "source": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f), inspect.getfile(f))",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__module__)",
    "main module": "import __main__, sys\nx = 5\nprint(__main__.x, sys.modules['__main__'] is __main__)",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(1))",
    "warning": "import warnings\nwarnings.warn('careful')",
    "encoding line": "# -*- coding: latin-1 -*-\nprint(ascii('\u00e9'))",
    "byte order mark": "\ufeffprint('bom')",
    "print to stderr": "import sys\nprint('e', file=sys.stderr)\nprint('o')",
    "closed stdout": "import sys\nprint('x', flush=True)\nsys.stdout.close()",
    "bytes": "import sys\nsys.stdout.buffer.write(b'a\\x00b')",
    "signals": (
        "import signal\nprint([str(signal.getsignal(n)) for n in (2, 13, 15, 17, 25)], signal.pthread_sigmask(0, []))"
    ),
    "threads": (
        "import threading\nprint(threading.main_thread() is threading.current_thread(), threading.active_count())"
    ),
    "recursion": "def f(): f()\ntry:\n    f()\nexcept RecursionError as e:\n    print(e)",
    "streams": (
        "import sys\nprint([(s.name, s.mode, s.encoding, s.errors, s.seekable()) for s in (sys.stdin, "
        "sys.stdout, sys.stderr)])"
    ),
    "gc": "import gc\nprint(gc.isenabled(), gc.get_threshold())",
    "asyncio": "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    print('ran')\nasyncio.run(main())",
    "subprocess": (
        "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'print(6*7)'], "
        "capture_output=True).stdout)"
    ),
    "environment": "import os, tempfile\nprint(os.environ['HOME'], tempfile.gettempdir(), os.getcwd())",
    "umask": "import os\nprint(oct(os.umask(0)))",
    "unclosed file at error": "def f():\n    g = open('y', 'w'); g.write('kept'); 1 / 0\nf()",
    "eval order": "import sys\nprint('a', end='')\nprint('b', file=sys.stderr)\nraise SystemExit",
}


@pytest.mark.parametrize("name", SAME)
def test_same_as_a_fresh_interpreter(box, name):
    """The oracle is the same interpreter, started by the program in the same jail."""
    # A program that mentions this setting is run by a fresh interpreter, which is given the real one's file.
    fresh = (
        "import subprocess, sys, os\nos.rename(__file__, __file__ + '.old')\n"
        f"open(__file__, 'w', encoding='utf-8').write({SAME[name]!r})\n"
        "p = subprocess.run([sys.executable, __file__], capture_output=True, stdin=subprocess.PIPE)\n"
        "os.remove(__file__ + '.old')\n"
        "sys.stdout.buffer.write(repr((p.returncode, p.stdout, p.stderr)).encode())"
    )
    expected = eval(box.run(fresh).run.stdout)
    outcome = box.run(SAME[name], fetch=["x", "y"])
    assert (outcome.run.return_code, outcome.run.stdout.encode(), outcome.run.stderr.encode()) == expected
    if "unclosed" in name:
        assert list(outcome.files.values()) == ["a2VwdA=="]


def test_traceback_is_the_same_every_time(box):
    first, second = (box.run("def f():\n  1/0\nf()").run.stderr for _ in range(2))
    assert first == second and first.startswith(
        f'Traceback (most recent call last):\n  File "{PATH}", line 3, in <module>'
    )


def test_no_frame_of_the_zygote_is_reachable(box):
    code = (
        "import sys, gc\nframe, seen = sys._getframe(), []\n"
        "while frame: seen.append(frame.f_globals is globals()); frame = frame.f_back\n"
        "print(seen, [m for m in sys.modules if m.startswith('recipe')], 'zygote' in str(sys.path))"
    )
    assert box.run(code).run.stdout == "[True, True] [] False\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(box, method):
    code = (
        "import multiprocessing as mp\ndef square(x): return x * x\n"
        f"if __name__ == '__main__':\n  with mp.get_context('{method}').Pool(2) as pool: print(pool.map(square, "
        "range(4)))\n"
    )
    assert box.run(code, timeout_s=30).run.stdout == "[0, 1, 4, 9]\n"


# The traps of forking a loaded interpreter.


def test_packages_can_be_imported_lazily(box):
    code = "import numpy.testing, sympy.plotting, sympy.physics.units, numpy.ma; print('all there')"
    assert box.run(code, timeout_s=30).run.stdout == "all there\n"


def test_libraries_are_preloaded(box):
    code = (
        "import time, sys; a = 'numpy.random' in sys.modules and 'sympy' in sys.modules\nimport numpy, sympy; print(a)"
    )
    assert box.run(code).run.stdout == "True\n"


def test_legacy_generator_of_numpy_is_seeded_per_job(box):
    stdouts = {run.run.stdout for run in box.many(["import numpy; print(numpy.random.rand(3))"] * 6)}
    assert len(stdouts) == 6


def test_more_threads_for_blas_get_a_fresh_interpreter(box):
    code = (
        "import os, sys; os.environ['OPENBLAS_NUM_THREADS'] = '2'; print('numpy' in sys.modules); import numpy; "
        "print('ok')"
    )
    assert box.run(code, timeout_s=30).run.stdout == "False\nok\n"


def test_program_is_process_two(box):
    assert box.run("import os; print(os.getpid(), os.getppid())").run.stdout == "2 1\n"


def test_small_memory_with_large_libraries(box):
    assert box.run("import sympy; print(sympy.sqrt(8))", limits=Limits(memory_mb=100)).run.stdout == "2*sqrt(2)\n"


@pytest.mark.parametrize("name", ["random", "ctypes", "socket", "numpy", "helper"])
def test_the_programs_modules_come_before_installed_ones(box, name):
    files = {f"{name}.py": "eCA9ICdvd24n"}
    code = f"import {name}; print({name}.x)" + ("\nimport numpy" if name == "helper" else "")
    assert box.run(code, files=files, timeout_s=30).run.stdout == "own\n"


def test_a_package_in_a_session_comes_first(box):
    with box.session() as work:
        box.run("import os; os.mkdir('json'); open('json/__init__.py', 'w').write('x = 5')", work=work)
        assert box.run("import json; print(json.x)", work=work).run.stdout == "5\n"


# Other languages.


def test_bash(box):
    code = 'read line; echo "got $line in $PWD"; echo err >&2; for n in 1 2; do sleep 0 & done; wait; exit 3'
    outcome = box.run(code, language="bash", stdin="text\n").run
    assert (outcome.return_code, outcome.stdout, outcome.stderr) == (3, "got text in /tmp/tmp_sandbox\n", "err\n")


@pytest.mark.skipif(not any(map(__import__("shutil").which, ["g++"])), reason="no g++ on this machine")
def test_cpp(box):
    code = '#include <iostream>\nint main() { int x; std::cin >> x; std::cout << x * 2 << "\\n"; return 5; }'
    execution = box.run(code, language="cpp", stdin="21", compile_timeout_s=60)
    assert execution.compile.return_code == 0
    assert (execution.run.return_code, execution.run.stdout) == (5, "42\n")
    broken = box.run("int main( {", language="cpp", compile_timeout_s=60)
    assert broken.run is None and broken.compile.return_code == 1 and "error" in broken.compile.stderr
    late = box.run(code, language="cpp", compile_timeout_s=0.01)
    assert late.run is None and late.compile.status == "timeout"
    slow = box.run("int main() { for (;;); }", language="cpp", compile_timeout_s=60, timeout_s=0.3)
    assert slow.compile.return_code == 0 and slow.run.status == "timeout"


def test_the_interpreter_is_this_one(box):
    code = "import sys; print(sys.version_info[:3], sys.prefix, sys.executable)"
    assert box.run(code).run.stdout == f"{sys.version_info[:3]} {sys.prefix} {sys.executable}\n"
