"""The policies of a finished run, asked again: `verl-dag replay` and `verl-dag blame`."""

from __future__ import annotations

import subprocess

import pytest

from recipe.dag.report.what_if import read_effects
from tests.browser import read_page
from tests.end_to_end.runs import ROOT, environment, episodes_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def asked(material, whole):
    def ask(command: str, *options: str) -> str:
        line = [material.zygote.python, "-m", "recipe.dag.cli", command, str(whole), *options]
        env = environment(**material.ray)
        done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return ask


def test_a_fork_without_a_change_repeats_the_record_token_by_token(asked, whole, tmp_path):
    train = next(one for one in episodes_of(whole) if one["step"] == 3)
    episodes = ["0/val-0/0", "3/val-0/0", f"3/{train['uid']}/{train['index']}"]
    before = sorted(path.name for path in whole.iterdir())
    options = [word for address in episodes for word in ("--episode", address)]
    printed = asked("replay", "--again", *options, "-n", "2", "-o", str(tmp_path / "again.json"))
    assert printed.count("the first one repeats the record token by token") == 9
    effects = read_effects(tmp_path / "again.json")
    assert all(effect["repeats"] for effect in effects)
    assert [effect["weights"] for effect in effects[::3]] == ["start", "global_step_3", "global_step_2"]
    assert sorted(path.name for path in whole.iterdir()) == before, "a finished run is only read"


def test_a_page_answers_what_if_a_call_had_been_silent(asked, tmp_path):
    asked("replay", "-n", "2", "-o", str(tmp_path / "what_if.html"))
    (data,) = read_page((tmp_path / "what_if.html").read_text())
    effects = data["index"]["effects"]
    assert [(one["step"], one["at"][0]) for one in effects] == [
        (step, node) for step in (0, 3) for node in ("plan", "execute", "verify")
    ]
    for effect, continuations in zip(effects, data["continuations"], strict=True):
        assert effect["repeats"] and len(effect["before"]) == len(effect["after"]) == len(continuations) == 2
        silent = [[call["node"] for call in calls if call["text"] == ""] for calls in continuations]
        assert all(effect["at"][0] in nodes for nodes in silent)


def test_blame_has_a_line_for_each_agent(asked, material):
    printed = asked("blame", "--data", f"{material.folder}/data/test.parquet", "--max-samples", "4")
    lines = [line.split()[0] for line in printed.splitlines() if "[" in line]
    assert lines == ["planner", "executor", "verifier"] and "mean outcome without a change" in printed
