"""evaluate_model.sh: what it refuses, what it passes on, where the key goes, and one evaluation for real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.remote.openai_server import OpenAIServer, tool_call

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipe" / "retool" / "evaluate_model.sh"
KEY = "sk-a-key-that-nobody-must-see-0123456789"
GIVEN = ["model", "out", "http://localhost:8000/v1", "local", KEY]
RECORDER = """\
#!{python}
import json, os, sys
with open({record!r}, "a") as file:
    file.write(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}}) + "\\n")
"""


def run(*arguments: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name not in ("RETOOL_API_KEY", "SANDBOX_TOKEN")}
    command = [shutil.which("bash"), str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=cwd, env=clean | env, capture_output=True, text=True)


@pytest.fixture
def recorded(tmp_path):
    """Runs the script with a Python that records its calls: the calls, of which the last is the evaluation."""
    record, python = tmp_path / "calls.jsonl", tmp_path / "python"
    python.write_text(RECORDER.format(python=sys.executable, record=str(record)))
    python.chmod(0o755)

    def call(*arguments: str, **env: str) -> list[dict]:
        record.unlink(missing_ok=True)
        done = run(*arguments, cwd=tmp_path, PYTHON=str(python), **env)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in record.read_text().splitlines()]

    return call


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "5 arguments are needed, 0 given"),
        (GIVEN[:4], "5 arguments are needed, 4 given"),
        ([*GIVEN[:3], "--samples", "4"], "5 arguments are needed, 3 given"),
        (["", *GIVEN[1:]], "MODEL is empty"),
        (["model", "", *GIVEN[2:]], "OUT is empty"),
        (["model", "pyproject.toml", *GIVEN[2:]], "OUT is a file"),
        (["model", "out", "localhost:8000", "local", KEY], "BASE_URL must be"),
        (["model", "out", KEY, "local", "http://localhost:8000/v1"], "BASE_URL must be"),
        ([*GIVEN[:3], KEY, "local"], "SANDBOX_URL must be"),
        ([*GIVEN[:4], "-"], "RETOOL_API_KEY is not set"),
        ([*GIVEN, "--samples", "0"], "--samples must be a whole number"),
        ([*GIVEN, "--samples", "4x"], "--samples must be a whole number"),
        ([*GIVEN, "--samples"], "--samples needs a value"),
        ([*GIVEN, "--top-p", "1.5"], "--top-p must be above 0"),
        ([*GIVEN, "--top-k=0"], "--top-k must be"),
        ([*GIVEN, "--temperature", "-1"], "--temperature must be"),
        ([*GIVEN, "--request-timeout", "0.0"], "--request-timeout must be"),
        ([*GIVEN, "--benchmark", "aime26"], "--benchmark must be aime24 or aime25"),
        ([*GIVEN, "--colour", "red"], "there is no option --colour"),
        ([*GIVEN, "again"], "'again' is neither an option nor key=value"),
        ([*GIVEN, "=4"], "neither an option nor key=value"),
    ],
)
def test_what_it_refuses_in_one_line_without_the_key(arguments, what):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and what in done.stderr
    assert KEY not in done.stderr


def test_the_protocol_is_its_default(recorded, tmp_path):
    _, prepare, evaluate = recorded(*GIVEN)
    assert prepare["argv"] == [
        *("preprocess/aime.py", "--input", "Maxwell-Jia/AIME_2024", "--test_size", "all"),
        *("--local_dir", f"{tmp_path}/out/data"),
    ]
    argv = evaluate["argv"]
    assert argv[:4] == ["-m", "recipe.dag.cli", "eval", "workflows/workflow_retool.yaml"]
    options = dict(zip(argv[4:22:2], argv[5:22:2], strict=True))
    assert options == {
        "--base-url": GIVEN[2],
        "--served-model": "model",
        "--max-concurrent": "64",
        "--request-timeout": "300",
        "--data": f"{tmp_path}/out/data/test.parquet",
        "--output": f"{tmp_path}/out",
        "-n": "32",
        "--seed": "0",
        "--key-env": "RETOOL_API_KEY",
    }
    settings = dict(setting.split("=", 1) for setting in argv[22:])
    assert settings == {
        "sandbox.timeout_s": "30",
        "sandbox.max_concurrent": "32",
        "report.conversations_file": "retool_results.json",
        "rollout.processes": "1",
        "rollout.max_in_flight": "96",
        "workflow.agents.solver.validation.temperature": "0.7",
        "workflow.agents.solver.validation.top_p": "0.9",
        "workflow.agents.solver.validation.top_k": "50",
        "workflow.agents.solver.sampling.max_tokens": "16384",
        "workflow.agents.solver.tool_loop.max_generations": "8",
        "workflow.episode.timeout_s": "5280",
        "workflow.episode.call_timeout_s": "5280",
        "workflow.episode.on_user_error": "mask",
    }


def test_options_and_settings_arrive_and_positional_arguments_do_not(recorded, tmp_path):
    data = tmp_path / "my problems.jsonl"
    data.write_text("{}")
    more = ["--benchmark", "aime25", "--data", data.name, "--samples=2", "--problems", "5", "--max-turns", "3"]
    _, prepare, evaluate = recorded(
        *GIVEN[:4], "", *more, "--requests", "8", "--programs", "4", "rollout.progress=false"
    )
    assert prepare["argv"][2] == str(data)
    argv = evaluate["argv"]
    pairs = list(zip(argv, argv[1:], strict=False))
    assert {("-n", "2"), ("--max-samples", "5"), ("--max-concurrent", "8")} <= set(pairs)
    assert argv[-1] == "rollout.progress=false" and "rollout.max_in_flight=12" in argv
    assert "--key-env" not in argv and "RETOOL_API_KEY" not in evaluate["env"]
    assert not {"model", "out", "local", ""} & set(argv[argv.index("sandbox.timeout_s=30") :])
    assert recorded(*GIVEN, "--benchmark", "aime25")[1]["argv"][2] == "yentinglin/aime_2025"


@pytest.mark.parametrize("given", [KEY, "-"], ids=["argument", "environment"])  # pytest shows ids in the environment
def test_the_key_is_in_the_environment_of_the_evaluation_alone(recorded, given):
    env = {"RETOOL_API_KEY": KEY} if given == "-" else {}
    *others, evaluate = recorded(*GIVEN[:4], given, **env)
    assert evaluate["env"]["RETOOL_API_KEY"] == KEY
    assert KEY not in json.dumps([call["argv"] for call in (*others, evaluate)])
    if given != "-":
        assert KEY not in json.dumps([call["env"] for call in others])


def test_a_sandbox_of_the_user_gets_its_token_from_the_environment(recorded):
    *_, evaluate = recorded(*GIVEN[:3], "http://box:8080/run_code", KEY, SANDBOX_TOKEN="secret-token")
    assert "sandbox.url='http://box:8080/run_code'" in evaluate["argv"]
    assert "sandbox.token=${oc.env:SANDBOX_TOKEN}" in evaluate["argv"]
    assert "secret-token" not in " ".join(evaluate["argv"])


def test_help_lists_the_options():
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--benchmark" in done.stdout and "set -euo" not in done.stdout


def answer(body: dict) -> object:
    """A solver that computes with the tool and then answers 204."""
    if body["messages"][-1]["role"] != "tool":
        return tool_call("code_interpreter", f"id{body['seed']}", code="import os\nprint(dict(os.environ), 200 + 4)")
    return "The answer is <answer>\\boxed{204}</answer>."


@pytest.mark.slow
@pytest.mark.parametrize("form", ["aime24", "aime25"])
def test_an_evaluation_for_real(tmp_path, form):
    """The key is in no command line while it runs, and in no file afterwards; a program does not see it."""
    problems = [("Find the number of minutes.", "204"), ("And now?", "025")]
    aime24 = [
        {"ID": f"2024-I-{n}", "Problem": p, "Solution": "long", "Answer": int(a)} for n, (p, a) in enumerate(problems)
    ]
    aime25 = [{"problem": p, "answer": a} for p, a in problems]
    data = tmp_path / f"{form}.json"
    data.write_text(json.dumps(aime24 if form == "aime24" else aime25))
    seen: set[str] = set()

    def look(body: dict) -> object:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            except OSError:
                continue
            if KEY in command:
                seen.add(command)
        return answer(body)

    with OpenAIServer(look, key=KEY) as server:
        out = tmp_path / "out"
        options = ["--benchmark", form, "--data", str(data), "--samples", "2", "--max-tokens", "64"]
        done = run("test", str(out), server.url, "local", KEY, *options, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr[-2000:]
    assert seen == set()
    assert "accuracy 0.5000, 4 episodes, 0 errors, pass@1 0.5000, pass@2 0.5000" in done.stdout
    results = json.loads((out / "retool_results.json").read_text())
    assert results["metadata"]["model"] == "test" and results["metadata"]["total_samples"] == 4
    assert results["metadata"]["sampling"]["solver"] == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 50,
        "max_tokens": 64,
    }
    assert [item["correct"] for item in results["results"]] == [True, True, False, False]
    assert [item["ground_truth"] for item in results["results"]] == ["204", "204", "25", "25"]
    assert [item["turn_count"] for item in results["results"]] == [2] * 4
    roles = [message["role"] for message in results["results"][0]["conversation_history"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert "204" in results["results"][0]["conversation_history"][3]["content"]
    body = server.requests[0]
    assert (body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) == (0.7, 0.9, 50, 64)
    assert body["tools"][0]["function"]["name"] == "code_interpreter"
    texts = [path.read_text(errors="replace") for path in out.rglob("*") if path.is_file()]
    assert KEY not in done.stdout + done.stderr + "".join(texts)
