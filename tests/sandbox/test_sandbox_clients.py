"""Public clients, unchanged, with the one line that the server prints."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def url(sandbox_level, env) -> Iterator[str]:
    """Start a server as an operator does, on a free port."""
    level = ["--isolation", sandbox_level["isolation"]]
    level += ["--allow-unsandboxed"] * sandbox_level.get("accept_unsandboxed", False)
    command = [sys.executable, "-m", "recipe.sandbox", "--port", "0", "--quiet", *level]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as server:
        try:
            yield server.stdout.readline().split()[2].rstrip(":")
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def sdk(url):
    sdk = pytest.importorskip("sandbox_fusion")
    sdk.set_endpoint(url)
    return sdk


def test_sdk_runs_code(sdk):
    request = sdk.RunCodeRequest(code="print(input())", language="python", stdin="typed", fetch_files=["none"])
    answer = sdk.run_code(request, max_attempts=1)
    assert answer.status == sdk.RunStatus.Success and answer.run_result.stdout == "typed\n"
    assert sdk.run_code(sdk.RunCodeRequest(code="1/0", language="python")).status == sdk.RunStatus.Failed
    slow = sdk.run_code(sdk.RunCodeRequest(code="while 1: pass", language="python", run_timeout=0.5))
    assert slow.run_result.status == sdk.CommandRunStatus.TimeLimitExceeded


def test_sdk_runs_files_and_bash(sdk):
    request = sdk.RunCodeRequest(code="cat i > o", language="bash", files={"i": "aGk="}, fetch_files=["o"])
    assert sdk.run_code(request, max_attempts=1).files == {"o": "aGk="}


def test_sdk_raises_for_a_sandbox_error(sdk):
    with pytest.raises(Exception, match="has no runner"):
        sdk.run_code(sdk.RunCodeRequest(code="x", language="java"), max_attempts=1)


def test_sdk_runs_asynchronously(sdk):
    async def scenario() -> list[str]:
        requests = [sdk.RunCodeRequest(code=f"print({n})", language="python") for n in range(20)]
        answers = await asyncio.gather(*map(sdk.run_code_async, requests))
        return [answer.run_result.stdout for answer in answers]

    assert asyncio.run(scenario()) == [f"{n}\n" for n in range(20)]


def test_sdk_runs_notebooks(sdk):
    answer = sdk.run_jupyter(sdk.RunJupyterRequest(cells=["a = 6", "a * 7", "1/0"]), max_attempts=1)
    assert answer.status == sdk.RunStatus.Success
    assert answer.cells[1].display == [{"text/plain": "42"}] and answer.cells[2].error[0]["ename"]


def test_sdk_submits(sdk):
    cases = [{"input": {"stdin": "3"}, "output": {"stdout": "9"}}]
    config = sdk.TestConfig(dataset_type="CommonOJDataset", language="python", provided_data={"test": cases})
    request = sdk.SubmitRequest(
        dataset="mine", id=1, completion="```python\nprint(int(input())**2)\n```", config=config
    )
    assert sdk.submit(request, max_attempts=1).accepted
    assert not sdk.submit(request.copy(update={"completion": "print(1)"}), max_attempts=1).accepted


def test_verls_reward_score(url):
    """Runs in a separate process: verl's package is heavy, and its sandbox client is one file of it."""
    code = (
        "import importlib.util, json, sys\n"
        "root = importlib.util.find_spec('verl').submodule_search_locations[0]\n"
        "path = root + '/utils/reward_score/sandbox_fusion/utils.py'\n"
        "spec = importlib.util.spec_from_file_location('utils', path)\n"
        "utils = importlib.util.module_from_spec(spec); spec.loader.exec_module(utils)\n"
        "url, runs = sys.argv[1] + '/run_code', []\n"
        "cases = {'inputs': ['1', '2', '3'], 'outputs': ['2', '4', '7']}\n"
        "for generation, given in json.loads(sys.argv[2]):\n"
        "    results, _ = utils.check_correctness(url, given or cases, generation, timeout=3)\n"
        "    runs.append(results)\n"
        "print(json.dumps(runs))"
    )
    function = {"inputs": ["[1, 2]\n3"], "outputs": ["[1, 2, 3]"], "fn_name": "join"}
    programs = [
        ["print(2 * int(input()))", None],
        ["1/0", None],
        ["while True: pass", {"inputs": [""], "outputs": [""]}],
        ["def join(a, b): return a + [b]", function],
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, url, json.dumps(programs)],
        capture_output=True,
        text=True,
        timeout=1200,
        env=os.environ | {"NO_PROXY": "127.0.0.1"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[True, True, False], [-2, -2, -2], [-3], [True]]
