"""Batches that several processes run. The workers run in this process here, behind what looks like Ray's actors, and
everything between them and the driver is pickled; tests/end_to_end has the real ones."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from ray.exceptions import RayActorError

from recipe.dag.core.errors import SandboxFault, UserError
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.batch import run_batch
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.episode.tool_limits import Limit, LimitedTool
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.remote.connect import ApiSpec
from recipe.dag.train import rollout_processes, rollout_worker
from recipe.dag.train.api_policies import ApiPolicies
from recipe.dag.train.resources import Resources
from recipe.dag.train.rollout_processes import RolloutProcesses, SpreadRunner, choose_processes
from recipe.dag.train.rollout_worker import RolloutWorker, WorkerSpec
from recipe.dag.types.model import Api
from recipe.dag.workflow.agent_schema import ToolSpec

FLOW = """\
dag_id: two
agents: [{name: asker, policy: main}, {name: teller, policy: main}]
policies: {main: {model: {path: m}, frozen: true}}
episode: {on_failure: mask, max_masked: 1.0, retries: 0}
nodes:
  - {id: ask, agent: asker}
  - {id: tell, agent: teller, after: ask, hooks: hook.py:Hook}
  - {id: reward, reward: hook.py:score, after: tell}
"""
HOOK = """
import asyncio, random
from recipe.dag.types.context import Output
class Hook:
    async def post_process(self, tokenizer, prompt_ids, response_ids, context):
        uid = context.sample["name"]
        await asyncio.sleep(random.random() / 50)
        if context.sample.get("bad"):
            raise ValueError("the hook's own")
        while context.sample.get("hangs"):
            await asyncio.sleep(0.01)
        return Output(uid.upper(), {"length": len(response_ids)})
def score(episode):
    return {"asker": 0.0, "teller": float(len(episode.calls[-1].response_ids))}
"""


class Reference:
    """What a method of a Ray actor returns."""

    def __init__(self, coroutine):
        self.task = asyncio.ensure_future(coroutine)

    def __await__(self):
        return self.task.__await__()

    def future(self):
        future = Future()
        self.task.add_done_callback(lambda task: future.set_result(None))
        return future


class Actor:
    """A worker behind Ray's manners: arguments and results are copies."""

    def __init__(self, worker: RolloutWorker, dies: bool = False):
        self.worker, self.dies, self.called = worker, dies, []

    def __getattr__(self, name):
        def remote(*args):
            self.called.append(name)
            method = getattr(self.worker, name)
            args = pickle.loads(pickle.dumps(args))
            return self.stream(method(*args)) if name == "run_episodes" else Reference(method(*args))

        return SimpleNamespace(remote=remote)

    async def stream(self, messages):
        async for message in messages:
            if self.dies:
                raise RayActorError(error_msg="it was killed")

            async def value(message=message):
                return pickle.loads(pickle.dumps(message))

            yield Reference(value())


class Server:
    """Says the prompt's length in letters; picklable."""

    async def generate(self, request_id, prompt_ids, sampling):
        from recipe.dag.types.record import Generation

        ids = [97 + (len(prompt_ids) + sampling["seed"]) % 20] * (1 + sampling["seed"] % 5)
        return Generation([*ids, 0], [-0.25 - 1 / (3 + k) for k in range(len(ids) + 1)], "stop")


@pytest.fixture
def flow(tmp_path):
    (tmp_path / "hook.py").write_text(HOOK)
    (tmp_path / "w.yaml").write_text(FLOW)
    return load_workflow(tmp_path / "w.yaml")


@pytest.fixture
def many(flow, scripted_server):
    """`many(count, **)`: processes over `count` workers, with `.actors` and the `.runner` beside them."""
    tokenizer = scripted_server(lambda prompt: "")
    endpoint = PolicyEndpoint(Server(), tokenizer, 4096)
    policy = SimpleNamespace(endpoint=lambda: endpoint)

    def make(count: int, *, sandbox=None, ensure=None, dies=(), make_tools=lambda workflow, client: {}):
        environ = {"FROM_THE_DRIVER": "yes"}
        options = {"sandbox": sandbox, "restarts": ensure is not None, "path": ("/nowhere",), "environ": environ}
        spec = WorkerSpec({"main": policy}, make_tools, 7, **options)
        actors = [Actor(RolloutWorker(spec), dies=number in dies) for number in range(count)]
        processes = RolloutProcesses(actors, {"main": endpoint}, ensure)
        processes.actors = actors
        processes.runner = EpisodeRunner(flow, {"main": endpoint}, {}, seed=7)
        return processes

    environ, path, folder = dict(os.environ), list(sys.path), Path.cwd()
    yield make
    os.chdir(folder)
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environ)


