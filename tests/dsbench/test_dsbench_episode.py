"""Whole episodes of the tiny workflow: the engine, a folder in a real sandbox, the rule judge as the coach."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.make_tools import make_tools
from recipe.dag.episode.rows import rows_of
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.edits import load_edited, split_edits
from recipe.dag.tools.sandbox_client import SandboxClient
from recipe.dag.types.record import Episode, Generation
from recipe.dag.workflow.schema import Workflow
from recipe.dsbench import tabular
from recipe.dsbench.judge import judge
from recipe.dsbench.score import score_submission, truth_of
from recipe.dsbench.teacher import AGENTS, FILES, FORM_OF, Teacher
from recipe.tiny.tokenizer import END_OF_TURN, build_tokenizer

ROOT = Path(__file__).parents[2]
TINY = ROOT / "workflows" / "workflow_dsbench_tiny.yaml"
COACH = "workflow.policies.coach"
LOCAL = [f"~{COACH}.api", f"{COACH}.model={{path: m}}", f"{COACH}.frozen=true"]


def flow_of(*edits: str) -> Workflow:
    return load_edited(TINY, split_edits([*LOCAL, *edits])[1])


@pytest.fixture(scope="module")
def flow() -> Workflow:
    return flow_of()


@pytest.fixture(scope="module")
def tokenizer(flow) -> Any:
    teacher = Teacher(flow, 0)
    lessons = [lesson for problem in teacher.problems(24, 8) for lesson in teacher.teach(problem)]
    return build_tokenizer(lessons, segments=teacher.segments)


@pytest.fixture(scope="module")
def tasks() -> list[tabular.Task]:
    return tabular.splits(3, 8, 16)[1]


class Speaker:
    """A policy's server that gives these texts in turn, or what a function makes of the prompt."""

    repeats = True

    def __init__(self, tokenizer: Any, texts: list[str] | Callable[[str], str]):
        self._tokenizer, self._texts = tokenizer, texts

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generation:
        prompt = self._tokenizer.decode(prompt_ids)
        text = self._texts(prompt) if callable(self._texts) else self._texts.pop(0)
        end = self._tokenizer.convert_tokens_to_ids(END_OF_TURN)
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), end]
        return Generation(ids, [-0.5] * len(ids), "stop")


@pytest.fixture
def play(local, tokenizer):
    """`play(flow, task, {agent: texts})`: an episode; the coach is the rule judge."""

    def run(flow: Workflow, task: tabular.Task, texts: dict[str, list[str]], coach=None) -> Episode:
        speakers: dict[str, Any] = {name: list(texts[name]) for name in AGENTS}
        speakers["coach"] = coach or (lambda prompt: judge([{"content": prompt}]))
        row = tabular.row(task, 0, "test", FILES)
        sample = {**row, "ground_truth": "", "extra_info": json.loads(json.dumps(row["extra_info"]))}

        async def main() -> Episode:
            client = SandboxClient(local.url, max_concurrent=2, token=local.token)
            ends = {name: PolicyEndpoint(Speaker(tokenizer, said), tokenizer, 32768) for name, said in speakers.items()}
            try:
                tools = make_tools(flow, client)
                return await EpisodeRunner(flow, ends, tools, seed=0, sandbox=client).run(sample, "u", 0, step=0)
            finally:
                await client.close()

        return asyncio.run(main())

    return run


def program(line: str) -> str:
    return f"```python\nfrom kit import {line.partition('(')[0]}\n{line}\n```"


def best(task: tabular.Task) -> dict[str, list[str]]:
    columns = ", ".join(f'"{column.name}"' for column in task.domain.relevant)
    model = "bowl" if task.domain.peaked else "linear"
    form = f'submit("{task.domain.thing}", "{task.domain.target}", "{FORM_OF[task.metric]}")'
    lines = {"engineer": f"prepare({columns})", "modeler": f'train("{model}")', "analyst": form}
    return {name: [program(line)] for name, line in lines.items()}


def of(episode: Episode, name: str):
    return [call for call in episode.calls if call.node == name]


def test_the_team_solves_a_task_and_every_action_earns_its_score_and_the_last_one_the_tasks(play, flow, tasks):
    task = tasks[0]
    episode = play(flow, task, best(task))
    assert episode.fault is None and episode.outcome == 1.0
    assert [call.node for call in episode.calls] == [f"{coach}{name}" for name in AGENTS for coach in ("", "coach_")]
    quality = episode.info["task/quality"]
    assert quality > 0.6 and episode.info["task/success"] == 1.0
    assert episode.info[f"task/quality/{task.domain.data_type}"] == quality
    for name in AGENTS:
        (call,), (verdict,) = of(episode, name), of(episode, f"coach_{name}")
        assert verdict.parsed["process"] >= 7.0
        of_task = {"task": pytest.approx(0.5 * quality)} if name == "analyst" else {}
        assert call.reward_parts == {**of_task, "scores": verdict.parsed["process"] / 10}
    assert [row.calls[0].agent for row in rows_of([episode]) if row.policy != "coach"] == list(AGENTS)


