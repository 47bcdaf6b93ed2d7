"""The soak, the killing and the benchmark, each short."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from recipe.sandbox.launch import LocalSandbox

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


soak = load("soak_sandbox")


def test_mixed_jobs_are_answered_right_and_nothing_grows(sandbox_level):
    hostile = 2 if sandbox_level["isolation"] != "rlimits" else 0

    async def scenario() -> list[str]:
        local = LocalSandbox(**sandbox_level)
        await local.start()
        try:
            return await soak.soak(local, 100, 16, hostile=hostile, shared_machine=True)
        finally:
            await local.stop()

    assert asyncio.run(scenario()) == []


def test_the_soak_notices_growth_and_wrong_answers():
    before = soak.Census(descriptors=10, memory_mb=100, machine_mb=100)
    after = soak.Census(descriptors=11, memory_mb=100 + soak.MEMORY_SLACK_MB, machine_mb=9999)
    assert before.growth(after) == ["descriptors: 10 -> 11", "machine_mb: 100 -> 9999"]
    assert before.growth(after, shared_machine=True) == ["descriptors: 10 -> 11"] and before.growth(before) == []
    answer = {"status": "Success", "run_result": {"return_code": 0, "stdout": "7\n", "stderr": ""}, "files": {}}
    for kind in soak.WEIGHTS:
        _, right = soak.make_job(kind, 1, "s")
        assert right(answer) == (kind == "print")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python, which finds the examples and this process's modules."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), *(path or os.getcwd() for path in sys.path)])}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=300)


def test_nothing_is_left_of_servers_that_are_killed(full_isolation):
    done = python(str(EXAMPLES / "kill_sandbox.py"), "--rounds", "3", "--concurrency", "4", "--hostile", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "full: 3 killed, 0 remains or wrong answers" in done.stdout


REMAINS = """
import json, pathlib, socket, subprocess, sys
from kill_sandbox import Remains
folder = pathlib.Path(sys.argv[1])
listen = "import socket; listener = socket.socket(); listener.listen(); print(1, flush=True); input()"
server = subprocess.Popen([sys.executable, "-c", listen], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
server.stdout.readline()
remains = Remains(server.pid, folder)
print(json.dumps(remains.found()))
server.communicate(b"\\n")
folder.joinpath("file").touch()
folder.chmod(0o700)
print(json.dumps(remains.found()))
"""


def test_the_killing_notices_what_is_left(tmp_path):
    tmp_path.chmod(0o755)
    done = python("-c", REMAINS, str(tmp_path))
    assert done.returncode == 0, done.stderr
    alive, dead = map(json.loads, done.stdout.splitlines())
    assert [line.partition(":")[0] for line in alive] == ["processes", "sockets"]
    assert dead == ["files: ['file']", "mode of the folder above: 700 instead of 755"]


def test_the_benchmark_measures_every_workload_beside_another_server(sandbox_level, capsys):
    bench = load("bench_sandbox")
    other = LocalSandbox(**sandbox_level)
    asyncio.run(other.start())
    try:
        against = other.url.replace("://", f"://token:{other.token}@")
        level = sandbox_level["isolation"]
        bench.main(["--seconds", "0.2", "--concurrency", "2", "--isolation", level, "--against", against])
    finally:
        other.close()
    out = capsys.readouterr().out
    for workload in bench.WORKLOADS:
        rows = [line for line in out.splitlines() if line.startswith(f"{workload:<21}")]
        assert [row[31:].split()[0] for row in rows] == [level, bench.AGAINST, bench.BARE], out
        assert [row.count("x ") + row.endswith("x") for row in rows] == [2, 1, 1], out


def test_the_benchmark_refuses_wrong_answers():
    bench = load("bench_sandbox")

    async def wrong(_workload) -> str:
        return "nonsense"

    with pytest.raises(SystemExit, match="wrong answer 'nonsense'"):
        asyncio.run(bench.measure(wrong, "print", 1, 0.1, bench.Measurement()))
