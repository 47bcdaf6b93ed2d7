"""`verl-dag eval --base-url`: without Ray and verl, through faults, and where the key is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.dag.app import cli
from tests.remote.openai_server import OpenAIServer, scattered, tool_call

ROOT = Path(__file__).parents[2]
KEY = "tk1234567890qwertzuiop"
"""In no form by which a key is recognised: only its value can be hidden."""
WORKFLOW = """\
dag_id: remote
agents: [{name: solver, policy: main, tools: [code_interpreter], tool_loop: {max_generations: 3}}]
policies: {main: {model: {path: "${oc.env:MODEL_PATH}"}}}
algorithm: {estimator: grpo}
nodes:
  - {id: solve, agent: solver}
  - {id: pay, reward: "score.py:score", after: solve}
"""
SCORE = """\
def score(episode):
    episode.outcome = float(episode.sample["ground_truth"] in episode.calls[-1].text)
    return {"solver": episode.outcome}
"""
DRIVER = """\
import sys
from recipe.dag.app.cli import main
try:
    main()
finally:
    print("imported:", *(name for name in ("torch", "ray", "verl", "sglang") if name in sys.modules))
"""
"""Runs the command and says which of the heavy packages it has imported."""
SPY = f"""\
import glob, os
found = [repr(dict(os.environ)).encode()]
for file in glob.glob("/proc/[0-9]*/environ"):
    try:
        found.append(open(file, "rb").read())
    except OSError:
        pass
