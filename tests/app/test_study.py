"""`verl-dag study`: the file, the runs' commands, what is run again, and a stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipe.dag.app import cli
from recipe.dag.app.study import MANY_STEPS, plans, read_study, run_study, voted
from recipe.dag.core.errors import UserError
from recipe.dag.core.problem import WorkflowError
from recipe.dag.report.study import read_result
from tests.sandbox.processes import alive, until

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """\
import json, os, pathlib, sys
settings = dict(word.split("=", 1) for word in sys.argv[2:])
folder = pathlib.Path(settings["output_dir"])
print("played by", sys.argv[1], os.environ["SEED"], flush=True)
with (folder.parent.parent / "started").open("a") as file:
    print(folder.parent.name, settings["seed"], file=file)
if (folder.parent.parent / f"break_{folder.parent.name}").exists():
    sys.exit("no such tool")
tokens = int(settings["trainer.total_training_tokens"])
step = {"tokens/sampled": tokens, "episode/accuracy": 0.5, "val/accuracy": 0.5}
lines = [{"step": 0, "val/accuracy": 0.0}, {"step": 1} | step]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
answers = [("7", True), ("8", False)]
answers = [*answers, answers[0 if sys.argv[1] == "good" else 1]]
items = [
    {"prompt": "3 + 4", "sample_index": i, "metrics": {"is_correct": right},
     "trajectory": [{"agent_output": f"so \\\\boxed{{{answer}}}"}]}
    for i, (answer, right) in enumerate(answers)
]
(folder / "results.json").write_text(json.dumps(items))
"""
STUDY = """\
title: Which?
tokens: 100
seeds: [0, 4]
settings: {validation.n: 3}
arms:
  bad: {script: play.py bad}
  good: {script: play.py good}
  vote: {majority: 3, of: good}
"""


@pytest.fixture
def study(tmp_path) -> Path:
    (tmp_path / "play.py").write_text(SCRIPT)
    (tmp_path / "study.yaml").write_text(STUDY)
    return tmp_path / "study.yaml"


def started(output: Path) -> list[str]:
    return (output / "started").read_text().splitlines()


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("script: play.py bad", "scrpt: play.py bad", "6:9: arms.bad.scrpt: unknown key; did you mean `script`?"),
        ("play.py bad", "plya.py bad", "6:17: arms.bad.script: no such file `plya.py`"),
        ("script: play.py bad", "settings: {a: 1}", "6:8: arms.bad: an arm has either `script`, or `workflow`"),
        ("play.py bad", "play.py bad, workflow: play.py", "6:8: arms.bad: an arm has either `script`, or `workflow`"),
        ("play.py bad", "play.py bad, config: play.py", "6:38: arms.bad.config: has no effect beside `script`"),
        ("of: good", "of: goo", "8:27: arms.vote.of: no arm `goo` that is trained; did you mean `good`?"),
        (", of: good", "", "8:9: arms.vote: `majority` and `of` belong together"),
        ("of: good", "of: good, script: play.py", "8:41: arms.vote.script: a vote is not trained; set this in `good`"),
        ("tokens: 100", "tokens: many", "2:9: tokens: expected a whole number, got 'many'"),
        ("[0, 4]", "[]", "3:8: seeds:"),
        ("[0, 4]", "[4, 4]", "3:8: seeds: a seed occurs twice"),
    ],
)
def test_a_mistake_in_the_file_has_its_line_and_column(study, old, new, line):
    assert STUDY.count(old) == 1
    study.write_text(STUDY.replace(old, new))
    with pytest.raises(WorkflowError) as caught:
        read_study(study)
    assert str(caught.value).startswith(f"{study}:{line}")


def test_a_run_is_the_entry_point_or_a_script_with_the_settings_of_study_and_arm(study, tmp_path):
    (tmp_path / "flow.yaml").write_text("")
    study.write_text("""\
title: Which?
tokens: 100
seeds: [4]
settings: {trainer.test_freq: 5, data.val_files: "data/{seed}.parquet"}
arms:
  script: {script: play.py good, settings: {trainer.test_freq: 2}}
  file:
    workflow: flow.yaml
    config: flow.yaml
    algorithm: {estimator: grpo, group_by: [uid]}
    settings: {~workflow.nodes.team.args: null, workflow.policies.main.lr: 1.0e-3}
