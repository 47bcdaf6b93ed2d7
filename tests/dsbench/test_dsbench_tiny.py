"""The laptop run: what its teacher shows, that it fits the configured lengths, and what its script runs."""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.settings.compose import compose_config
from recipe.dsbench.teacher import AGENTS, DISTRACTED, FORM_OF, SLIP, Teacher
from recipe.tiny.careless import RIGHT_READING
from tests.tiny.lengths import check_lengths

ROOT = Path(__file__).parents[2]
TINY = ROOT / "workflows" / "workflow_dsbench_tiny.yaml"


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher(load_workflow(TINY), 0)


@pytest.fixture(scope="module")
def lessons(teacher):
    return [(problem, teacher.teach(problem)) for problem in teacher.problems(256, 64)]


def test_each_agent_acts_until_its_files_are_there_at_most_twice(lessons):
    for _, lesson in lessons:
        roles = [demonstration.role for demonstration in lesson]
        assert list(dict.fromkeys(roles)) == list(AGENTS) and all(roles.count(name) <= 2 for name in AGENTS)
    assert any(len(lesson) > 3 for _, lesson in lessons)


def test_the_teacher_is_mistaken_about_the_same_tasks_in_most_lessons(lessons):
    right = defaultdict(list)
    for task, lesson in lessons:
        first = {d.role: d.answer for d in reversed(lesson)}
        columns = [f'"{column.name}"' in first["engineer"] for column in task.domain.relevant]
        right["engineer", task.domain.thing in DISTRACTED].append(all(columns))
        model = f'"{"bowl" if task.domain.peaked else "linear"}"'
        right["modeler", task.domain.peaked].append(model in first["modeler"])
        right["analyst", task.metric == "roc_auc"].append(f'"{FORM_OF[task.metric]}"' in first["analyst"])
    for (agent, mistaken), choices in right.items():
        careful = (1 - SLIP) ** 3 if agent == "engineer" else 1 - SLIP
        rate = RIGHT_READING if mistaken else careful
        assert sum(choices) / len(choices) == pytest.approx(rate, abs=0.12), agent


def test_the_same_seed_teaches_the_same(teacher, lessons):
    again = Teacher(load_workflow(TINY), 0)
    assert [again.teach(problem) for problem, _ in lessons[:8]] == [lesson for _, lesson in lessons[:8]]


def test_dialogues_fit_the_configured_lengths(teacher, lessons):
    config = compose_config("tiny_cpu", ["workflow=w", "data.train_files=t"], ROOT / "recipe" / "dsbench" / "config")
    prompt, answer = config.data.max_prompt_length // 2, config.data.max_response_length // 2  # a model may write more
    check_lengths([d for _, lesson in lessons for d in lesson], prompt, answer, segments=teacher.segments)


def test_another_workflow_is_refused():
    with pytest.raises(UserError, match="needs the rollout nodes engineer, modeler, analyst, which share an env"):
        Teacher(load_workflow(ROOT / "workflows" / "workflow_retool_ma.yaml"), 0)


PYTHON = """#!/bin/bash
echo "$@" >> "$LOG"
case "$*" in *" serve "*) echo http://127.0.0.1:9/v1; exec sleep 60 ;; esac
case "$*" in *" --check "*) ;; *recipe.dag.main*) echo "$COACH_URL $COACH_MODEL $MODEL_PATH" >> "$LOG" ;; esac
"""


def test_the_script_serves_the_judge_while_it_trains(tmp_path):
    clone, tools, log = tmp_path / "clone", tmp_path / "tools", tmp_path / "log"
    tools.mkdir()
    clone.mkdir()
    for name in ("recipe", "preprocess", "workflows"):
        (clone / name).symlink_to(ROOT / name)
    (tools / "python").write_text(PYTHON)
    (tools / "python").chmod(0o755)
    scripts = clone / "scripts"
    scripts.mkdir()
    # without the part that installs an environment
    script = (ROOT / "recipe" / "dsbench" / "run_tiny_cpu.sh").read_text()
    script = script.replace('"$(dirname "${BASH_SOURCE[0]}")/../.."', str(clone))
    (scripts / "run.sh").write_text(script.replace("recipe/dag/scripts/tiny_cpu.sh", "scripts/tiny.sh"))
    tiny = (ROOT / "recipe" / "dag" / "scripts" / "tiny_cpu.sh").read_text()
    tiny = tiny.replace('"$(dirname "${BASH_SOURCE[0]}")', '"recipe/dag/scripts')
    (scripts / "tiny.sh").write_text(tiny.replace('. "recipe/dag/scripts/cpu_env.sh"\n', ""))
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "LOG": str(log), "COACH_WEIGHT": "0.5"}
    done = subprocess.run(["bash", str(scripts / "run.sh"), "3", "a=b"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check, data, model, coach, train, facts = log.read_text().splitlines()
    assert "recipe.dag.main --check" in check and check.endswith("workflow.nodes.scores.args.process=0.5 a=b")
    assert "recipe/dsbench/tabular.py --local_dir outputs/dsbench_tiny_seed3/data" in data and "--seed 3" in data
    assert "recipe.tiny.build --output outputs/dsbench_tiny_seed3/model --seed 3" in model
    assert "serve --script recipe/dsbench/judge.py:judge --port 0" in coach
    assert "trainer.experiment_name=dsbench_tiny_seed3_coach0.5 seed=3" in train
    assert train.endswith("workflow.nodes.scores.args.process=0.5 a=b")
    assert facts == "http://127.0.0.1:9/v1 judge outputs/dsbench_tiny_seed3/model"
    left = subprocess.run(["pgrep", "-f", f"{tools}/python"], capture_output=True, text=True)
    assert left.stdout == "", "the server ends with the script"