print(len(found) > 0, "found:", {KEY[::-1]!r}[::-1].encode() in b"".join(found))
"""
"""A program that looks for the key, which it holds backwards, in every environment that it can read."""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    (tmp_path / "w.yaml").write_text(WORKFLOW)
    (tmp_path / "score.py").write_text(SCORE)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Say {k}."}],
            "data_source": "t",
            "reward_model": {"style": "rule", "ground_truth": str(k)},
        }
        for k in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    return tmp_path


def evaluate(
    task: Path, url: str, *arguments: str, output: str = "out", python: str | None = None, **env: str
) -> subprocess.CompletedProcess:
    """`python`: of the zygote, which starts sooner."""
    start = [python, "-m", "recipe.dag.cli"] if python else [sys.executable, "-c", DRIVER]
    command = [*start, "eval", "w.yaml", "--base-url", url, "--served-model", "test"]
    command += ["--data", "data.parquet", "--output", output, *arguments]
    kept = {name: value for name, value in os.environ.items() if name not in ("MODEL_PATH", "VERL_DAG_KEY")}
    environment = {**kept, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(command, cwd=task, env=environment, capture_output=True, text=True, timeout=900)


def echo(body: dict) -> str:
    return body["messages"][0]["content"]


def test_an_evaluation_of_an_api_imports_neither_torch_nor_ray_and_survives_faults(task):
    # so rare that no request meets six in a row
    faults = scattered({"drop": 0.05, "429": 0.05, "500": 0.05, "nonsense": 0.03}, seed=4)
    with OpenAIServer(echo, faults=faults) as server:
        done = evaluate(task, server.url, "-n", "4", "sandbox.isolation=rlimits", "sandbox.accept_unsandboxed=true")
    assert done.returncode == 0, done.stderr
    assert "accuracy 1.0000, 32 episodes, 0 errors" in done.stdout and "imported:\n" in done.stdout
    summary = json.loads((task / "out" / "summary.json").read_text())
    usage = summary["api_usage"]["main"]
    assert summary["final_accuracy"] == 1.0 and usage["requests"] == len(server.requests) == 32 + usage["retries"]
    assert usage["retries"] > 3 and usage["prompt_tokens"] == 32 * 7
    assert server.requests[0]["model"] == "test" and server.requests[0]["tools"]


def test_the_key_reaches_the_server_and_nothing_else(task, sandbox_level):
    def answer(body):
        return tool_call("code_interpreter", code=SPY) if len(body["messages"]) == 1 else "7"

    options = [f"sandbox.{name}={str(value).lower()}" for name, value in sandbox_level.items()]
    with OpenAIServer(answer, key=KEY) as server:
        done = evaluate(task, server.url, "--key-env", "VERL_DAG_KEY", "--max-samples", "2", *options, VERL_DAG_KEY=KEY)
    assert done.returncode == 0, done.stderr
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    spied = [
        message["content"] for body in server.requests for message in body["messages"] if message["role"] == "tool"
    ]
    assert len(spied) >= 2 and all("True found: False" in text for text in spied)
    written = {file: file.read_bytes() for file in task.rglob("*") if file.is_file()}
    assert {"episodes.jsonl", "results.json", "config.yaml", "launch.json", "fingerprint.json"} <= {
        file.name for file in written
    }
    assert not [file for file, data in written.items() if KEY.encode() in data]
    assert not [body for body in server.requests if KEY in json.dumps(body)]
    assert KEY not in done.stdout + done.stderr


@pytest.fixture
def failing(task, monkeypatch, capsys):
    """Runs an evaluation in this process that must end with exit code 2 before anything is written; returns stderr."""
    monkeypatch.chdir(task)
    monkeypatch.delenv("VERL_DAG_KEY", raising=False)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["verl-dag", "eval", "w.yaml", *arguments, "--data", "data.parquet"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2 and not (task / "outputs").exists()
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        (["--key-env", "VERL_DAG_KEY"], "wrong-key-of-some-length", "refuses the key in VERL_DAG_KEY"),
        (["--key-env", "VERL_DAG_KEY"], None, "environment variable VERL_DAG_KEY is not set"),
        ([], None, "refuses a request without a key"),
    ],
)
def test_a_wrong_or_missing_key_is_one_line(arguments, key, message, failing, monkeypatch):
    if key is not None:
        monkeypatch.setenv("VERL_DAG_KEY", key)
    with OpenAIServer(echo, key=KEY) as server:
        printed = failing("--base-url", server.url, "--served-model", "test", *arguments)
    last = printed.splitlines()[-1]
    assert message in last and server.requests == [] and (key is None or (server.url in last and "401" in last))
    assert "wrong-key" not in printed and "Traceback" not in printed


def test_an_unreachable_server_is_one_line(task, failing):
    with OpenAIServer(echo) as server:
        server.kill()
        api = f"{{api: {{base_url: '{server.url}', model: test, retries: 1}}}}"
        (task / "w.yaml").write_text(WORKFLOW.replace('{model: {path: "${oc.env:MODEL_PATH}"}}', api))
        printed = failing()
    assert all(part in printed.splitlines()[-1] for part in (server.url, "start the server, or correct base_url"))
    assert "policy main: " in printed
    assert "Traceback" not in printed


def test_a_sandbox_that_is_down_is_one_line(failing):
    with OpenAIServer(echo) as server:
        url = "http://127.0.0.1:9"
        printed = failing("--base-url", server.url, "--served-model", "test", f"sandbox.url={url}")
    assert f"sandbox {url} does not answer" in printed.splitlines()[-1] and server.requests == []
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--served-model", "m"], "--served-model has no effect without --base-url"),
        (["--key-env", "A"], "--key-env has no effect without --base-url"),
        (["--base-url", "http://h/v1"], "--base-url needs --served-model NAME"),
        (["--base-url", "http://h/v1", "--served-model", "m", "--model", "x"], "remove --model and --checkpoint"),
        (["--base-url", "h", "--served-model", "m"], "--base-url: expected a URL"),
    ],
)
def test_options_without_an_effect_are_errors(arguments, message, failing):
    assert message in failing(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report.conversations_file=results.json"], "must be the name of a new file in the output folder"),
        (["report.conversations_file=../x.json"], "must be the name of a new file in the output folder"),
        (["report.conversations_file=x.json", "--tokenizer", "t"], "works on token ids, not messages"),
    ],
)
def test_conversations_that_cannot_be_written_are_errors(arguments, message, failing):
    assert message in failing("--base-url", "http://h/v1", "--served-model", "m", *arguments)


def test_results_are_written_even_if_most_episodes_failed_and_the_same_command_repeats_those(task, zygote):
    (task / "w.yaml").write_text(WORKFLOW.replace("tools: [code_interpreter], tool_loop: {max_generations: 3}", ""))
    options = ["-n", "2", "report.conversations_file=all.json"]

    healthy = {"Say 0.", "Say 1."}

    def mostly(body: dict) -> object:
        text = echo(body)
        lost = {"message": {"role": "assistant", "content": text}, "finish_reason": "unheard of"}
        return text if text in healthy else lost

    with OpenAIServer(mostly) as server:
        done = evaluate(task, server.url, *options, python=zygote.python)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        last = done.stderr.strip().splitlines()[-1]
        assert "12 of 16 episodes failed" in last and "the same command repeats them" in last
        first = json.loads((task / "out" / "all.json").read_text())
        assert [first["metadata"][key] for key in ("graded", "errors", "accuracy")] == [4, 12, 1.0]
        assert sum("error" in item for item in first["results"]) == 12
        healthy |= {f"Say {k}." for k in range(8)}
        server.requests.clear()
        assert evaluate(task, server.url, *options, python=zygote.python).returncode == 0
        assert len(server.requests) == 12
    assert json.loads((task / "out" / "all.json").read_text())["metadata"]["graded"] == 16


def test_rewards_of_a_group_are_recorded_and_change_when_it_grows(task, zygote):
    rank = "def rank(episodes): return [{'solver': len(episodes) / 10} for _ in episodes]\n"
    (task / "score.py").write_text(SCORE.replace('{"solver": episode.outcome}', "{}") + rank)
    group = '  - {id: rank, reward: "score.py:rank", scope: group, after: pay}\n'
    (task / "w.yaml").write_text(
        WORKFLOW.replace("tools: [code_interpreter], tool_loop: {max_generations: 3}", "") + group
    )
    with OpenAIServer(echo) as server:
        for n, asked in (("2", 4), ("3", 2)):
            before = len(server.requests)
            done = evaluate(task, server.url, "-n", n, "--max-samples", "2", python=zygote.python)
            assert done.returncode == 0, done.stderr
            assert len(server.requests) - before == asked
            episodes = [json.loads(line) for line in (task / "out" / "episodes.jsonl").read_text().splitlines()]
            assert len(episodes) == 2 * int(n)
            rewards = {call["reward"] for episode in episodes for call in episode["calls"]}
            assert rewards == {int(n) / 10} and "accuracy 1.0000" in done.stdout
