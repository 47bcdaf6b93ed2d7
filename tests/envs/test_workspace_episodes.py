"""Episodes whose agents share a workspace, played by the engine in a real sandbox: handing over, isolation of many at
once, the code interpreter in the same folder, and what is left of sessions when episodes or runs end early."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from recipe.dag.core.errors import SandboxFault
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode import failure
from recipe.dag.episode.make_tools import make_tools
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.tools.sandbox_client import SandboxClient
from recipe.dag.tools.sandbox_transport import Request
from recipe.dag.types.record import Episode
from recipe.sandbox.launch import LocalSandbox
from tests.sandbox.processes import alive, until
from tests.test_shipped import ROOT

GALLERY = ROOT / "examples" / "gallery" / "workflow_workspace.yaml"
CLEAN = """\
with open('clean.csv', 'w') as clean:
    for line in open('numbers.csv'):
        if line.strip().isdigit():
            clean.write(line)
"""
ADD = "open('submission.csv', 'w').write(str(sum(map(int, open('clean.csv')))))"
WORKFLOW = """\
dag_id: workspace
agents:
  - {name: maker, policy: main, tools: [code_interpreter], tool_loop: {format: fenced, max_generations: 3}}
  - {name: reader, policy: main}
policies: {main: {model: {path: m}}}
envs: {folder: {path: envs/workspace_env.py:Workspace, kwargs: {timeout_s: 20, contract: {maker: [made.txt]}, OPTIONS}}}
episode: {retries: 1}
nodes:
  - {id: make, agent: maker, env: folder, sees_env: true, hooks: hooks.py:Says}
  - {id: read, agent: reader, env: folder, sees_env: true, hooks: hooks.py:Says, after: make}
  - {id: paid, reward: hooks.py:paid, after: read}
"""
HOOKS = """\
from recipe.dag import Agent


class Says(Agent):
    def prompt(self, context):
        content = f"{context.agent} of {context.sample['extra_info'].get('number')}: {context.obs}"
        return [{"role": "user", "content": content}]


def paid(episode):
    return {call.agent: 1.0 for call in episode.calls}
"""


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch):
    monkeypatch.setattr(failure, "BACKOFF_S", 0.0)


@pytest.fixture
def flow(tmp_path) -> Callable[[str], Path]:
    """Return a function from options of the env to the file of a workflow."""

    def write(options: str) -> Path:
        (tmp_path / "hooks.py").write_text(HOOKS)
        file = tmp_path / "flow.yaml"
        file.write_text(WORKFLOW.replace("OPTIONS", options))
        return file

    return write


def block(code: str) -> str:
    return f"```python\n{code}\n```"


async def sessions(client: SandboxClient) -> dict[str, int]:
    answer = await client.transport.send(Request("GET", "/v1/status", 5.0))
    return json.loads(answer.body)["sessions"]


def sample(number: int = 0, truth: str = "0", **files: str) -> dict[str, Any]:
    entries = [{"name": name.replace("_", "."), "content": content} for name, content in files.items()]
    return {
        "prompt": [{"role": "user", "content": "The task."}],
        "ground_truth": truth,
        "extra_info": {"number": number, "files": entries},
    }


async def nothing(client: SandboxClient) -> None: ...


def play(
    local,
    file: Path,
    server: Any,
    samples: list[dict[str, Any]],
    wrap: Callable[[SandboxClient], Any] = lambda client: client,
    watch: Callable[[SandboxClient], Awaitable[None]] = nothing,
) -> list[Episode]:
    """Run the episodes at once, and `watch` meanwhile; no session may be left."""

    async def main():
        client = SandboxClient(local.url, token=local.token, max_concurrent=4, on_unreachable=local.ensure)
        flow = load_workflow(file)
        endpoints = {name: PolicyEndpoint(server, server, 99999) for name in flow.policies}
        runner = EpisodeRunner(flow, endpoints, make_tools(flow, client), seed=0, sandbox=wrap(client))
        watching = asyncio.ensure_future(watch(client))
        try:
            return await asyncio.gather(
                *(runner.run(sample, f"u{number}", 0, step=0) for number, sample in enumerate(samples))
            )
        finally:
            watching.cancel()
            assert await sessions(client) == {"open": 0, "used_bytes": 0}
            await client.close()

    return asyncio.run(main())


def chat_server(scripted_server, answer) -> Any:
    class Server(scripted_server):
        def apply_chat_template(self, messages, tokenize=True, return_dict=True, **kwargs):
            text = "".join(f"{message['content']}\0" for message in messages)
            return self.encode(text) if tokenize else text

    return Server(answer)


def test_the_example_hands_a_file_over_and_repeats_until_it_is_right(local, scripted_server):
    def answer(prompt: str) -> str:
        if "clean.csv has" in prompt:
            return block(ADD)
        return block(CLEAN if "cleaner must still make" in prompt else "open('clean.csv', 'w').write('no')")

    server = chat_server(scripted_server, answer)
    (episode,) = play(local, GALLERY, server, [sample(truth="42", numbers_csv="40\nx\n2\n")])
    assert episode.fault is None and episode.outcome == 1.0
    assert [(call.node, call.round, call.env_info["artifacts_ok"]) for call in episode.calls] == [
        ("clean", 0, False),
        ("clean", 1, True),
        ("add", 0, True),
    ]
    assert [call.reward for call in episode.calls] == pytest.approx([0.9, 1.0, 1.0])
    assert "numbers.csv" in server.prompts[0] and "must still make: clean.csv" in server.prompts[1]
    assert "raises ValueError" in episode.calls[0].env_info["problems"]["clean.csv"]
    assert "clean.csv (5 bytes)" in server.prompts[2]
    assert episode.calls[2].env_info["fetched"] == {"submission.csv": "42"}


LOOK = """\
import glob
found = {open(name).read() for place in ('/tmp/**/own.txt', '../*/own.txt')
         for name in glob.glob(place, recursive=True)}
