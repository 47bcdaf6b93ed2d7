"""The whole path on a CPU: Ray, verl's FSDP2 workers, rollout server, sandboxed code, checkpoints, resume, faults."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from aiohttp import web

from recipe.dag.sandbox.launch import LocalSandbox

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def material(tmp_path_factory, sandbox_level) -> SimpleNamespace:
    """A barely warm tiny model, a few problems, and `.options`, which name the sandbox that this machine can run."""
    folder = tmp_path_factory.mktemp("material")
    data = ["preprocess/arithmetic.py", "--local_dir", f"{folder}/data", "--train_size", "24", "--test_size", "8"]
    model = ["-m", "recipe.tiny.build", "--workflow", "workflows/workflow_retool_ma.yaml"]
    model += ["--teacher", "recipe/retool_ma/teacher.py:Teacher"]
    model += ["--output", f"{folder}/model", "--steps", "150", "--problems", "300"]
    for command in (data, model):
        subprocess.run([sys.executable, *command], cwd=ROOT, env=environment(), check=True, timeout=300)
    return SimpleNamespace(folder=folder, options=[f"sandbox.{key}={value}" for key, value in sandbox_level.items()])


@pytest.fixture(scope="module")
def whole(material) -> Path:
    """A run of three steps in which nothing went wrong."""
    out = material.folder / "whole"
    finish(start(material, out), out)
    return out


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def start(
    material: SimpleNamespace, out: Path, *overrides: str, workflow: Path | str = "workflow_retool_ma.yaml"
) -> subprocess.Popen:
    data = material.folder / "data"
    command = [
        *(sys.executable, "-m", "recipe.dag.main", "--config-path", "recipe/retool_ma/config"),
        *("--config-name", "tiny_cpu", f"workflow={ROOT / 'workflows' / workflow}", f"output_dir={out}"),
        *(f"data.train_files={data}/train.parquet", f"data.val_files={data}/test.parquet"),
        *("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=3"),
        *("trainer.save_freq=1", "trainer.test_freq=3", "trainer.logger=[console,tensorboard,file]"),
        *(*material.options, *overrides),
    ]
    out.mkdir(parents=True, exist_ok=True)
    log = (out.parent / f"{out.name}.log").open("a")
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(MODEL_PATH=f"{material.folder}/model"),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(run: subprocess.Popen, out: Path) -> dict[int, dict]:
    try:
        assert run.wait(timeout=400) == 0, (out.parent / f"{out.name}.log").read_text()[-4000:]
    finally:
        run.kill()  # it would train on beside the tests that follow
    return steps(out)


def steps(out: Path) -> dict[int, dict]:
    path = out / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return {line["step"]: line for line in lines}


def log_of(out: Path) -> str:
    return (out.parent / f"{out.name}.log").read_text()


def rewards_of(out: Path) -> dict[tuple, dict]:
    """What each training episode earned, by agent; {} for one that a fault took out."""
    episodes = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    return {
        (e["step"], e["uid"], e["index"]): {c["agent"]: c["reward"] for c in e["calls"]} if e["fault"] is None else {}
        for e in episodes
        if e["split"] == "train"
    }


def sandbox_of(parent: int) -> int | None:
    """The local sandbox server that a process started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            its = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if its == parent and b"recipe.dag.sandbox.embedded" in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except OSError:
            continue
    return None


def comparable(metrics: dict) -> dict:
    """Without what measures this machine: times, memory, and the rounding (1e-6) of a forward that others share."""
    return {
        k: v
        for k, v in metrics.items()
        if not any(word in k for word in ("timing/", "seconds", "perf/", "mfu", "logprob_diff"))
    }


def test_a_run_measures_and_writes_what_it_promises(whole):
    metrics = steps(whole)
    assert sorted(metrics) == [0, 1, 2, 3]
    assert 0.0 <= metrics[0]["val/accuracy"] <= 1.0 and "val/accuracy" in metrics[3]
    assert metrics[1]["policy/main/logprob_diff/max"] <= 1e-4
    assert all(metrics[step]["policy/main/grad_norm"] > 0 for step in (1, 2, 3))
    for name in ("results.json", "summary.json", "curve.png", "episodes.jsonl", "tracking.jsonl", "tensorboard"):
        assert (whole / name).exists(), name


