"""Cells that share an interpreter, with and without IPython."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from recipe.sandbox.sandboxfusion import jupyter

DRIVER = Path(jupyter.__file__).with_name("jupyter_driver.py")
needs_ipython = pytest.mark.skipif(find_spec("IPython") is None, reason="IPython is not installed")


@pytest.fixture
def notebook(call):
    def run(*cells: str, **fields: object) -> dict:
        response = call("POST", "/run_jupyter", {"cells": cells, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    return run


@pytest.fixture(params=["IPython", "plain"])
def drive(request):
    """Return a function that runs cells by the driver alone, with or without IPython."""
    if request.param == "IPython" and find_spec("IPython") is None:
        pytest.skip("IPython is not installed")
    hide = "" if request.param == "IPython" else "import sys; sys.modules['IPython'] = None\n"

    def run(*cells: str, cell_timeout: float = 0) -> list[dict]:
        start = f"{hide}__file__ = {str(DRIVER)!r}\nexec(compile(open(__file__).read(), __file__, 'exec'))"
        request = json.dumps({"cells": cells, "cell_timeout": cell_timeout, "answer_bytes": 1 << 24})
        done = subprocess.run([sys.executable, "-c", start], input=request, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        return [{"stdout": out, "stderr": err, **json.loads(shown)} for out, err, shown in lines]

    return run


def test_state_output_display_and_errors(drive):
    cells = drive(
        "a = 123",
        "a",
        "print(a); import os; _ = os.system('echo from a child')",
        "import sys; _ = sys.stderr.write('err')",
        "raise RuntimeError('no')",
        "1 +",
        "print(a + 1)\nNone",
    )
    assert [cell["stdout"] for cell in cells] == ["", "", "123\nfrom a child\n", "", "", "", "124\n"]
    assert [cell["stderr"] for cell in cells] == ["", "", "", "err", "", "", ""]
    assert [cell["display"] for cell in cells] == [[], [{"text/plain": "123"}], [], [], [], [], []]
    errors = [[error["ename"] for error in cell["error"]] for cell in cells]
    assert errors == [[], [], [], [], ["RuntimeError"], ["SyntaxError"], []]
    trace = "".join(cells[4]["error"][0]["traceback"])
    assert cells[4]["error"][0]["evalue"] == "no" and "raise RuntimeError" in trace and "jupyter_driver" not in trace


def test_a_cell_that_takes_too_long_ends_and_the_next_runs(drive):
    cells = drive("while True: pass", "print('next')", cell_timeout=0.5)
    assert cells[0]["error"][0]["ename"] == "CellTimeoutError"
    assert "longer than 0.5 s" in cells[0]["error"][0]["evalue"] and cells[1]["stdout"] == "next\n"


def test_later_cells_run_after_floods_daemons_and_exits(drive):
    cells = drive(
        "import sys; _ = sys.stdout.write('x' * 5_000_000)",
        "import subprocess; _ = subprocess.Popen(['sleep', '3'])",
        "import sys; sys.exit(3)",
        "import sys; sys.stdout = None",
        "class C: pass\nimport pickle; print(type(pickle.loads(pickle.dumps(C()))).__name__, file=sys.stderr)",
    )
    assert len(cells[0]["stdout"]) == 1 << 20
    assert cells[2]["error"][0]["ename"] == "SystemExit" and cells[2]["error"][0]["evalue"] == "3"
    assert cells[4]["stderr"] == "C\n"


@needs_ipython
def test_rich_display_magics_and_figures(notebook):
    cells = notebook(
        "from IPython.display import HTML, display; display(HTML('<b>1</b>')); HTML('<i>2</i>')",
        "%%capture out\nprint('captured')",
        "out.stdout",
        "import asyncio; await asyncio.sleep(0); 'awaited'",
        "!echo from a shell\nlisted = !echo listed\nprint(listed)",
    )["cells"]
    assert [item["text/html"] for item in cells[0]["display"]] == ["<b>1</b>", "<i>2</i>"]
    assert cells[2]["display"] == [{"text/plain": "'captured\\n'"}]
    assert cells[3]["display"] == [{"text/plain": "'awaited'"}]
    assert cells[4]["stdout"] == "from a shell\n['listed']\n"


@needs_ipython
@pytest.mark.skipif(find_spec("matplotlib_inline") is None, reason="matplotlib_inline is not installed")
def test_figures_are_png(notebook):
    answer = notebook("import matplotlib.pyplot as plt; _ = plt.plot([1, 2])", total_timeout=60)
    (figure,) = answer["cells"][0]["display"]
    assert base64.b64decode(figure["image/png"]).startswith(b"\x89PNG")


def test_the_answer_has_sandboxfusions_shape(notebook):
    answer = notebook("print(1)", "1/0")
    assert answer["driver"].pop("execution_time") > 0
    error = answer["cells"][1].pop("error")
    assert error[0].keys() == {"ename", "evalue", "traceback"}
    assert answer == {
        "status": "Success",
        "message": "",
        "driver": {"status": "Finished", "return_code": 0, "stdout": "", "stderr": ""},
        "cells": [
            {"stdout": "1\n", "stderr": "", "display": [], "error": []},
            {"stdout": "", "stderr": "", "display": []},
        ],
        "executor_pod_name": None,
        "files": {},
    }


def test_files_are_written_and_fetched(notebook):
    given = base64.b64encode(b"hi").decode()
    answer = notebook("open('o', 'w').write(open('i').read())", files={"i": given}, fetch_files=["o", "none"])
    assert answer["files"] == {"o": given}


def test_total_timeout_limits_all_cells_together(notebook):
    answer = notebook("print('so far')", "import time; time.sleep(60)", total_timeout=3)
    assert answer["status"] == "Failed" and answer["cells"] == []
    assert answer["driver"]["status"] == "TimeLimitExceeded" and answer["driver"]["execution_time"] < 15


def test_an_interpreter_that_dies_keeps_the_finished_cells(notebook):
    answer = notebook("print('before')", "import os; os._exit(5)", "print('never')")
    assert answer["status"] == "Failed" and answer["driver"]["return_code"] == 5
    assert [cell["stdout"] for cell in answer["cells"]] == ["before\n"]


def test_memory_limit_is_enforced(notebook):
    answer = notebook("x = bytearray(900 << 20)", "print('alive')", memory_limit_MB=600)
    lost = answer["driver"]["return_code"] == -9
    assert lost or answer["cells"][0]["error"][0]["ename"] == "MemoryError"
    assert notebook("print('alive')")["cells"][0]["stdout"] == "alive\n"


def test_jobs_that_cannot_be_set_up_are_sandbox_errors(notebook, call):
    answer = notebook("1", files={"a": "="})
    assert answer["status"] == "SandboxError" and answer["driver"] is None
    assert call("POST", "/run_jupyter", {"cells": ["1"], "kernel": "julia"}).status_code == 422


FORGED = """
import json, os
cell = json.dumps({"stdout": "PASSED", "stderr": "", "display": [], "error": []})
for line in (cell, json.dumps(["PASSED", "", cell])):
    for number in range(3, 64):
        try: os.write(number, f"{line}\\n".encode() * 3)
        except OSError: pass
