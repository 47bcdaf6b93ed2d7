"""A training whose coach fails: what stays as it was, and what is left out and counted."""

from __future__ import annotations

import json
import os
import subprocess
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.mathchat.judge import judge
from tests.remote.openai_server import OpenAIServer, scattered

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
TRAINED = ("solver", "coder", "verifier")

Key = tuple[int, str, int, str, int]
"""(step, sample, episode, node, round)."""


@pytest.fixture(scope="module")
def material(tmp_path_factory, sandbox_level, zygote, joined_ray) -> SimpleNamespace:
    """A barely warm tiny model, which is wrong often enough, and a few problems."""
    folder = tmp_path_factory.mktemp("material")
    data = ["recipe/tiny/arithmetic.py", "--local_dir", f"{folder}/data", "--train_size", "24", "--test_size", "8"]
    model = ["-m", "recipe.tiny.build", "--workflow", "workflows/workflow_mathchat.yaml", "--steps", "100"]
    model += ["--teacher", "recipe/mathchat/teacher.py:Teacher", "--output", f"{folder}/model", "--problems", "400"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in (data, model):
        subprocess.run([zygote.python, *command], cwd=ROOT, env=env, check=True, timeout=1200)
    options = [f"sandbox.{key}={value}" for key, value in sandbox_level.items()]
    return SimpleNamespace(folder=folder, options=options, python=zygote.python, ray=joined_ray)


def train(material: SimpleNamespace, out: Path, url: str, steps: int) -> None:
    """Train steps of 16 episodes."""
    fields = "timeout_s: 10.0, retries: 3, max_wait_s: 0.05, failures_to_open: 100000"
    command = [
        *(material.python, "-m", "recipe.dag.main", "--config-path", "recipe/mathchat/config"),
        *("--config-name", "tiny_cpu"),
        *("workflow=workflows/workflow_mathchat.yaml", f"output_dir={out}", "seed=3", *material.options),
        *(f"data.train_files={material.folder}/data/train.parquet", "data.train_batch_size=8"),
        "data.max_prompt_length=512",  # every prompt fits, so that the coach judges every action
        *(
            f"data.val_files={material.folder}/data/test.parquet",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
        ),
        *(f"trainer.total_training_steps={steps}", "trainer.save_freq=-1", "trainer.logger=[console]"),
        "~workflow.policies.coach.model",
        f'workflow.policies.coach.api={{base_url: "${{oc.env:COACH_URL}}", model: test, {fields}}}',
    ]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        **material.ray,
        "COACH_URL": url,
        "MODEL_PATH": f"{material.folder}/model",
    }
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def steps(out: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}


def episodes(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]


def calls_of(out: Path) -> dict[Key, SimpleNamespace]:
    """Return the calls of trained agents: text, reward, whether it is unscored, the coach's verdict and request."""
    found: dict[Key, SimpleNamespace] = {}
    for episode in episodes(out):
        calls = {(call["node"], call["round"]): call for call in episode["calls"]}
        for (node, round_index), call in calls.items():
            if call["agent"] not in TRAINED:
                continue
            coach = calls[f"coach_{node}", round_index]
            key = episode["step"], episode["uid"], episode["index"], node, round_index
            found[key] = SimpleNamespace(
                text=call["text"],
                reward=call["reward"],
                unscored=call["unscored"],
                verdict=coach["parsed"],
                request=coach["messages"][:1],
                outcome=episode["outcome"],
            )
    return found


def unreadable(body: dict[str, Any]) -> bool:
    """Return whether this coach never finds a score for the action: one in ten, whenever it is asked."""
    return zlib.crc32(body["messages"][0]["content"].encode()) % 10 == 0


def by_rule(body: dict[str, Any]) -> str:
    return judge(body["messages"])


def test_faults_of_the_coach_leave_their_calls_out_and_change_no_other_reward(material, tmp_path):
    """One request in ten fails, one in ten answers nonsense that is no JSON, one in ten verdicts has no score, one
    request hangs, and in the last step the coach dies."""
    steady, shaken = tmp_path / "steady", tmp_path / "shaken"
    with OpenAIServer(by_rule) as server:
        train(material, steady, server.url, steps=1)
        in_a_step = sum(len(e["calls"]) for e in episodes(steady)) // 2
        assert len(server.requests) == in_a_step

    spoilt = scattered({"503": 0.1, "nonsense": 0.1}, seed=1)
    dead_after = in_a_step + in_a_step // 3
    hits: list[str] = []

    def faults(number: int) -> str | None:
        fault = "drop" if number > dead_after else "hang" if number == 20 else spoilt(number)
        if fault is not None:
            hits.append(fault)
        return fault

    with OpenAIServer(lambda body: "I like it." if unreadable(body) else by_rule(body), faults=faults) as server:
        train(material, shaken, server.url, steps=2)
    assert hits.count("hang") == 1 and min(hits.count(name) for name in ("503", "nonsense", "drop")) > 3

    before, after = calls_of(steady), calls_of(shaken)
    assert not any(call.unscored for call in before.values())
    left_out = {key for key, call in after.items() if call.unscored}
    for key, call in after.items():
        if key in left_out:
            assert call.reward is None and "failed" in call.verdict
            continue
        # the reward is what an undisturbed coach says of this request, and the answering agent's outcome
        score = float(judge(call.request).partition("PROCESS_SCORE: ")[2].split()[0])
        outcome = call.outcome if key[3] == "verify" else 0.0
        assert call.verdict["process"] == score and call.reward == pytest.approx(score / 10 + outcome)
    first = {key: call for key, call in after.items() if key[0] == 1}
    assert {key: call.text for key, call in first.items()} == {k: c.text for k, c in before.items()}
    assert all(call.reward == before[key].reward for key, call in first.items() if key not in left_out)
    counts = [sum(key[0] == step for key in left_out) for step in (1, 2)]
    assert [steps(shaken)[step]["left_out/calls_unscored"] for step in (1, 2)] == counts
    assert 0 < counts[0] < len(first) / 3 and counts[1] > len(first) / 3
    # nobody else pays: no episode was masked, and both policies' rows are those of the scored calls
    assert not any(episode["fault"] for episode in episodes(shaken))
