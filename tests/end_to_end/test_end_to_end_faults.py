"""Faults in the middle of a run: what they cost, and what they leave alone."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from recipe.sandbox.launch import LocalSandbox
from tests.end_to_end.runs import ROOT, driver_of, episodes_of, finish, log_of, rewards_of, start, steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Bad:
    """A sandbox behind which every tenth call is answered 503, every tenth never, and which is killed at the 25th."""

    def __init__(self, sandbox: LocalSandbox):
        self.sandbox, self.calls, self.spoiled, self.killed = sandbox, 0, 0, False
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()

    def __enter__(self) -> Bad:
        threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True).start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_exc) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application()
        app.add_routes([web.get("/v1/ping", self._ping), web.post("/run_code", self._run_code)])
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        transport = httpx.AsyncHTTPTransport(uds=self.sandbox.socket)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", trust_env=False, timeout=60
        ) as self._http:
            self._ready.set()
            await self._stop.wait()
        await runner.cleanup()

    async def _ping(self, _request: web.Request) -> web.Response:
        return web.json_response("pong")

    async def _run_code(self, request: web.Request) -> web.Response:
        self.calls += 1
        if self.calls % 10 == 3:
            self.spoiled += 1
            return web.json_response({"detail": "come back later"}, status=503)
        if self.calls % 10 == 7:
            self.spoiled += 1
            await asyncio.sleep(3600)
        if self.calls == 25:
            os.kill(sandbox_of(os.getpid()), signal.SIGKILL)
            self.killed = True
        try:
            headers = {"Authorization": f"Bearer {self.sandbox.token}", "Content-Type": "application/json"}
            answer = await self._http.post("/run_code", content=await request.read(), headers=headers)
        except httpx.TransportError:
            await self.sandbox.ensure()
            return web.json_response({"detail": "the server behind me died"}, status=502)
        return web.Response(body=answer.content, status=answer.status_code, content_type="application/json")


@pytest.fixture
def sandbox(sandbox_level) -> Iterator[LocalSandbox]:
    local = LocalSandbox(**sandbox_level)
    asyncio.run(local.start())
    yield local
    local.close()


def test_a_sandbox_that_fails_hangs_and_dies_costs_time_alone(material, whole, sandbox, tmp_path):
    out = tmp_path / "bad"
    short = ["trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    short += ["trainer.val_before_train=false", "sandbox.margin_s=1"]
    short += ["sandbox.timeout_s=8"]  # a program's, on a busy machine
    with Bad(sandbox) as bad:
        metrics = finish(start(material, out, *short, f"sandbox.url={bad.url}"), out)
    assert bad.killed and bad.spoiled >= 4
    assert sum(metrics[step]["faults/retried_tools"] for step in (1, 2)) >= 4
    assert all(metrics[step]["episode/masked"] == 0 for step in (1, 2))
    clean = rewards_of(whole)
    assert rewards_of(out) == {key: rewards for key, rewards in clean.items() if key[0] in (1, 2)}
    for step in (1, 2):
        assert metrics[step]["policy/main/loss"] == pytest.approx(steps(whole)[step]["policy/main/loss"], abs=1e-6)


RAISING = """
from recipe.retool_ma.hooks import Verifier


class Unlucky(Verifier):
    def prompt(self, context, **options):
        if context.episode == 1 and not context.validate:
            raise RuntimeError("no luck today")
        return super().prompt(context, **options)


class Trap:
    def reset(self, sample, seed):
        return None

    def step(self, actions, ground_truth):
        if int(ground_truth) % 2:
            raise RuntimeError("an odd answer")
        return None, 0.0, False
"""


def test_a_hook_or_env_that_raises_costs_its_episodes_alone_and_a_killed_local_sandbox_comes_back(
    material, whole, tmp_path
):
    (tmp_path / "raising.py").write_text(RAISING)
    workflow = tmp_path / "workflow_raising.yaml"
    shipped = (ROOT / "workflows" / "workflow_retool_ma.yaml").read_text()
    here = "    hooks: raising.py:Unlucky\n    env: raising.py:Trap\n"
    assert (verifier := "    hooks: recipe/retool_ma/hooks.py:Verifier\n") in shipped
    shipped = shipped.replace(verifier, here)
    workflow.write_text(
        shipped.replace("  on_failure: retry", "  on_user_error: mask\n  max_masked: 1.0\n  on_failure: retry")
    )
    out = tmp_path / "raising"
    short = ["trainer.total_training_steps=3", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    run = start(material, out, *short, "trainer.val_before_train=false", workflow=workflow)
    deadline = time.monotonic() + 1200
    while 1 not in steps(out):
        assert run.poll() is None and time.monotonic() < deadline, log_of(out)[-4000:]
        time.sleep(0.02)
    os.kill(sandbox_of(driver_of(material, run)), signal.SIGKILL)
    metrics = finish(run, out)
    assert metrics[3]["sandbox/restarts"] == 1

    clean, mine = rewards_of(whole), rewards_of(out)
    first = {key: rewards for key, rewards in mine.items() if key[0] == 1}
    spared = {key for key, rewards in first.items() if rewards}
    odd = {key for key in first if int(truth_of(out)[key]) % 2}
    assert spared == {key for key in first if key[2] != 1} - odd and spared
    assert all(first[key] == clean[key] for key in spared)
    lost = len(first) - len(spared)
    assert metrics[1]["faults/total"] == lost and metrics[1]["episode/masked"] == lost / len(first)


CARELESS = """
from recipe.retool_ma.hooks import Verifier

calls = []


class Careless(Verifier):
    def prompt(self, context, **options):
        calls.append(context.uid)
        if len(calls) > 40:
            return self.tepmlate
        return super().prompt(context, **options)
"""


def test_a_bug_in_a_hook_ends_the_run_in_one_line_and_keeps_what_was_learned(material, tmp_path):
    (tmp_path / "careless.py").write_text(CARELESS)
    workflow = tmp_path / "workflow_careless.yaml"
    shipped = (ROOT / "workflows" / "workflow_retool_ma.yaml").read_text()
    workflow.write_text(shipped.replace("recipe/retool_ma/hooks.py:Verifier", "careless.py:Careless"))
    out = tmp_path / "careless"
    options = ["trainer.total_training_steps=9", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    run = start(material, out, *options, "trainer.save_freq=9", workflow=workflow)
    try:
        assert run.wait(timeout=1200) == 2, log_of(out)[-4000:]
    finally:
        run.kill()
    (error,) = [line for line in log_of(out).splitlines() if line.startswith("error: ")]
    assert f"{tmp_path}/careless.py:11: hook fault" in error and "has no attribute 'tepmlate'" in error
    assert "on_user_error: mask" in error and "Traceback" not in log_of(out)
    assert error.endswith(f"(the output of the run's processes is in {out}/logs)")
    last = max(steps(out))
    tracker = out / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert 1 <= last < 9 and tracker.read_text() == str(last)


def truth_of(out: Path) -> dict[tuple, str]:
    return {(e["step"], e["uid"], e["index"]): e["sample"]["ground_truth"] for e in episodes_of(out)}


def sandbox_of(parent: int) -> int | None:
    """The local sandbox server that a process started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            its = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if its == parent and b"recipe.sandbox.embedded" in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except OSError:
            continue
    return None
