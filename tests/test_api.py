"""`import verl_dag`: its names, its verbs, and that what should be quick loads nothing heavy."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

import recipe.dag as dag
import verl_dag
from recipe.dag.app import verbs
from recipe.dag.core.problem import WorkflowError
from recipe.dag.report.journal import Journal
from tests.remote.openai_server import OpenAIServer

ROOT = Path(__file__).parents[1]
RETOOL_MA = ROOT / "workflows" / "workflow_retool_ma.yaml"
GRPO = ROOT / "workflows" / "workflow_grpo.yaml"
SAMPLE = {"prompt": "What is 3 + 4?", "ground_truth": "7"}


def test_every_name_is_there_and_is_what_its_module_has():
    assert {name: getattr(dag, name).__name__ for name in dag.__all__ if name != "Message"} == {
        name: name for name in dag.__all__ if name != "Message"
    }
    from recipe.dag.types.context import Context, Message

    assert dag.Context is Context and dag.Message is Message


def test_the_public_package_has_these_names_and_the_verbs():
    assert set(verl_dag.__all__) == {*dag.__all__, "load", "play", "train", "evaluate", "read_run"}
    assert all(getattr(verl_dag, name) is getattr(dag, name) for name in dag.__all__)
    assert verl_dag.__version__ == dag.__version__ and verl_dag.load is verbs.load


@pytest.mark.parametrize("package", [dag, verl_dag], ids=lambda package: package.__name__)
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"{package.__name__}' has no attribute 'Agnet'"):
        package.Agnet  # noqa: B018


PROGRAM = f"""
import sys
from recipe.dag.app import cli

def check(what, heavy):
    assert not heavy & set(sys.modules), f"{{what}} loads {{heavy & set(sys.modules)}}"

heavy, workflow = {{"torch", "ray", "verl", "transformers", "pandas"}}, sys.argv[1]
for command in ("validate", "plan"):
    sys.argv = ["verl-dag", command, workflow]
    try:
        cli.main()
    except SystemExit as ended:
        assert not ended.code
    slow = {{"hydra", "aiohttp", "jinja2", "recipe.dag.app.launch", "recipe.dag.coach"}}
    slow = slow if command == "validate" else set()
    check(command, heavy | slow | {{"numpy"}})
