"""The whole protocol under faults: 30 x 32 samples on a server that fails, killed processes, and what stops a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.app.test_cli_serve import serving
from tests.remote.openai_server import OpenAIServer, scattered, tool_call

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipe" / "retool" / "evaluate_model.sh"
PROBLEMS, SAMPLES = 30, 32
KEYS = {(problem, sample) for problem in range(PROBLEMS) for sample in range(SAMPLES)}
FAULTS = {"drop": 0.05, "429": 0.03, "500": 0.03, "truncate": 0.01}


@pytest.fixture(scope="module")
def data(tmp_path_factory, zygote) -> SimpleNamespace:
    """`.file` with the problems, and the `.python` of evaluations."""
    file = tmp_path_factory.mktemp("data") / "problems.jsonl"
    lines = (json.dumps({"problem": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(PROBLEMS))
    file.write_text("".join(f"{line}\n" for line in lines))
    return SimpleNamespace(file=file, python=zygote.python)


def start(data: SimpleNamespace, out: Path, url: str, *options: str) -> subprocess.Popen:
    command = [shutil.which("bash"), SCRIPT, "test", out, url, "local", "sk-some-key-000", "--data", data.file]
    log = (out.parent / f"{out.name}.log").open("ab")
    env = {**os.environ, "PYTHON": str(data.python), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*map(str, command), *options], env=env, stdout=log, stderr=subprocess.STDOUT)


def evaluate(data: SimpleNamespace, out: Path, url: str, *options: str, code: int = 0) -> str:
    """Run to the end; returns the last line."""
    process = start(data, out, url, *options)
    log = out.parent / f"{out.name}.log"
    assert process.wait(1200) == code, log.read_text()[-3000:]
    return log.read_text().splitlines()[-1]


def results(out: Path) -> dict:
    return json.loads((out / "retool_results.json").read_text())


def solver(lost: Callable[[int], bool] = lambda seed: False) -> Callable[[dict], object]:
    """Answers right for 3 of 4 seeds, for 1 of 8 after a program. `lost`: seeds whose answers are unusable."""

    def answer(body: dict) -> object:
        messages, seed = body["messages"], body["seed"]
        if lost(seed):
            return {"message": {"role": "assistant", "content": "?"}, "finish_reason": "overloaded"}
        number = int(messages[1]["content"].split()[2])
        if messages[-1]["role"] == "tool":
            return f"The program says <answer>\\boxed{{{messages[-1]['content'].strip()}}}</answer>."
        if seed % 8 == 0:
            return tool_call("code_interpreter", f"call-{seed}", code=f"print({number} + 1)")
        return f"<answer>\\boxed{{{number + (seed % 4 > 0)}}}</answer>"

    return answer


@contextmanager
def restarted_after(server: OpenAIServer, requests: int, pause_s: float) -> Iterator[list[int]]:
    """Kill the server once after so many requests, and start it again; yields where the numbers of requests go."""
    kills: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            if len(server.requests) >= requests:
                server.kill()
                kills.append(len(server.requests))
                time.sleep(pause_s)
                server.start()
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield kills
    finally:
        ended.set()
        thread.join(60)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_960_episodes_against_a_server_that_fails_and_is_killed_once(tmp_path, data):
    """Every episode is there once, errors apart; the same command repeats only the errors, and then the file is the one
    of a server that never failed."""
    steady = tmp_path / "steady"
    with OpenAIServer(solver(), key="sk-some-key-000") as server:
        evaluate(data, steady, server.url)
        assert server.most_in_flight <= 64
    expected = results(steady)
    assert (expected["metadata"]["total_samples"], expected["metadata"]["errors"]) == (960, 0)
    right = sum(item["correct"] for item in expected["results"])
    assert 0.6 < right / 960 < 0.9 and expected["metadata"]["accuracy"] == pytest.approx(right / 960)

    out = tmp_path / "out"
    faults, lost = scattered(FAULTS, seed=1), {1}  # 2 % of the seeds, whatever is repeated
    server = OpenAIServer(solver(lambda seed: seed % 50 in lost), key="sk-some-key-000", faults=faults)
    with server, restarted_after(server, 400, pause_s=2.0) as kills:
        evaluate(data, out, server.url)
        failed = Counter(faults(number) for number in range(len(server.requests)))
    assert kills and min(failed[name] for name in FAULTS) > 0
    found = results(out)
    items = found["results"]
    assert Counter((item["problem_id"], item["sample_id"]) for item in items) == Counter(KEYS)
    errors = [item for item in items if "error" in item]
    metadata = found["metadata"]
    assert 0 < len(errors) == metadata["errors"] < 60 and metadata["graded"] == 960 - len(errors)
    # an answer that cannot be used is asked for again: what ends such an episode is whatever the last try met
    unusable = {body["seed"] for body in server.requests if body["seed"] % 50 in lost}
    assert len(errors) == len(unusable) and all("(6 tries)" in item["error"] for item in errors)
    assert any("overloaded" in item["error"] for item in errors)
    graded = [item for item in items if "error" not in item]
    assert metadata["accuracy"] == pytest.approx(sum(item["correct"] for item in graded) / len(graded))
    whole = {(item["problem_id"], item["sample_id"]): item for item in expected["results"]}
    assert all(item == whole[item["problem_id"], item["sample_id"]] for item in graded)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["num_errors"], summary["num_graded"]) == (len(errors), len(graded))

    lost.clear()
    server.faults = {}
    server.requests.clear()
    with server:
        evaluate(data, out, server.url)
    assert len(errors) <= len(server.requests) <= 2 * len(errors)
    for name in ("retool_results.json", "results.json"):
        assert (out / name).read_bytes() == (steady / name).read_bytes()


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture(scope="module")
def taught_model(tmp_path_factory, zygote) -> Path:
    """A tiny model that has seen a few of the teacher's dialogues, enough to call the interpreter now and then."""
    out = tmp_path_factory.mktemp("taught") / "model"
    options = ["--workflow", "workflows/workflow_retool.yaml", "--teacher", "recipe/retool/teacher.py:Teacher"]
    command = [zygote.python, "-m", "recipe.tiny.build", *options, "--output", str(out), "--steps", "80"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--problems", "256"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_kills_change_nothing(tmp_path, data, taught_model, zygote):
    """The evaluating process, killed three times in the middle, leaves the file of an undisturbed run."""
    options = ["--samples", "4", "--max-tokens", "40", "--max-turns", "2", "--requests", "4", "--programs", "2"]
    with serving(str(taught_model), "--model-name", "test", python=zygote.python) as (url, _):
        steady, out = tmp_path / "steady", tmp_path / "out"
        evaluate(data, steady, url, *options)
        total = PROBLEMS * 4
        log, left = out / "episodes.jsonl", 0
        for wanted in (total // 8, total // 4, total // 3):
            process = start(data, out, url, *options)
            while process.poll() is None and lines_in(log) < max(wanted, left + 1):
                time.sleep(0.02)
            assert process.poll() is None, "it ended before it could be killed"
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert not (out / "retool_results.json").exists() and left < lines_in(log) < total
            left = lines_in(log)
        evaluate(data, out, url, *options)
    text = (tmp_path / "out.log").read_text()
    assert text.count(f" of {total} episodes; the others are run") == 3
    episodes = [json.loads(line) for line in log.read_text().splitlines()]
    assert {(episode["uid"], episode["index"]) for episode in episodes} == {
        (f"val-{problem}", sample) for problem in range(PROBLEMS) for sample in range(4)
    }
    assert len(episodes) == total and len({episode["calls"][0]["text"] for episode in episodes}) > total // 4
    for name in ("retool_results.json", "results.json"):
        assert (out / name).read_bytes() == (steady / name).read_bytes()


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path, data, monkeypatch):
    """A limit on the size of files stands for the full disk: the write fails in the same place."""
    out = tmp_path / "out"
    with OpenAIServer(solver(), key="sk-some-key-000") as server:
        bash = shutil.which("bash")
        monkeypatch.setattr(shutil, "which", lambda name: name)
        limited = tmp_path / "bin"
        limited.mkdir()
        (limited / "bash").write_text(f'#!{bash}\nulimit -f 300\nexec {bash} "$@"\n')
        (limited / "bash").chmod(0o755)
        monkeypatch.setenv("PATH", f"{limited}:{os.environ['PATH']}")
        evaluate(data, out, server.url, "--samples", "8", code=2)
        text = (tmp_path / "out.log").read_text()
        last = text.splitlines()[-1]
        assert f"{out}: cannot be written: File too large" in last and "run the same command again" in last
        assert "Traceback" not in text and "sk-some-key-000" not in text
        assert 0 < (kept := lines_in(out / "episodes.jsonl")) < 240
        monkeypatch.undo()
        evaluate(data, out, server.url, "--samples", "8")
    assert f"holds {kept} of 240 episodes" in (tmp_path / "out.log").read_text()
    assert results(out)["metadata"]["graded"] == 240