print('SEEN', open('own.txt').read(), sorted(glob.glob('*')), glob.glob('/in/*'), sorted(found))
"""


def test_sixty_four_episodes_see_their_own_files_only(local, flow, scripted_server):
    def answer(prompt: str) -> str:
        number = re.findall(r"of (\d+):", prompt)[-1]
        if prompt.startswith("maker") and "SEEN" not in prompt:
            return block(f"open('made.txt', 'w').write('{number} ' * 1000); open('from{number}', 'w')\n{LOOK}")
        return block(LOOK) if prompt.startswith("reader") else "Done."

    class AllAtOnce(type(chat_server(scripted_server, answer))):
        """Answers when every episode has asked."""

        async def generate(self, *request):
            generation = await super().generate(*request)
            while len(self.prompts) < 64:
                await asyncio.sleep(0.01)
            return generation

    peak = []

    async def watch(client: SandboxClient) -> None:
        while True:
            peak.append((await sessions(client))["open"])
            await asyncio.sleep(0.05)

    samples = [sample(number, own_txt=str(number)) for number in range(64)]
    episodes = play(local, flow("quota_mb: 1"), AllAtOnce(answer), samples, watch=watch)
    assert max(peak) == 64
    assert [episode.fault for episode in episodes] == [None] * 64
    for number, episode in enumerate(episodes):
        make, read = episode.calls
        shown = f"SEEN {number} {sorted([f'from{number}', 'made.txt', 'own.txt'])} [] "
        if local.isolation == "full":  # below it, programs of this user can read each other's folders
            shown += f"['{number}']"
        assert shown in make.tool_results[0].text and shown in read.env_info["output"]
        sizes = {"made.txt": 1000 * len(f"{number} "), "own.txt": len(str(number))}
        assert read.env_info["files"] == {f"from{number}": 0} | sizes


def test_one_greedy_episode_fills_its_own_quota_only(local, flow, scripted_server):
    def answer(prompt: str) -> str:
        greedy = "of 0:" in prompt
        size = (4 << 20) if greedy else 1000
        return block(f"open('made.txt', 'wb').write(bytes({size}))") if prompt.startswith("reader") else "Done."

    server = chat_server(scripted_server, answer)
    episodes = play(local, flow("quota_mb: 1"), server, [sample(number) for number in range(8)])
    infos = [episode.calls[-1].env_info for episode in episodes]
    assert [info["over"] for info in infos] == [True] + [False] * 7
    assert [info["code_ok"] for info in infos] == [False] + [True] * 7
    assert all(info["files"] == {"made.txt": 1000} for info in infos[1:])
    assert all(episode.fault is None for episode in episodes)


@pytest.mark.parametrize("tools", [True, False])
def test_the_code_interpreter_works_in_the_folder(local, flow, scripted_server, tools):
    def answer(prompt: str) -> str:
        if prompt.startswith("reader"):
            return block("print(open('made.txt').read())")
        return "Done." if "made it" in prompt else block("open('made.txt', 'w').write('by the tool'); print('made it')")

    server = chat_server(scripted_server, answer)
    (episode,) = play(local, flow(f"quota_mb: 8, tools: {str(tools).lower()}"), server, [sample()])
    make, read = episode.calls
    assert [result.status for result in make.tool_results] == ["success"]
    assert make.env_info["artifacts_ok"] is tools and make.env_info["made"] == ["made.txt"] * tools
    assert ("by the tool" in read.env_info["output"]) is tools


def test_a_sandbox_that_dies_is_restarted_and_the_episode_repeated(sandbox_level, flow, scripted_server):
    local = LocalSandbox(**sandbox_level)
    asyncio.run(local.start())
    killed = []

    def answer(prompt: str) -> str:
        if prompt.startswith("reader") and not killed:
            os.kill(local.pid, signal.SIGKILL)
            killed.append(local.pid)
        return block("print(open('own.txt').read())") if prompt.startswith("reader") else "Done."

    try:
        server = chat_server(scripted_server, answer)
        (episode,) = play(local, flow("quota_mb: 8"), server, [sample(own_txt="here")])
    finally:
        local.close()
    assert episode.fault is None and episode.attempts == 2 and episode.faults[0]["infra"]
    assert episode.faults[0]["boundary"] == "sandbox" and "here" in episode.calls[1].env_info["output"]
    assert killed and local.restarts >= 1


class Full:
    """A client whose server has no room for the first sessions."""

    def __init__(self, client: SandboxClient, refused: int):
        self._client, self._refused = client, refused

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def open_session(self, **options: Any) -> str:
        self._refused -= 1
        if self._refused >= 0:
            raise SandboxFault("HTTP 504: 1024 sessions hold 1 bytes; delete some (5 tries)")
        return await self._client.open_session(**options)


@pytest.mark.parametrize(("refused", "attempts"), [(1, 2), (9, 2)])
def test_a_full_sandbox_is_a_fault_that_is_retried_and_then_masked(local, flow, scripted_server, refused, attempts):
    server = chat_server(scripted_server, lambda prompt: "Done.")
    (episode,) = play(local, flow("quota_mb: 8"), server, [sample()], lambda client: Full(client, refused))
    assert episode.attempts == attempts and all(fault["infra"] for fault in episode.faults)
    assert (episode.fault is None) is (refused == 1)
    assert all(call.reward is None for call in episode.calls) is (refused != 1)


def test_an_episode_that_is_cancelled_or_fails_leaves_no_session(local, flow, scripted_server):
    async def main():
        client = SandboxClient(local.url, token=local.token)
        workflow = load_workflow(flow("quota_mb: 8"))
        tools = make_tools(workflow, client)

        class Hangs(type(chat_server(scripted_server, None))):
            async def generate(self, request_id, prompt_ids, sampling):
                await asyncio.sleep(60)

        async def start(text: str, server: Any) -> asyncio.Task:
            endpoints = {name: PolicyEndpoint(server, server, 99999) for name in workflow.policies}
            runner = EpisodeRunner(workflow, endpoints, tools, seed=0, sandbox=client)
            return asyncio.create_task(runner.run(sample(own_txt=text), "u", 0, step=0))

        hanging = await start("1", Hangs(None))
        while not (await sessions(client))["open"]:
            await asyncio.sleep(0.02)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert (await sessions(client))["open"] == 0
        busy = chat_server(scripted_server, lambda prompt: block("import time; time.sleep(30)"))
        for delay_s in (0.0, 0.005, 0.01, 0.02, 0.05):
            running = await start("1", busy)
            await asyncio.sleep(delay_s)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        done = chat_server(scripted_server, lambda prompt: "Done.")
        failing = await start("x" * (9 << 20), done)  # more than the quota
        with pytest.raises(Exception, match="exceed quota_mb"):
            await failing
        async with asyncio.timeout(60):
            while (await sessions(client))["open"]:
                await asyncio.sleep(0.05)
        await client.close()

    asyncio.run(main())


RUN = """
import asyncio, sys
from verl_dag.envs.workspace_env import Workspace
from recipe.sandbox.launch import LocalSandbox
from recipe.dag.tools.sandbox_client import SandboxClient