""")
    script, file = plans(read_study(study), study, tmp_path / "out")
    common = ["trainer.experiment_name=script_seed4", f"trainer.total_training_steps={MANY_STEPS}"]
    assert script.program == [sys.executable, str(tmp_path / "play.py"), "good"]
    assert script.settings[:2] == ["seed=4", f"output_dir={tmp_path}/out/script/seed4"]
    assert script.settings[2:] == [
        *common,
        "trainer.total_training_tokens=100",
        "trainer.test_freq=2",
        "data.val_files=data/4.parquet",
    ]
    folder = ["--config-path", str(tmp_path), "--config-name", "flow"]
    assert file.program == [sys.executable, "-m", "recipe.dag.main", *folder]
    assert file.settings[0] == f"workflow={tmp_path}/flow.yaml" and file.settings[-3:] == [
        'workflow.algorithm={"estimator": "grpo", "group_by": ["uid"]}',
        "~workflow.nodes.team.args",
        "workflow.policies.main.lr=0.001",
    ]


def test_the_command_trains_compares_and_does_not_repeat_what_is_finished(study, tmp_path):
    out = tmp_path / "out"
    done = CliRunner().invoke(cli.app, ["study", str(study), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert started(out) == ["bad 0", "bad 4", "good 0", "good 4"]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (out / "table.md").read_text().splitlines()]
    by_arm = {row[0]: dict(zip(table[0], row, strict=True)) for row in table[2:]}
    assert [by_arm[arm]["end"] for arm in ("bad", "good", "vote")] == ["0.333", "0.667", "1.000"]
    assert by_arm["vote"]["minus bad"] == "+0.667" and by_arm["good"]["training tokens"] == "100"
    manifest = json.loads((out / "manifest.json").read_text())
    assert [(run["arm"], run["seed"]) for run in manifest["runs"]] == [("bad", 0), ("bad", 4), ("good", 0), ("good", 4)]
    assert manifest["runs"][0]["folder"] == f"{out}/bad/seed0" and manifest["versions"]["torch"]
    assert "played by bad 4" in (out / "bad" / "seed4" / "study.log").read_text()
    run_study(study, out)
    assert len(started(out)) == 4
    study.write_text(STUDY.replace("tokens: 100", "tokens: 200"))
    with pytest.raises(UserError, match="bad/seed0: this run and 3 more are not finished"):
        run_study(study, out, only_report=True)
    run_study(study, out, jobs=3)
    assert len(started(out)) == 8


def test_a_run_that_fails_shows_the_end_of_its_log_and_is_run_again_alone(study, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "break_bad").touch()
    with pytest.raises(UserError, match=r"(?s)^2 of 4 runs failed. bad, seed 0: .* 1; .*\nno such tool"):
        run_study(study, out)
    assert started(out) == ["bad 0", "bad 4", "good 0", "good 4"], "others go on"
    (out / "break_bad").unlink()
    run_study(study, out)
    assert started(out)[4:] == ["bad 0", "bad 4"]


def test_a_run_with_fewer_tokens_than_the_study_asks_for_is_not_compared(study, tmp_path):
    (tmp_path / "play.py").write_text(SCRIPT.replace('"tokens/sampled": tokens', '"tokens/sampled": tokens - 1'))
    with pytest.raises(UserError, match="bad/seed0: ended after 99 of 100 sampled tokens"):
        run_study(study, tmp_path / "out")


def test_a_vote_is_right_if_its_most_frequent_answer_is(study, tmp_path):
    run_study(study, tmp_path / "out")
    folder = tmp_path / "out" / "good" / "seed0"
    plain = read_result(folder, ["val/accuracy"])
    assert (list(plain.scores.values()), list(voted(plain, folder, 3).scores.values())) == ([2 / 3], [1.0])
    assert list(voted(plain, folder, 2).scores.values()) == [1.0], "the earliest after a tie"
    with pytest.raises(UserError, match=r"a vote of 4 needs as many answers; set `settings: \{validation.n: 4\}`"):
        voted(plain, folder, 4)


def test_sigterm_ends_the_runs_and_all_that_they_started(study, tmp_path):
    (tmp_path / "slow.sh").write_text("sleep 600 &\necho $! > $OUT/child\nwait\n")
    study.write_text(STUDY.replace("play.py bad", "slow.sh").replace("play.py good", "slow.sh"))
    command = [sys.executable, "-m", "recipe.dag.cli", "study", str(study), "-o", str(tmp_path / "out")]
    process = subprocess.Popen(command, env={**os.environ, "OUT": str(tmp_path)}, cwd=ROOT, stderr=subprocess.PIPE)
    child = tmp_path / "child"
    deadline = time.monotonic() + 600
    while not (child.exists() and child.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 143 and b"interrupted; the same command goes on" in stderr
    assert until(lambda: not alive([int(child.read_text())]))
