"""The soak, short, and the benchmark, shorter."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from recipe.dag.sandbox.launch import LocalSandbox

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_mixed_jobs_are_answered_right_and_nothing_grows(sandbox_level):
    soak = load("soak_sandbox")

    async def scenario() -> list[str]:
        local = LocalSandbox(**sandbox_level)
        await local.start()
        try:
            return await soak.soak(local, 150, 16)
        finally:
            await local.stop()

    assert asyncio.run(scenario()) == []


def test_the_soak_notices_growth_and_wrong_answers():
    soak = load("soak_sandbox")
    before, after = soak.Census(3, 10, 5, 100, 0), soak.Census(3, 11, 5, 100 + soak.MEMORY_SLACK_MB, 0)
    assert before.growth(after) == ["descriptors: 10 -> 11"] and before.growth(before) == []
    answer = {"status": "Success", "run_result": {"return_code": 0, "stdout": "7\n", "stderr": ""}, "files": {}}
    for kind in soak.WEIGHTS:
        _, right = soak.make_job(kind, 1, "s")
        assert right(answer) == (kind == "print")


def test_the_benchmark_measures_every_workload(sandbox_level, capsys):
    bench = load("bench_sandbox")
    bench.main(["--seconds", "0.2", "--concurrency", "2", "--isolation", sandbox_level["isolation"]])
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith(tuple(bench.WORKLOADS))]
    assert len(rows) == len(bench.WORKLOADS) and all("x" in row for row in rows), out
    assert f"isolation {sandbox_level['isolation']}" in out


def test_the_benchmark_refuses_wrong_answers():
    bench = load("bench_sandbox")

    async def wrong(_workload) -> str:
        return "nonsense"

    with pytest.raises(SystemExit, match="wrong answer 'nonsense'"):
        asyncio.run(bench.measure(wrong, "print", 1, 0.1))