def samples(count: int, **changes) -> list:
    return [
        ({"prompt": [{"role": "user", "content": "x" * k}], "name": f"s{k}"} | changes, f"u{k}") for k in range(count)
    ]


def plain(episodes) -> list[dict]:
    clocks = {"seconds", "generation_seconds", "start_seconds"}

    def without(value):
        if isinstance(value, dict):
            return {key: without(item) for key, item in value.items() if key not in clocks}
        return [without(item) for item in value] if isinstance(value, list) else value

    return [without(episode.to_json()) for episode in episodes]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_records_are_those_of_one_process_in_the_order_of_the_samples(many, flow, count):
    async def both():
        processes, done = many(8), []
        spread = SpreadRunner(processes.runner, flow, processes, count)
        found = await spread.run_batch(samples(7), 3, step=2, max_in_flight=4, on_done=done.append)
        assert len(done) == 21 and all(any(e is episode for e in found) for episode in done)
        assert sum("run_episodes" in actor.called for actor in processes.actors) == (min(count, 7) if count > 1 else 0)
        return found, await run_batch(processes.runner, samples(7), 3, step=2)

    found, alone = asyncio.run(both())
    assert plain(found) == plain(alone)
    assert [episode.uid for episode in found[:4]] == ["u0", "u0", "u0", "u1"]
    assert found[4].calls[1].text == "S1" and found[4].calls[1].prompt_text.startswith("x")


def test_an_error_of_a_hook_ends_all_of_them_with_its_line(many, flow):
    async def main():
        processes = many(2)
        rows = samples(3, hangs=True)
        rows[1][0].update(bad=True, hangs=False)  # the other process would never end
        with pytest.raises(UserError, match=r"the hook's own"):
            await processes.run_episodes(flow, rows, 2, count=2, step=0)
        assert all("stop" in actor.called for actor in processes.actors)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_batch_that_is_given_up_leaves_nothing_behind(many, flow):
    async def main():
        task = asyncio.ensure_future(many(2).run_episodes(flow, samples(4, hangs=True), 2, count=2, step=0))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_too_many_masked_episodes_are_counted_over_all_processes(many, flow, tmp_path):
    (tmp_path / "strict.yaml").write_text(FLOW.replace("max_masked: 1.0", "max_masked: 0.4, on_user_error: mask"))
    strict = load_workflow(tmp_path / "strict.yaml")

    async def main(bad: int):
        processes = many(2)
        runner = EpisodeRunner(strict, processes._endpoints, {}, seed=7)
        rows = samples(20)
        for number in range(bad):
            rows[number * 2][0]["bad"] = True  # all in one process
        return await SpreadRunner(runner, strict, processes, 2).run_batch(rows, 1, step=0)

    assert sum(episode.fault is not None for episode in asyncio.run(main(8))) == 8
    with pytest.raises(UserError, match="9 of 20"):
        asyncio.run(main(9))


def test_a_dead_process_is_a_one_line_error(many, flow):
    with pytest.raises(UserError, match=r"runs episodes died \(.*it was killed.*\); pass rollout.processes=1"):
        asyncio.run(many(2, dies=[1]).run_episodes(flow, samples(4), 1, count=2, step=0))


@pytest.mark.parametrize("fails", [False, True])
def test_the_run_restarts_its_sandbox_for_them(many, flow, monkeypatch, fails):
    looked = []

    async def ensure():
        looked.append(1)
        if fails:
            raise SandboxFault("it does not start", where="sandbox")

    async def main():
        processes = many(2, sandbox={"url": "http://127.0.0.1:9", "max_concurrent": 4}, ensure=ensure)
        plays = rollout_worker.play_batch

        async def with_fault(runner, *args, **options):
            worker = next(a.worker for a in processes.actors if runner in a.worker._runners.values())
            waits = [asyncio.ensure_future(worker._sandbox.transport._on_unreachable()) for _ in range(3)]
            waits.append(asyncio.to_thread(asyncio.run, worker._sandbox.transport._on_unreachable()))  # on another loop
            await asyncio.sleep(0)
            waits[0].cancel()  # its episode was given up: the others wait on
            ended = await asyncio.gather(*waits, return_exceptions=True)
            assert [type(error) for error in ended] == [asyncio.CancelledError, *[type(None)] * 3]
            return await plays(runner, *args, **options)

        monkeypatch.setattr(rollout_worker, "play_batch", with_fault)
        assert len(await processes.run_episodes(flow, samples(4), 1, count=2, step=0)) == 4

    asyncio.run(asyncio.wait_for(main(), 20))
    assert len(looked) == 2  # once for each process