def test_the_score_is_that_of_the_submission_that_left_the_sandbox(play, flow, tasks):
    task = tasks[1]
    episode = play(flow, task, best(task))
    (analyst,) = of(episode, "analyst")
    truth = truth_of(task.answer.encode(), {"metric": task.metric})
    score = score_submission(analyst.env_info["fetched"]["submission.csv"].encode(), truth)
    assert (
        episode.info["task/quality"] == score.quality
        and score.fair_metrics
        and score.fair_metrics
        == {name.removeprefix("task/fair/"): value for name, value in episode.info.items() if "fair" in name}
    )


def test_prompts_are_those_that_the_teacher_shows(play, flow, tasks, tokenizer):
    second, seen = {("engineer", 1), ("modeler", 1)}, set()
    for number in range(60):  # the teacher errs at random, and repairs in a second round
        if number >= len(tasks) and second <= seen:
            break
        task = tasks[number % len(tasks)]
        lessons = Teacher(flow, number).teach(task)
        texts = {name: [lesson.answer for lesson in lessons if lesson.role == name] for name in AGENTS}
        episode = play(flow, task, texts)
        calls = [call for call in episode.calls if call.agent in AGENTS]
        assert [(call.node, call.round) for call in calls] == [(lesson.role, lesson.round) for lesson in lessons]
        for call, lesson in zip(calls, lessons, strict=True):
            rendered = tokenizer.apply_chat_template(list(lesson.messages), add_generation_prompt=True, tokenize=False)
            assert call.prompt_text == rendered
            assert call.text == lesson.answer
        seen |= {(lesson.role, lesson.round) for lesson in lessons}
    assert second <= seen


def test_the_answers_are_in_no_prompt(play, flow, tasks):
    task = next(task for task in tasks if not task.domain.labels)
    prompts: list[str] = []

    def coach(prompt):
        prompts.append(prompt)
        return judge([{"content": prompt}])

    episode = play(flow, task, best(task), coach)
    prompts += [call.prompt_text for call in episode.calls]
    answers = re.findall(r",([\d.]{5,})$", task.answer, re.MULTILINE)
    assert len(answers) > 30 and len(prompts) == 9
    assert not [answer for answer in answers for prompt in prompts if answer in prompt]


def test_a_failed_program_is_told_and_blamed_and_the_next_round_repairs_it(play, flow, tasks):
    task = tasks[0]
    texts = best(task)
    texts["engineer"].insert(0, program('prepare("nothing")'))
    episode = play(flow, task, texts)
    first, second = of(episode, "engineer")
    assert "no column nothing" in second.prompt_text
    assert "X_train.pkl, y_train.pkl, X_test.pkl still missing" in second.prompt_text
    assert [verdict.parsed["process"] for verdict in of(episode, "coach_engineer")][0] == 1.0
    assert first.reward_parts["scores"] == 0.1 and second.reward_parts["scores"] >= 0.7
    assert episode.outcome == 1.0


def test_who_is_blocked_by_others_is_told_and_not_blamed(play, flow, tasks):
    task = tasks[0]
    texts = {name: lines * 2 for name, lines in best(task).items()}
    texts["engineer"] = ["I would rather not.", program('prepare("nothing")')]
    episode = play(flow, task, texts)
    modeler, analyst = of(episode, "modeler")[0], of(episode, "analyst")[0]
    assert "no file's name contains x_train or y_train" in modeler.prompt_text
    assert "no file's name contains x_test or model" in analyst.prompt_text
    scores = {n: [c.parsed["process"] for c in of(episode, f"coach_{n}")] for n in AGENTS}
    assert scores == {"engineer": [1.0, 1.0], "modeler": [4.0, 4.0], "analyst": [4.0, 4.0]}
    assert episode.outcome == 0.0 and episode.info["task/failure"] == "no submission"
    assert episode.info["task/success"] == episode.info["task/quality"] == 0.0


def test_a_coach_that_says_nothing_leaves_only_its_actions_without_a_score(play, flow, tasks):
    task = tasks[0]

    def coach(prompt):
        return "Hm." if "# Agent\nmodeler" in prompt or "could not read" in prompt else judge([{"content": prompt}])

    episode = play(flow, task, best(task), coach)
    assert episode.fault is None
    assert [call.unscored for call in episode.calls if call.agent in AGENTS] == [False, True, False]
    assert [row.calls[0].agent for row in rows_of([episode]) if row.policy != "coach"] == ["engineer", "analyst"]


def test_weights_of_both_rewards_act(play, tasks):
    task = tasks[0]
    alone = flow_of("workflow.nodes.scores.args.process=0", "workflow.nodes.task.args.weight=2")
    episode = play(alone, task, best(task))
    quality = episode.info["task/quality"]
    assert [c.reward for c in episode.calls if c.agent in AGENTS] == pytest.approx([0.0, 0.0, 2 * quality])
