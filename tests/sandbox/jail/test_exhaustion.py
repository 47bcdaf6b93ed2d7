"""A server whose user has no processes or descriptors left waits for some; it neither dies nor loses a job."""

from __future__ import annotations

import asyncio
import json
import os
import resource

import pytest

from recipe.sandbox import descent
from recipe.sandbox.job import Job
from tests.sandbox.jail.test_lifecycle import open_folder, serve_as_nobody  # noqa: F401 - fixtures

WITHOUT_DESCRIPTORS = """
import asyncio, json, os, resource, sys
from pathlib import Path
from recipe.sandbox import engines
from recipe.sandbox.job import Job
from recipe.sandbox.outcome import SandboxError
async def answer(engine):
    try:
        return (await engine.execute(Job("print(2)"))).run.stdout
    except (SandboxError, OSError) as error:
        return type(error).__name__
async def main():
    engine = await engines.start("full", False, root=Path(sys.argv[1]))
    await engine.execute(Job("print(1)"))
    zygote = engine.number("lean")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, most))
    hungry = await asyncio.wait_for(asyncio.gather(*(answer(engine) for _ in range(20))), 60)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    fed = await asyncio.wait_for(asyncio.gather(*(answer(engine) for _ in range(20))), 60)
    print(json.dumps({"right or refused": sorted({text for text in hungry if text != "2\\n"}),
        "fed": sorted(set(fed)), "alive": engine.number("lean") is not None}))
    await engine.close()
asyncio.run(main())
"""


def test_jobs_wait_while_no_process_can_be_forked(box):
    if os.geteuid() != 0:
        pytest.skip("only root may change another process's limits")
    keepers = [box.engine.number(kind) for kind in box.engine.status()["zygotes"]]
    zygotes = {pid for keeper in keepers if keeper is not None for pid in descent.children(keeper)}
    limits = resource.getrlimit(resource.RLIMIT_NPROC)

    async def starved() -> tuple[int, list[str]]:
        for pid in zygotes:
            resource.prlimit(pid, resource.RLIMIT_NPROC, (1, limits[1]))
        jobs = [asyncio.create_task(box.engine.execute(Job("print(2)", timeout_s=60))) for _ in range(30)]
        _, waiting = await asyncio.wait(jobs, timeout=2)
        for pid in zygotes:
            resource.prlimit(pid, resource.RLIMIT_NPROC, limits)
        return len(waiting), [(await job).run.stdout for job in jobs]

    waiting, answers = box.wait(starved())
    assert waiting > 0 and set(answers) == {"2\n"}
    assert keepers == [box.engine.number(kind) for kind in box.engine.status()["zygotes"]]


def test_a_server_without_descriptors_refuses_jobs_and_recovers(serve_as_nobody):  # noqa: F811
    stdout, stderr = serve_as_nobody(WITHOUT_DESCRIPTORS).communicate(timeout=120)
    assert stdout, stderr
    answers = json.loads(stdout)
    assert answers["fed"] == ["2\n"] and answers["alive"]
    assert set(answers["right or refused"]) <= {"SandboxError", "OSError", "NotRun"}