def test_workers_get_the_runs_environment_and_path(many):
    many(1)
    assert os.environ["FROM_THE_DRIVER"] == "yes" and sys.path[-1] == "/nowhere"


def test_tools_are_made_once_and_closed(many, flow):
    tools, closed = [], []

    class Tool:
        async def close(self):
            closed.append(self)

    def make_tools(workflow, client):
        tools.append(Tool())
        return {"own": tools[-1]}

    async def main():
        worker = many(1, make_tools=make_tools).actors[0].worker
        assert worker._runner(flow) is worker._runner(flow)
        await worker.close()

    asyncio.run(main())
    assert len(tools) == 1 and closed == tools


@pytest.mark.parametrize(
    ("setting", "episodes", "cores", "count"),
    [
        ("auto", 256, 64, 1),
        ("auto", 1023, 64, 1),
        ("auto", 1024, 64, 2),
        ("auto", 4096, 2, 2),
        ("auto", 4096, 1, 1),
        ("auto", 4096, 64, 8),
        ("auto", 100_000, 256, rollout_processes.MAX_PROCESSES),
        (3, 100, 1, 3),
        (3, 2, 64, 2),
        (1, 100_000, 64, 1),
    ],
)
def test_auto_is_a_process_for_so_many_episodes_and_cores(setting, episodes, cores, count):
    assert choose_processes(setting, episodes, cores) == count


@pytest.fixture
def fake_ray(monkeypatch):
    """`.specs` of the workers that were started; their `ready` returns `.ready()`."""
    specs: list[WorkerSpec] = []
    fake = SimpleNamespace(specs=specs, ready=lambda: None)

    class Remote:
        def __init__(self, cls):
            pass

        def options(self, **options):
            return self

        def remote(self, spec):
            specs.append(spec)

            async def ready():
                return fake.ready()

            return SimpleNamespace(ready=SimpleNamespace(remote=ready))

    node = SimpleNamespace(get_node_id=lambda: "ab" * 28)
    monkeypatch.setattr(rollout_processes, "ray", SimpleNamespace(remote=Remote, get_runtime_context=lambda: node))
    return fake


def test_workers_divide_the_sandboxs_limit(fake_ray):
    spec = WorkerSpec({}, dict, 0, sandbox={"url": "u", "max_concurrent": 7})
    processes = asyncio.run(RolloutProcesses.start(3, spec, {}))
    assert processes.count == 3 and [spec.sandbox["max_concurrent"] for spec in fake_ray.specs] == [3, 3, 3]
    first = fake_ray.specs[0]
    assert all(Path(entry).is_absolute() for entry in first.path) and not first.restarts
    assert [spec.share for spec in fake_ray.specs] == [(0, 3), (1, 3), (2, 3)]


class Limited:
    """A tool that a workflow limits."""

    name, schema = "limited", {"type": "function", "function": {"name": "limited"}}

    async def execute(self, arguments, state):
        return ""

    async def close(self): ...


def limited_tools(workflow, client):
    return {"limited": LimitedTool(Limited(), Limit(5, 10.0), ToolSpec(path="t.py:Limited"))}


def test_a_worker_limits_its_tools_to_its_share(many, flow):
    (actor,) = many(1, make_tools=limited_tools).actors
    actor.worker._spec = replace(actor.worker._spec, share=(1, 2))
    actor.worker._runner(flow)
    limit = actor.worker._tools["limited"].limit
    assert (limit.workers, limit.calls_per_second) == (2, 5.0)


TOOL = ("{name: asker, policy: main}", "{name: asker, policy: main, tools: [{path: tool.py:Tool, workers: 2}]}")
API = (
    "main: {model: {path: m}, frozen: true}",
    "main: {api: {base_url: 'http://localhost:1/v1', model: m, max_concurrent: 2}}",
)


def test_a_worker_keeps_to_its_share_of_an_apis_limits(many):
    (actor,) = many(1).actors
    api = ApiSpec("main", Api(base_url="http://localhost:1/v1", model="m", max_concurrent=5, requests_per_minute=30.0))
    spec = replace(actor.worker._spec, policies={"main": api}, share=(1, 2))
    part = RolloutWorker(spec)._endpoints["main"].questions.api
    assert (part.max_concurrent, part.requests_per_minute) == (2, 15.0)