"""


def test_a_cell_cannot_answer_for_later_cells(notebook):
    answer = notebook(FORGED, "print('second')", "3")
    assert answer["status"] == "Success"
    assert [cell["stdout"] for cell in answer["cells"]] == ["", "second\n", ""]
    assert answer["cells"][2]["display"] == [{"text/plain": "3"}]
    answer = notebook(FORGED + "os._exit(0)", "print('second')", "3")
    assert answer["status"] == "Failed" and answer["cells"] == [] and answer["driver"]["return_code"] == 1


@pytest.mark.parametrize(
    "end", ["os.kill(os.getppid(), signal.SIGKILL)", "os.kill(os.getppid(), signal.SIGINT)", "os.closerange(0, 64)"]
)
def test_a_notebook_that_ends_its_driver_has_failed(notebook, end):
    answer = notebook(f"import os, signal; {end}; import time; time.sleep(5)", "1", total_timeout=20)
    assert answer["status"] == "Failed" and answer["cells"] == []


def test_cells_can_neither_see_nor_trace_the_driver_nor_later_cells(notebook, full_isolation):
    look = """
import os, re
for name in ("mem", "environ", "fd", "maps"):
    try:
        os.listdir(f"/proc/{os.getppid()}/fd") if name == "fd" else open(f"/proc/{os.getppid()}/{name}").read(1)
        print("can read", name)
    except OSError: pass