from recipe.dag import {", ".join(dag.__all__)}
check("the interface", heavy)
import verl_dag
played = verl_dag.play(verl_dag.load("workflows/workflow_grpo.yaml"), "What is 2 + 3?", lambda messages: "5")
check("play", {{"torch", "ray", "verl", "transformers"}})
{"; ".join(f"import recipe.dag.report.{path.stem}" for path in (ROOT / "recipe/dag/report").glob("[a-z]*.py"))}
check("a report", {{"torch", "ray", "verl"}})
"""


def test_checks_imports_and_reports_load_nothing_heavy():
    command = [sys.executable, "-c", PROGRAM, "workflows/workflow_retool_ma.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def of_the_team(messages: list[dict[str, str]]) -> str:
    """What a planner, an executor or a verifier would answer."""
    assert SAMPLE["prompt"] in messages[-1]["content"]
    role = messages[0]["content"]
    if "plans into" in role:
        return "```python\nprint(3 + 4)\n```"
    return "FINAL ANSWER: \\boxed{7}" if "check the work" in role else "Print 3 + 4."


def test_changes_of_a_workflow_are_overrides_of_its_keys():
    workflow = verl_dag.load(
        RETOOL_MA, algorithm={"group_by": ["uid"]}, agents={"planner": {"sampling": {"top_p": 0.5}}}
    )
    assert workflow.algorithm.group_by == ("uid",) and workflow.agents[0].sampling.top_p == 0.5
    with pytest.raises(verl_dag.UserError, match="workflow.agents.planer.policy=.*no agent `planer`"):
        verl_dag.load(RETOOL_MA, agents={"planer": {"policy": "main"}})


def test_the_mistakes_of_a_file_are_all_in_the_error(tmp_path):
    (tmp_path / "w.yaml").write_text("agents: [{name: a, policy: p, polcy: q}]\nnodes: []\n")
    with pytest.raises(WorkflowError, match="polcy.*\n.*w.yaml"):
        verl_dag.load(tmp_path / "w.yaml")


def test_a_function_plays_a_team_whose_code_runs():
    episode = verl_dag.play(RETOOL_MA, SAMPLE, of_the_team)
    assert [call.agent for call in episode.calls] == ["planner", "executor", "verifier"]
    assert [result.stdout.strip() for call in episode.calls for result in call.tool_results] == ["7"]
    assert episode.outcome == 1.0 and all(call.reward is not None for call in episode.calls)


def solver(messages: list[dict[str, str]]) -> str:
    return "\\boxed{7}"


@pytest.mark.parametrize("truth, outcome", [("7", 1.0), ("8", 0.0)])
def test_an_episode_is_graded(truth, outcome):
    episode = verl_dag.play(GRPO, SAMPLE | {"ground_truth": truth}, solver)
    assert episode.outcome == outcome


def test_a_function_is_asked_in_messages_and_may_be_async():
    asked = []

    async def record(messages):
        asked.append(messages)
        return "7"

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4?\n"}]
    episode = verl_dag.play(ROOT / "examples" / "talk" / "workflow_talk.yaml", {"prompt": messages}, record)
    assert asked[0] == messages and len(asked) == len(episode.calls) and episode.calls[0].text == "7"


def test_a_notebook_s_running_loop_is_no_obstacle():
    async def cell():
        return verl_dag.play(GRPO, SAMPLE, solver)

    assert asyncio.run(cell()).outcome == 1.0


@pytest.mark.parametrize("said, message", [(7, "returned int 7, not a text"), (None, "NoneType None")])
def test_a_function_that_returns_no_text_is_told_so(said, message):
    with pytest.raises(verl_dag.UserError, match=message):
        verl_dag.play(GRPO, SAMPLE, lambda messages: said)


def test_an_error_of_the_function_names_its_line():
    def broken(messages):
        raise ValueError("no idea")

    with pytest.raises(verl_dag.UserError, match=r"test_api.py:\d+: hook fault in model: ValueError: no idea"):
        verl_dag.play(GRPO, SAMPLE, broken)


def test_a_sample_without_a_prompt_is_refused():
    with pytest.raises(verl_dag.UserError, match="column prompt must be a list"):
        verl_dag.play(GRPO, {"problem": "3 + 4?"}, solver)


def test_a_server_plays():
    with OpenAIServer(lambda body: "\\boxed{7}") as server:
        episode = verl_dag.play(GRPO, SAMPLE, server.url, served_model="m")
    assert episode.outcome == 1.0 and episode.usage["main"]["requests"] == 1


def test_settings_are_nested_or_dotted_and_of_any_type(monkeypatch, tmp_path):
    typed = []
    monkeypatch.setattr("recipe.dag.app.launch.launch", lambda *arguments: typed.append(arguments) or tmp_path)
    Journal(tmp_path).metrics(1, {"val/accuracy": 0.5})
    options = {"trainer": {"logger": ["console"], "val_only": False}, "data.train_files": Path("it's.parquet")}
    run = verl_dag.train(
        "w.yaml", config=Path("config/tiny_cpu.yaml"), workflow={"algorithm": {"gamma": 0.9}}, **options
    )
    assert typed == [
        (
            "tiny_cpu",
            [
                "workflow='w.yaml'",
                "workflow.algorithm.gamma=0.9",
                'trainer.logger=["console"]',
                "trainer.val_only=false",
                "data.train_files='it\\'s.parquet'",
            ],
            Path("config"),
        )
    ]
    assert run.metrics == [{"step": 1, "val/accuracy": 0.5}]


def test_train_refuses_what_the_command_refuses():
    with pytest.raises(verl_dag.UserError, match="trainer.total_steps"):
        verl_dag.train(RETOOL_MA, trainer={"total_steps": 3})


def test_a_server_is_evaluated_and_its_run_is_read(tmp_path):
    problem = {"prompt": "3 + 4?", "answer": "7"}
    (tmp_path / "data.jsonl").write_text(json.dumps(problem) + "\n")
    with OpenAIServer(lambda body: "\\boxed{7}") as server:
        run = verl_dag.evaluate(
            GRPO, tmp_path / "data.jsonl", server.url, served_model="m", output_dir=tmp_path / "out"
        )
    assert run.folder == tmp_path / "out" and run.summary is not None and run.summary["final_accuracy"] == 1.0
    (episode,) = run.episodes(split="validation")
    assert isinstance(episode, verl_dag.Episode) and episode.calls[0].text == "\\boxed{7}"
    assert run.episodes(split="train") == [] and run.metrics == []


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(verl_dag.UserError, match="has none of metrics.jsonl"):
        verl_dag.read_run(tmp_path)


def test_an_episode_in_a_notebook_is_escaped_and_cut():
    attack = "<script>alert(1)</script>\x1b[2J"
    episode = verl_dag.play(GRPO, f"{attack} {'long ' * 1000}", lambda messages: attack)
    html = episode._repr_html_()
    assert "<script" not in html and "\x1b" not in html and html.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 2
    assert "more characters" in html and len(html) < 5000
