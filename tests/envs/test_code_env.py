"""The programming env, on the sandbox that a run has: rewards, what is said, what stays hidden, whose fault it is."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.core.errors import SandboxFault, UserError
from recipe.dag.episode.env_class import load_envs, needs_sandbox
from recipe.dag.tools.sandbox_client import RunResult, SandboxClient
from verl_dag.envs.code_env import CodeEnv, program_in

DOUBLE = json.dumps({"inputs": ["1\n", "20\n", "-3\n"], "outputs": ["2\n", "40\n", "-6\n"]})
ADD = json.dumps({"inputs": [[1, 2], [5, -5]], "outputs": [[3], [0]], "fn_name": "add"})
ASSERTS = json.dumps(["assert add(1, 2) == 3", "assert add(0, 0) == 0"])


@pytest.fixture
def client(local) -> SandboxClient:
    """As a run makes it."""
    return SandboxClient(local.url, token=local.token, max_concurrent=2)


def play(client, code: str, truth: str, **options):
    async def main():
        env = CodeEnv(**options)
        env.reset({"ground_truth": truth}, 0, client)
        try:
            return await env.step(["steps", code], truth)
        finally:
            await client.close()

    return asyncio.run(main())


def block(code: str) -> str:
    return f"Here it is.\n```python\n{code}\n```"


@pytest.mark.parametrize(
    ("code", "truth", "share", "said"),
    [
        ("print(2 * int(input()))", DOUBLE, 1.0, "passed 3 of 3 tests."),
        ("print(abs(2 * int(input())))", DOUBLE, 2 / 3, "passed 2 of 3 tests; 1 gave a wrong result."),
        ("print(2 * int(input()", DOUBLE, 0.0, "passed 0 of 3 tests; 3 ended with an error."),
        ("def add(a, b):\n    print('noise')\n    return a + b", ADD, 1.0, "passed 2 of 2"),
        ("class Solution:\n    def add(self, a: int, b: List[int]):\n        return a + b", ADD, 1.0, "passed 2 of 2"),
        ("def add(a, b): return 3", ADD, 0.5, "passed 1 of 2"),
        ("def other(a, b): return 3", ADD, 0.0, "2 ended with an error"),
        ("def add(a, b): return a + b\nif __name__ == '__main__': raise SystemExit(1)", ADD, 1.0, "passed 2 of 2"),
        ("def add(a, b): return a + b", ASSERTS, 1.0, "passed 2 of 2"),
        ("def add(a, b): return 0", ASSERTS, 0.5, "1 ended with an error"),
        ("raise SystemExit(0)", ASSERTS, 0.0, "2 gave a wrong result"),
        ("raise SystemExit(0)", ADD, 0.0, "2 gave a wrong result"),
    ],
)
def test_tests_are_run_and_counted(client, code, truth, share, said):
    obs, rewards, done = play(client, block(code), truth)
    assert rewards == [0.0, pytest.approx(share)] and done is (share == 1.0)
    assert obs[0].startswith("steps\n\nThe program ") and all(said in text for text in obs)


def test_all_or_nothing(client):
    code = block("print(abs(2 * int(input())))")
    assert play(client, code, DOUBLE, reward="all")[1] == [0.0, 0.0]
    assert play(client, code, DOUBLE, reward="all", max_tests=2)[1:] == ([0.0, 1.0], True)


def test_endless_loops_cost_a_bounded_time():
    programs = []

    async def run_code(program, **kwargs):
        programs.append(program)
        return RunResult("timeout", "", "", None, kwargs["timeout_s"], 1)

    truth = json.dumps({"inputs": ["1"] * 30, "outputs": ["1"] * 30})
    env = CodeEnv(wave=4, max_timeouts=3)
    env.reset({"ground_truth": truth}, 0, SimpleNamespace(run_code=run_code))
    obs, rewards, done = asyncio.run(env.step([block("while True: pass")], truth))
    assert (len(programs), rewards, done) == (4, [0.0], False)
    assert obs[0].endswith("The program passed 0 of 30 tests; 30 ran out of time.")


def test_hidden_tests_stay_hidden(client):
    truth = json.dumps({"inputs": ["secret-in\n"], "outputs": ["secret-out\n"]})
    for code in ("print(input())", "int(input())", "raise ValueError(input())"):
        obs, _, _ = play(client, block(code), truth)
        assert not any("secret" in text for text in obs)


def test_no_program_is_a_wrong_answer(client):
    obs, rewards, done = play(client, "print(1)", DOUBLE)
    assert (rewards, done) == ([0.0, 0.0], False) and "no program" in obs[1]


def test_a_sandbox_that_is_down_is_a_fault():
    down = SandboxClient("http://127.0.0.1:9", connect_timeout_s=0.2, retries=0)
    with pytest.raises(SandboxFault) as raised:
        play(down, block("print(1)"), DOUBLE)
    assert raised.value.infra


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\nthen\n```python\nb\n```", "b"),
        ("```python\na\n```\n```cpp\nx\n```", "a"),
        ("```cpp\nx\n```\nand text\n", None),
        ("```\na\n```", "a"),
        ("```python\n    a\n    b\n```", "a\nb"),
        ("```python\na = '```'\ncut", "a = '```'\ncut"),
        ("```python\na\n```\n```python\n\n```", "a"),
        ("a", None),
        ("<think>\n```python\na\n```\n</think>none", None),
        ("```python\na\n```\n<think>\n```python\nb\n```", "a"),
    ],
)
def test_the_last_python_block_is_the_program(text, code):
    assert program_in(text) == code


@pytest.mark.parametrize(
    ("options", "message"),
    [({"reward": "some"}, "choose share or all"), ({"max_tests": 0}, "max_tests 0"), ({"wave": 0}, "wave")],
)
def test_options_are_checked(options, message):
    with pytest.raises(UserError, match=message):
        CodeEnv(**options)


def test_a_sample_without_tests_is_the_users_mistake():
    with pytest.raises(UserError, match="no tests"):
        CodeEnv().reset({"ground_truth": "42"}, 0, None)


def test_the_run_learns_that_the_env_needs_its_sandbox():
    def flow(path, **envs):
        node = SimpleNamespace(id="n", env=(path,), env_route=None)
        return SimpleNamespace(path=__file__, rollout_nodes=(node,), envs=envs, algorithm=make_algorithm())

    named = flow("code", code=SimpleNamespace(path="envs/code_env.py:CodeEnv", kwargs={"reward": "all"}))
    assert needs_sandbox(named) and needs_sandbox(flow("envs/code_env.py:CodeEnv"))
    assert not needs_sandbox(flow("envs/math_env.py:MathEnv"))
    given = object()
    (env,) = load_envs(named, given).values()
    assert env.sandbox is given and env.kwargs == {"reward": "all"}