found = 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
    for line in maps:
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if line.split()[1].startswith("rw") and end - start < 1 << 26:
            memory.seek(start)
            found += len(re.findall(rb"a later cel[l], unseen", memory.read(end - start)))
print(found)
"""
    assert notebook(look, "'a later cell, unseen'")["cells"][0]["stdout"] == "0\n"


FORGE = """
import gc, json, socket
channel = next(item for item in gc.get_objects() if isinstance(item, socket.socket) and item.fileno() >= 0)
real = json.loads
def loads(line):
    request = real(line)
    channel.sendall(b"\\n" + request[0].encode() + ({}) + b"\\n")
    return request
json.loads = loads
"""
"""Cells share an interpreter, so one can answer for those after it."""


@pytest.mark.parametrize(
    "raw",
    [
        "b'1'",
        "b'{'",
        "b'\\xff'",
        """b'{"display": [], "error": [], "stdout": "x"}'""",
        """b'{"display": [1], "error": []}'""",
        """b'{"display": [{1: 2}], "error": []}'""",
        """b'{"display": {}, "error": null}'""",
        """b'{"display": [{"a": "\\\\ud800"}], "error": []}'""",
        """b'{"display": [{"a": ' + b'[' * 5000 + b']' * 5000 + b'}], "error": []}'""",
        """b'{"display": [{"a": [' + b'[],' * 1_000_000 + b'[]]}], "error": []}'""",
        """b'{"display": [{"a": ' + b'1' * 5000 + b'}], "error": []}'""",
        """b'x' * (17 << 20)""",
    ],
    ids=lambda raw: raw[:40],
)
def test_results_that_are_not_valid_end_the_notebook(notebook, raw):
    answer = notebook("print('before')", FORGE.format(raw), "print('after')")
    assert answer["status"] == "Failed" and [cell["stdout"] for cell in answer["cells"]] == ["before\n", ""]


def test_every_answer_is_json(call):
    """Not all that Python calls JSON is."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    raw = """b'{"display": [{"a": NaN, "b": 1e999}], "error": []}'"""
    answer = call("POST", "/run_jupyter", {"cells": [FORGE.format(raw), "1"]})
    body = json.loads(answer.text, parse_constant=refuse)
    assert body["status"] == "Success" and body["cells"][1]["display"] == [{"a": None, "b": None}]


@needs_ipython
def test_what_json_cannot_hold_is_replaced_or_reported(notebook):
    shown = "from IPython.display import JSON; JSON({'x': float('nan'), 'y': ('\\ud800', {1}), 3: 4})"
    first, second = notebook(shown, "JSON({(1, 2): 3})")["cells"]
    assert first["display"][0]["application/json"] == {"x": None, "y": ["?", "{1}"], "3": 4}
    assert second["error"][0]["ename"] == "TypeError"


def test_files_are_flushed_and_threads_that_never_end_do_not_matter(notebook):
    cell = (
        "import threading, time; f = open('o', 'w'); _ = f.write('hi'); threading.Thread(target=time.sleep, args=(60,))"
    )
    answer = notebook(cell, fetch_files=["o"])
    assert answer["files"] == {"o": base64.b64encode(b"hi").decode()}
    assert notebook(f"{cell}.start()")["status"] == "Success"


def test_a_name_that_is_not_unicode_is_left_out(notebook, call):
    code = "open(b'\\xff.csv', 'w').close(); open('a.csv', 'w').close()"
    for files in (notebook(code, fetch_files=["*.csv"])["files"], call.run(code, fetch_files=["*.csv"])["files"]):
        assert files == {"a.csv": ""}