def test_a_killed_run_goes_on_as_if_nothing_had_happened(material, whole, tmp_path):
    out = tmp_path / "killed"
    run = start(material, out)
    deadline = time.monotonic() + 300
    while not (out / "checkpoints" / "global_step_1" / "run.json").is_file():
        assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "killed.log").read_text()[-4000:]
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert 3 not in steps(out), "the run was over before it was killed"
    again = finish(start(material, out), out)
    assert "resumed from" in (tmp_path / "killed.log").read_text()
    assert sorted(again) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        assert comparable(again[step]) == pytest.approx(comparable(steps(whole)[step]), rel=1e-5, abs=1e-6), step


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
        async with httpx.AsyncClient(trust_env=False, timeout=60) as self._http:
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
            answer = await self._http.post(
                f"{self.sandbox.url}/run_code", content=await request.read(), headers=headers
            )
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
    workflow = tmp_path / "workflow_bad.yaml"
    shipped = (ROOT / "workflows" / "workflow_retool_ma.yaml").read_text()
    workflow.write_text(shipped.replace("code_timeout: 20.0", "code_timeout: 2.0"))
    out = tmp_path / "bad"
    short = ["trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    short += ["trainer.val_before_train=false", "sandbox.margin_s=1"]
    with Bad(sandbox) as bad:
        metrics = finish(start(material, out, *short, f"sandbox.url={bad.url}", workflow=workflow), out)
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
    def pre_process(self, *args, context, **kwargs):
        if context.episode == 1 and not context.validate:
            raise RuntimeError("no luck today")
        return super().pre_process(*args, context=context, **kwargs)


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
    here = "      process_path: raising.py:Unlucky\n      env_path: raising.py:Trap\n"
    workflow.write_text(shipped.replace("      process_path: recipe/retool_ma/hooks.py:Verifier\n", here))
    out = tmp_path / "raising"
    short = ["trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    run = start(material, out, *short, "trainer.val_before_train=false", workflow=workflow)
    deadline = time.monotonic() + 300
    while 1 not in steps(out):
        assert run.poll() is None and time.monotonic() < deadline, log_of(out)[-4000:]
        time.sleep(0.02)
    os.kill(sandbox_of(run.pid), signal.SIGKILL)
    metrics = finish(run, out)
    assert metrics[2]["sandbox/restarts"] == 1

    clean, mine = rewards_of(whole), rewards_of(out)
    first = {key: rewards for key, rewards in mine.items() if key[0] == 1}
    spared = {key for key, rewards in first.items() if rewards}
    odd = {key for key in first if int(truth_of(out)[key]) % 2}
    assert spared == {key for key in first if key[2] != 1} - odd and spared
    assert all(first[key] == clean[key] for key in spared)
    lost = len(first) - len(spared)
    assert metrics[1]["faults/total"] == lost and metrics[1]["episode/masked"] == lost / len(first)


def truth_of(out: Path) -> dict[tuple, str]:
    episodes = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    return {(e["step"], e["uid"], e["index"]): e["sample"]["ground_truth"] for e in episodes}


def test_three_policies_train_on_a_cpu(material, tmp_path):
    out = tmp_path / "separate"
    run = start(
        material, out, "trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.test_freq=-1",
        workflow="workflow_retool_ma_separate.yaml",
    )  # fmt: skip
    metrics = finish(run, out)[1]
    policies = ("planner", "executor", "verifier")
    # a group in which all earned the same has no gradient, so a single policy may have none in one small step
    assert max(metrics[f"policy/{policy}/grad_norm"] for policy in policies) > 0
    for policy in policies:
        assert metrics[f"policy/{policy}/rows"] == 16
        assert (out / "checkpoints" / "global_step_1" / policy / "actor" / "huggingface" / "config.json").is_file()


CHAINED = """
dag_id: chained
agents:
  - {name: reasoner, policy: reasoner, sampling: {max_tokens: 12}}
  - {name: actor, policy: actor, sampling: {max_tokens: 8}}
policies:
  reasoner: {model: {path: "${oc.env:MODEL_PATH}"}, critic: {lr: 1.0e-3}, train_cycle: 1}
  actor: {model: {path: "${oc.env:MODEL_PATH}"}, critic: {share: reasoner}, train_cycle: 1, lr: 2.0e-3}
episode: {max_turns: 2}
algorithm: {estimator: gae_chain, lam: 0.95}
nodes:
  - {node_id: reason, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: reasoner}
  - {node_id: act, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: actor, dependencies: [reason]}
  - {node_id: reward, node_type: COMPUTE, node_role: REWARD, dependencies: [act], executable_ref: score.py:score}
"""
TWO_STEPS = ["trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=false"]
TWO_STEPS.append("trainer.logger=[console]")
SCORE = """
def score(episode):
    said = "".join(call.text for call in episode.calls)
    return {"reasoner": 0.0, "actor": len(set(said)) / (1 + len(said))}
"""


def two_steps(material, tmp_path, workflow: str, score: str, *overrides: str) -> tuple[dict[int, dict], Path]:
    """(metrics by step, the run's folder) of two steps of `workflow`, whose rewards `score` gives."""
    (tmp_path / "score.py").write_text(score)
    (tmp_path / "workflow.yaml").write_text(workflow)
    out = tmp_path / "first"
    run = start(material, out, *TWO_STEPS, *overrides, workflow=tmp_path / "workflow.yaml")
    return finish(run, out), out


def goes_on_from(checkpoint: Path, material, tmp_path, metrics: dict[int, dict]) -> None:
    """A run that resumes from the first step's checkpoint makes the second step as `two_steps` did."""
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]
    again = tmp_path / "again"
    run = start(material, again, *TWO_STEPS, *resume, workflow=tmp_path / "workflow.yaml")
    resumed = finish(run, again)
    assert list(resumed) == [2]
    assert comparable(resumed[2]) == pytest.approx(comparable(metrics[2]), rel=1e-5, abs=1e-6)


def test_policies_with_a_shared_critic_take_turns_and_go_on_after_a_checkpoint(material, tmp_path):
    metrics, out = two_steps(material, tmp_path, CHAINED, SCORE)

    for step, (learns, waits) in enumerate([("reasoner", "actor"), ("actor", "reasoner")], start=1):
        assert metrics[step][f"policy/{learns}/grad_norm"] > 0 and f"policy/{waits}/grad_norm" not in metrics[step]
        assert metrics[step]["policy/reasoner/critic/loss"] > 0 and "policy/actor/critic/loss" not in metrics[step]
    assert metrics[2]["policy/actor/lr"] == 2e-3 and metrics[1]["policy/reasoner/lr"] != 2e-3
    for name in ("reasoner", "actor"):
        assert metrics[1][f"policy/{name}/critic/value_mean"] == 0 != metrics[2][f"policy/{name}/critic/value_mean"]
    first = out / "checkpoints" / "global_step_1"
    assert (first / "reasoner" / "critic").is_dir() and not (first / "actor" / "critic").exists()
    assert json.loads((first / "run.json").read_text())["drawn"] == 1
    goes_on_from(first, material, tmp_path, metrics)


MIXED = """
dag_id: mixed
agents:
  - {name: left, policy: main, sampling: {max_tokens: 8}}
  - {name: right, policy: main, sampling: {max_tokens: 8}}
  - {name: judge, policy: judge, sampling: {max_tokens: 4}}
policies:
  main: {model: {path: "${oc.env:MODEL_PATH}"}}
  judge: {model: {path: "${oc.env:MODEL_PATH}"}, frozen: true}
episode: {max_turns: 2}
algorithm: {estimator: qmix, mixer: {lam: 0.5, encoder: {chunk: 16}, peers: {right: []}}}
nodes:
  - {node_id: left, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: left}
  - {node_id: right, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: right}
  - {node_id: judge, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: judge, dependencies: [left, right]}
  - {node_id: reward, node_type: COMPUTE, node_role: REWARD, dependencies: [judge], executable_ref: score.py:score}
"""
LENGTHS = """
def score(episode):
    said = [float(len(set(call.text))) for call in episode.calls if call.agent != "judge"]
    return {"left": 0.0, "right": 0.0, "judge": sum(said) / 10}
"""


def test_a_mixer_divides_the_teams_reward_and_goes_on_after_a_checkpoint(material, tmp_path):
    metrics, out = two_steps(material, tmp_path, MIXED, LENGTHS)
    assert metrics[1]["mixer/weight"] == 0.0
    for step in (1, 2):  # all of the reward is the judge's, who does not learn: it comes to the others by credit
        assert metrics[step]["policy/main/grad_norm"] > 0 and metrics[step]["policy/main/rows"] == 64
        assert metrics[step]["mixer/loss"] > 0 and metrics[step]["mixer/explained_variance"] < 1
    first = out / "checkpoints" / "global_step_1"
    assert (first / "mixer.pt").is_file()
    goes_on_from(first, material, tmp_path, metrics)


def test_two_policies_train_with_one_critic_of_what_both_said(material, tmp_path):
    central = CHAINED.replace("estimator: gae_chain, lam: 0.95", "estimator: mappo").replace(", train_cycle: 1", "")
    metrics, _ = two_steps(material, tmp_path, central, SCORE, "trainer.save_freq=-1")

    for step in (1, 2):
        for name in ("reasoner", "actor"):
            assert metrics[step][f"policy/{name}/grad_norm"] > 0
            assert metrics[step][f"policy/{name}/rows"] == 32  # 16 episodes of two turns, each call by itself
        assert metrics[step]["policy/reasoner/critic/loss"] > 0 and "policy/actor/critic/loss" not in metrics[step]
        assert metrics[step]["policy/reasoner/critic/history_shortened"] == 0
    assert metrics[1]["policy/actor/critic/value_mean"] == 0 != metrics[2]["policy/actor/critic/value_mean"]
