"""The laptop run: its teacher, what its script starts and stops; and, slowly, the run itself."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.loading.edits import load_edited, split_edits
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.reward.answer import extract_answer
from recipe.dag.settings.compose import compose_config
from recipe.mathchat import teacher
from recipe.mathchat.agents import programs
from recipe.mathchat.judge import judge, last_formula
from recipe.mathchat.teacher import Teacher, run_program, transcripts
from recipe.tiny.careless import MISREADINGS, RIGHT_READING, right_formula
from tests.laptop import Laptop, option

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "workflows" / "workflow_mathchat.yaml"
README = ROOT / "recipe" / "mathchat" / "README.md"
SCRIPT = "recipe/mathchat/run_tiny_cpu.sh"


def lessons_of(count: int = 600, **options: bool):
    tutor = Teacher(load_workflow(WORKFLOW), 0, **options)
    return [(problem, tutor.teach(problem)) for problem in tutor.problems(count, 64)]


def test_the_teacher_is_right_in_form_and_wrong_at_its_rates():
    counts: Counter[str] = Counter()
    for problem, (solve, first, second, verify) in lessons_of():
        assert [lesson.role for lesson in (solve, first, second, verify)] == ["solve", "code", "code", "verify"]
        formula = solve.answer.removeprefix("Compute ")
        (code,) = programs(first.answer)
        counts["formula"] += formula == right_formula(problem)
        counts["understood"] += problem.family not in MISREADINGS
        counts["broken"] += last_formula(code) is None
        repaired = programs(second.answer)
        assert bool(repaired) == (last_formula(code) is None)
        counts["other"] += last_formula(repaired[0] if repaired else code) != last_formula(formula)
        read = second.messages[-1]["content"]
        assert ("SyntaxError" in read) == bool(repaired) and len(second.messages) == 4
        answer = extract_answer(verify.answer)
        assert answer is not None and answer.lstrip("-").isdigit()
        counts["answer"] += answer == str(problem.answer)
    rates = {name: count / 600 for name, count in counts.items()}
    right = rates["understood"] + (1 - rates["understood"]) * RIGHT_READING
    assert rates["formula"] == pytest.approx(right * (1 - teacher.SLIP), abs=0.05)
    assert rates["broken"] == pytest.approx(teacher.BROKEN_CODE, abs=0.05)
    assert rates["other"] == pytest.approx(teacher.OTHER_CODE, abs=0.06)
    assert 0.1 < rates["answer"] < 0.4


def test_the_prompts_fit_the_configured_lengths():
    from recipe.tiny.build import encode
    from recipe.tiny.tokenizer import build_tokenizer

    lessons = [lesson for _, four in lessons_of(300) for lesson in four]
    tokenizer = build_tokenizer(lessons)
    data = compose_config("tiny_cpu", ["workflow=w.yaml"], ROOT / "recipe" / "mathchat" / "config").data
    for lesson in lessons:
        example = encode(tokenizer, lesson)
        answer = sum(example.in_answer)
        assert answer <= data.max_response_length and len(example.ids) - answer <= data.max_prompt_length


def test_in_transcripts_the_coaches_give_the_judges_verdicts():
    ((problem, lessons),) = lessons_of(1, coaches=True)
    dialogues = list(transcripts(lessons))
    assert len(dialogues) == 7 and [d[-1]["role"] for d in dialogues] == ["assistant"] * 7
    verdicts = [d for d in dialogues if "You coach three agents" in d[0]["content"]]
    assert len(verdicts) == 4 and all(judge(d[:-1]) == d[-1]["content"] for d in verdicts)
    assert all(problem.text in dialogue[-2]["content"] + dialogue[1]["content"] for dialogue in dialogues)
    truths = [d[0]["content"].partition("# Ground truth\n")[2].partition("\n")[0] for d in verdicts]
    assert truths == ["N/A", "N/A", "N/A", str(problem.answer)]
    printed = verdicts[1][0]["content"].partition("# What its programs printed\n")[2].partition("\n\n")[0]
    assert printed and "N/A" not in printed


def test_fine_tuning_reads_the_transcripts_whole(tmp_path):
    from recipe.dag.train.sft.compose import compose_sft
    from recipe.dag.train.sft.data import TranscriptDataset
    from recipe.tiny.tokenizer import build_tokenizer

    file = tmp_path / "sft.parquet"
    teacher.main(["--output", str(file), "--size", "8", "--test_size", "8"])
    overrides = [f"data.train_files={file}", "model.path=m", "output_dir=o"]
    config = compose_sft(overrides, name="sft_smollm2", folder=ROOT / "recipe" / "mathchat" / "config").data
    lessons = [lesson for _, several in lessons_of(40, coaches=True) for lesson in several]
    dataset = TranscriptDataset(str(file), build_tokenizer(lessons), config)
    assert dataset.counts == {"used": 8 * 7}


@pytest.mark.parametrize(("code", "ok", "text"), [("print(6*7)", True, "42\n"), ("print((6*7)", False, "never closed")])
def test_the_teachers_programs_print_what_the_sandbox_would(code, ok, text):

    result = asyncio.run(run_program("code_interpreter", code=code))
    assert result.ok == ok and text in result.text


def test_a_workflow_without_its_nodes_is_refused():
    with pytest.raises(UserError, match="this teacher needs the rollout nodes solve, code, verify"):
        Teacher(load_workflow(ROOT / "workflows" / "workflow_retool.yaml"), 0)
    with pytest.raises(UserError, match="a loop of 2 rounds or more"):
        once = ["workflow.loops.act.max_rounds=1", "~workflow.loops.act.until", "workflow.agents.coder.memory=none"]
        Teacher(load_edited(WORKFLOW, split_edits(once)[1]), 0)


def test_the_workflow_says_what_the_readme_says():
    workflow = load_workflow(WORKFLOW)
    assert workflow.trained_policies() == ("solver", "coder", "verifier")
    algorithm = workflow.algorithm
    assert (algorithm.estimator, algorithm.kl_reward_coef, algorithm.clip_ratio_high) == ("reinforce_pp", 0.01, 0.2)
    assert workflow.loops["act"].max_rounds == 2 and set(workflow.loops["act"].nodes) == {"code", "coach_code"}
    truths = [node.prompt_options.get("truth_for") for node in workflow.rollout_nodes]
    assert [truth for truth in truths if truth] == [["verifier"]]


SETTINGS = sorted(set(re.findall(r"`(workflow\.[\w.*]+=[^`]+)`", README.read_text())))


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_settings_that_the_readme_names_load(setting):
    assert load_edited(WORKFLOW, split_edits([setting])[1]).edited


def test_the_readme_names_settings():
    assert len(SETTINGS) >= 6


FAKE_PYTHON = """#!/bin/bash
printf '%s\\t' "COACH_URL=${COACH_URL:-}" "$@" >> "$LOG"; echo >> "$LOG"
case "$*" in *"recipe.dag.cli serve"*)
  if [ -n "${BROKEN_SERVER:-}" ]; then echo "error: no script" >&2; exit 2; fi
  echo $$ >> "$PIDS"; sleep 0.2; echo http://127.0.0.1:1234/v1; exec sleep 60 ;;