@pytest.mark.parametrize(
    ("edit", "option"),
    [(TOOL, "tool tool.py:Tool has `workers: 2`"), (API, "policies.main.api has `max_concurrent: 2`")],
)
@pytest.mark.parametrize(("setting", "count"), [(3, None), (2, 2), ("auto", 2)])
def test_a_run_starts_no_more_processes_than_its_limits_divide_into(
    setting, count, edit, option, tmp_path, monkeypatch
):
    async def start(count, *args, **options):
        return SimpleNamespace(count=count, close=None)

    monkeypatch.setattr(RolloutProcesses, "start", start)
    monkeypatch.setattr(rollout_processes, "cores", lambda: 8)
    (tmp_path / "hook.py").write_text(HOOK)
    (tmp_path / "tool.py").write_text(
        "class Tool:\n    async def execute(self, arguments, state): ...\n    async def close(self): ...\n"
    )
    assert edit[0] in FLOW
    (tmp_path / "w.yaml").write_text(FLOW.replace(*edit))
    run = OmegaConf.create({"rollout": {"processes": setting}, "seed": 0, "sandbox": {"timeout_s": 1, "memory_mb": 1}})
    flow = load_workflow(tmp_path / "w.yaml")
    resources = Resources(ApiPolicies(flow, str(tmp_path)))
    work = resources.start_processes(run, flow, episodes=100_000)
    if count is None:
        with pytest.raises(UserError, match=f"rollout.processes=3: {option}, fewer than one"):
            asyncio.run(work)
    else:
        asyncio.run(work)
        assert resources.processes is not None and resources.processes.count == count


def test_processes_that_do_not_start_are_a_one_line_error(fake_ray):
    def ready():
        raise RayActorError(error_msg="no module named verl")

    fake_ray.ready = ready
    with pytest.raises(UserError, match=r"did not start \(.*no module named verl.*\); pass rollout.processes=1"):
        asyncio.run(RolloutProcesses.start(2, WorkerSpec({}, dict, 0), {}))


def test_groups_are_scored_whole_whatever_the_number_of_processes(many, tmp_path):
    (tmp_path / "hook.py").write_text(
        HOOK + "\ndef rank(episodes): return [{'asker': len(episodes)} for _ in episodes]\n"
    )
    ranked = "  - {id: rank, reward: hook.py:rank, scope: group, after: reward}\n"
    (tmp_path / "group.yaml").write_text(FLOW + ranked)
    group = load_workflow(tmp_path / "group.yaml")

    async def main():
        processes = many(3)
        runner = EpisodeRunner(group, processes._endpoints, {}, seed=7)
        spread = SpreadRunner(runner, group, processes, 3)
        first = await spread.run_batch(samples(5), 2, step=0)
        assert [episode.calls[0].reward for episode in first] == [2.0] * 10
        rest = await spread.run_batch(samples(5), 3, step=0, earlier=first)
        return first, rest, await run_batch(runner, samples(5), 3, step=0)

    first, rest, alone = asyncio.run(main())
    assert [episode.index for episode in rest] == [2] * 5
    found = sorted([*first, *rest], key=lambda episode: (episode.uid, episode.index))
    assert plain(found) == plain(alone) and found[0].calls[0].reward == 3.0


def test_forks_follow_their_episode_whatever_the_number_of_processes(many, flow, tmp_path, monkeypatch):
    algorithm = "algorithm: {estimator: counterfactual, alternatives: 2}\n"
    (tmp_path / "forked.yaml").write_text(FLOW.replace(", frozen: true", "") + algorithm)
    forked = load_workflow(tmp_path / "forked.yaml")
    monkeypatch.setattr(rollout_processes, "EPISODES_PER_PROCESS", 8)
    monkeypatch.setattr(rollout_processes, "cores", lambda: 8)

    async def main():
        processes = many(3)
        runner = EpisodeRunner(forked, processes._endpoints, {}, seed=7)
        spread = SpreadRunner(runner, forked, processes, "auto")
        found = await spread.run_batch(samples(4), 2, step=0, forked=["main"])
        assert all("run_episodes" in actor.called for actor in processes.actors), "8 episodes have up to 16 forks"
        return found, await run_batch(runner, samples(4), 2, step=0, forked=["main"])

    found, alone = asyncio.run(main())
    assert [(episode.uid, episode.index) for episode in found[:7]] == [
        *(("u0", k) for k in (0, 2, 4, 1, 3, 5)),
        ("u1", 0),
    ]
    assert plain(found) == plain(alone) and found[1].forked == {"from": 0, "at": "ask"}