async def main(url, token, ttl_s):
    if not url:
        local = LocalSandbox(**eval(token))
        url, token = await local.start(), local.token
        print(local.pid, local.root, local.socket, flush=True)
    client = SandboxClient(url, token=token)
    files = {"big": {"content": "x" * (1 << 20)}}
    spaces = [Workspace(ttl_s=float(ttl_s)) for _ in range(16)]
    await asyncio.gather(*(space.reset({"extra_info": {"files": files}}, 0, client) for space in spaces))
    print("open", flush=True)
    busy = "```python\\nimport time\\nwhile True: open('more', 'w').write('1')\\n```"
    await asyncio.gather(*(space.step([busy], None, ["a"], "a") for space in spaces[:4]), asyncio.sleep(600))


asyncio.run(main(*sys.argv[1:]))
"""


def start_run(url: str, token: str, ttl_s: float) -> subprocess.Popen[str]:
    packages = os.pathsep.join(path or os.getcwd() for path in [str(ROOT), *sys.path])
    command = [sys.executable, "-c", RUN, url, token, str(ttl_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": packages})


def test_a_killed_run_takes_its_sandbox_and_all_files_along(sandbox_level):
    process = start_run("", repr(sandbox_level), 300.0)
    assert process.stdout is not None
    pid, root, socket = process.stdout.readline().split()
    assert process.stdout.readline() == "open\n" and Path(root).exists()
    process.kill()
    process.wait()
    process.stdout.close()
    assert until(lambda: not alive([int(pid)]) and not os.path.exists(root) and not os.path.exists(socket))


def test_sessions_of_a_killed_run_expire_on_a_server_that_lives_on(local):
    process = start_run(local.url, local.token, 6.0)
    assert process.stdout is not None and process.stdout.readline() == "open\n"

    async def main():
        client = SandboxClient(local.url, token=local.token)
        await asyncio.sleep(7.5)
        assert (await sessions(client))["open"] == 16  # renewed, although nothing uses twelve of them
        process.kill()
        process.wait()
        async with asyncio.timeout(60):
            while await sessions(client) != {"open": 0, "used_bytes": 0}:
                await asyncio.sleep(0.1)
        await client.close()

    asyncio.run(main())
    process.stdout.close()