*"recipe.dag.main --check"*) ;;
*recipe.dag.main*)
  if [ -n "${STARTED:-}" ]; then trap 'kill %1; exit 5' TERM; sleep 60 & touch "$STARTED"; wait; fi
  exit "${CODE:-0}" ;;
esac
"""


@pytest.fixture
def laptop(tmp_path) -> Laptop:
    return Laptop(tmp_path, SCRIPT, {"python": FAKE_PYTHON})


def settings(call: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in call[1:] if "=" in word)


@pytest.mark.parametrize(
    ("arguments", "env", "seed", "weight", "overrides"),
    [
        ((), {}, "0", "1", []),
        (("2", "a.b=1"), {"COACH_WEIGHT": "0"}, "2", "0", ["a.b=1"]),
        (("a.b=1", "c=2"), {"SEED": "3", "COACH_WEIGHT": "0.5"}, "3", "0.5", ["a.b=1", "c=2"]),
        (("2", "c=2"), {"WEIGHTS": "adapters"}, "2", "1", ["c=2"]),
    ],
)
def test_the_stages_share_a_seed_and_runs_of_a_seed_share_model_and_data(
    laptop, arguments, env, seed, weight, overrides
):
    base = "mathchat_tiny" + "_lora" * ("WEIGHTS" in env) + (f"_seed{seed}" if seed != "0" else "")
    name = base + (f"_coach{weight}" if weight != "1" else "")
    code, (check, data, model, serve, train), _ = laptop.run(*arguments, **env)
    assert code == 0
    assert (
        option(data, "--local_dir") == f"outputs/{base}/data" and option(model, "--output") == f"outputs/{base}/model"
    )
    assert "--check" in check and check[len(check) - len(overrides) :] == overrides
    assert option(data, "--seed") == option(model, "--seed") == seed
    assert option(serve, "--script") == "recipe/mathchat/judge.py:judge" and serve[0] == "COACH_URL="
    assert train[0] == "COACH_URL=http://127.0.0.1:1234/v1" and train[len(train) - len(overrides) :] == overrides
    given = settings(train)
    assert (given["trainer.experiment_name"], given["seed"]) == (name, seed)
    assert given["data.val_files"] == f"outputs/{base}/data/test.parquet"
    assert given["workflow.nodes.scores.args.process"] == weight
    edits = [word for word in train if word.lstrip("+~").startswith("workflow.")]
    workflow = load_edited(WORKFLOW, split_edits(edits)[1])
    assert ("base" in workflow.policies) == ("WEIGHTS" in env)
    coach = workflow.policies["coach"]
    assert coach.api is not None and coach.api.base_url == "${oc.env:COACH_URL}" and coach.frozen
    assert laptop.servers_left() == []


def test_a_coach_of_ones_own_is_taken_and_not_stopped(laptop):
    code, calls, _ = laptop.run(COACH_URL="http://host:1/v1", COACH_MODEL="mine")
    assert code == 0 and not any("serve" in call for call in calls)
    assert calls[-1][0] == "COACH_URL=http://host:1/v1"


def test_a_training_that_fails_ends_the_script_and_the_coach(laptop):
    code, _, _ = laptop.run(CODE="3")
    assert code == 3 and laptop.servers_left() == []


def test_a_signal_to_the_script_ends_the_training_before_the_coach(laptop, tmp_path):
    started = tmp_path / "started"
    with subprocess.Popen(**laptop.command(STARTED=str(started))) as script:
        while not started.exists():
            assert script.poll() is None
            time.sleep(0.05)
        assert laptop.servers_left()
        script.terminate()
        assert script.wait(timeout=300) == 5 and laptop.servers_left() == []


def test_a_coach_that_does_not_start_ends_the_script_with_its_reason(laptop):
    code, calls, stderr = laptop.run(BROKEN_SERVER="1")
    assert code == 1 and stderr.endswith("error: no script\n") and "serve" in calls[-1]


def test_a_weight_that_is_no_number_is_refused(laptop):
    code, calls, stderr = laptop.run(COACH_WEIGHT="none")
    assert (code, calls) == (2, []) and "COACH_WEIGHT=none" in stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not list(Path(sys.prefix).glob(".verl-dag-*")), reason="needs the scripts' environment")
def test_the_run_trains_with_its_coach_and_resumes(zygote, joined_ray):
    """Few steps: the figures mean nothing, but every stage is real."""
    seed = "987654"
    out = ROOT / "outputs" / f"mathchat_tiny_seed{seed}_base40"
    shutil.rmtree(out, ignore_errors=True)
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "VERL_DAG_VENV": str(zygote.folder),
        **joined_ray,
        "BASE_STEPS": "40",
    }
    sizes = ["data.train_batch_size=8", "data.val_max_samples=8", "trainer.save_freq=1", "trainer.test_freq=1"]
    try:
        for steps in (1, 2):
            command = ["bash", str(ROOT / SCRIPT), seed, *sizes, f"trainer.total_training_steps={steps}"]
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        lines = {line["step"]: line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())}
        assert sorted(lines) == [0, 1, 2]
        for step in (1, 2):
            assert lines[step]["coach/solver/count"] == 16 and lines[step]["coach/solver/failed"] == 0
            assert 0 <= lines[step]["val/accuracy"] <= 1 and lines[step]["info/coach_agrees"] == 1.0
    finally:
        shutil.rmtree(out, ignore_errors=True)
