"""What a teacher's dialogue shows is what the engine records when a model gives the same answers, token by token."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.make_tools import make_tools
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.types.record import Generation
from recipe.tiny.arithmetic import Problem
from recipe.tiny.build import encode
from recipe.tiny.dialogue import Demonstration, Dialogue, Script
from recipe.tiny.tokenizer import build_tokenizer

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
PROBLEM = Problem("Which number?", "42", 42, "test", ())
FENCED = """
dag_id: fenced
agents:
  - name: solver
    policy: main
    tools: [{path: tools.py:Run}]
    memory: chat
    tool_loop: {format: fenced, max_generations: 3, max_response_chars: 30}
policies: {main: {model: {path: m}, frozen: true}}
episode: {max_turns: 2}
nodes: [{id: solve, agent: solver}]
"""
SHARED = """
dag_id: shared
agents:
  - &one {name: one, policy: main, memory: shared}
  - {<<: *one, name: two}
policies: {main: {model: {path: m}, frozen: true}}
episode: {max_turns: 2}
nodes:
  - {id: begin, agent: one}
  - {id: left, agent: one, after: begin}
  - {id: right, agent: two, after: begin}
  - {id: end, agent: two, after: [left, right]}
"""
RUN = """
class Run:
    name = "run"
    schema = {"type": "function", "function": {"name": "run"}}

    async def execute(self, arguments, state):
        state["runs"] = state.get("runs", 0) + 1
        return f"run {state['runs']} of a program of {len(arguments['code'])} characters"

    async def close(self): ...
"""
GAME = """
dag_id: game
agents: [{name: left, policy: main}, {name: right, policy: main}, {name: judge, policy: main}]
policies: {main: {model: {path: m}}}
envs: {nearer: {path: GALLERY/game.py:Nearer, kwargs: {limit: 50}}}
loops: {play: {nodes: [left, right], max_rounds: 3, until: {env: right, key: distance, at_most: 1}}}
nodes:
  - {id: left, agent: left, sees_env: true}
  - {id: right, agent: right, sees_env: true, env: nearer, env_pays: true}
  - {id: judge, agent: judge, after: [left, right], sees_env: true}
""".replace("GALLERY", str(GALLERY))


def call(name: str, **arguments: str) -> str:
    pairs = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
    return f'I ask.\n<tool_call>\n{{"name": "{name}", "arguments": {{{pairs}}}}}\n</tool_call>'


def after(prompt: list[dict[str, Any]]) -> str:
    """An answer that depends on all that the node has read."""
    return f"{len(prompt)} {prompt[-1]['content'][-20:]!r}"


PLAYED = {
    "hermes": (
        GALLERY / "workflow_tool.yaml",
        [[[call("lookup", word="answer"), call("lookup", wrong="x"), call("none"), after]]],
        4,
    ),
    "tags": (
        GALLERY / "workflow_tool_tags.yaml",
        [
            [
                ["I look: <lookup>answer</lookup>", "And <lookup>\nno\n</lookup>", after],
                ["<lookup>check</lookup>", after],
            ]
        ],
        5,
    ),
    "fenced, with a memory": (FENCED, [[["```python\n1\n```", after]], [["```python\n22\n```", after]]], 4),
    "in one conversation, with a fork": (SHARED, [["1", after, after, after], [after, "2", "3", after]], 8),
    "a game in a loop": (GAME, [[["9", "30", "1"], ["8", after, "2"], after]], 7),
    "a game that ends in the second round": (GAME, [[["9", "43", "1"], ["8", "30", "2"], after]], 5),
    "a game that ends before the last node": (
        GAME + "episode: {max_turns: 2}",
        [[["9", "8"], ["42", "7"], after], ["1", "2", "3"]],
        3,
    ),
    "a game over turns": (GALLERY / "workflow_two_players.yaml", [["1", "2"], ["3", after], ["4", "5"]], 6),
    "a game that ends in the second turn": (
        GALLERY / "workflow_two_players.yaml",
        [["1", "2"], ["42", "5"], ["4", "5"]],
        4,
    ),
    "a game and a tool": (
        GALLERY / "workflow_doors.yaml",
        [[[call("open", door="red"), call("open", door="blue"), "pink"]], [[call("open", door="green"), after]]],
        5,
    ),
}


class Replayed:
    """A policy's server that gives each agent's answers, up to a stop string or with the end of the turn."""

    def __init__(self, tokenizer: Any, lessons: list[Demonstration], agent_of: dict[str, str]):
        self._tokenizer, self._answers = tokenizer, defaultdict(list)
        for lesson in lessons:
            self._answers[agent_of[lesson.role]].append(lesson)

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generation:
        lesson = self._answers[request_id.rpartition("-")[2]].pop(0)
        end = [] if lesson.goes_on else [self._tokenizer.eos_token_id]
        ids = [*self._tokenizer.encode(lesson.answer, add_special_tokens=False), *end]
        return Generation(ids, [-0.5] * len(ids), "stop")


@pytest.mark.parametrize(("source", "turns", "count"), PLAYED.values(), ids=PLAYED)
def test_the_engine_records_what_the_teacher_shows(tmp_path, source, turns, count):
    if isinstance(source, str):
        (tmp_path / "workflow.yaml").write_text(source)
        (tmp_path / "tools.py").write_text(RUN)
        source = tmp_path / "workflow.yaml"
    workflow = load_workflow(source)
    lessons = asyncio.run(Dialogue(workflow).demonstrate(PROBLEM, *map(Script, turns)))
    assert len(lessons) == count
    tokenizer = build_tokenizer(lessons)
    agent_of = {node.id: workflow.agent_of(node).name for node in workflow.rollout_nodes}
    server = Replayed(tokenizer, lessons, agent_of)
    endpoints = {name: PolicyEndpoint(server, tokenizer, 4096) for name in workflow.policies}
    runner = EpisodeRunner(workflow, endpoints, make_tools(workflow, None), seed=0)
    sample = {"prompt": [{"role": "user", "content": PROBLEM.text}], "ground_truth": str(PROBLEM.answer)}
    episode = asyncio.run(runner.run(sample, "1", 0, step=0))
    assert episode.fault is None
    by_call = defaultdict(list)
    for lesson in lessons:
        by_call[lesson.role, lesson.turn, lesson.round].append(encode(tokenizer, lesson))
    assert list(by_call) == [(played.node, played.turn, played.round) for played in episode.calls]
    for played, encoded in zip(episode.calls, by_call.values(), strict=True):
        ids = played.prompt_ids + played.response_ids
        assert [ids[: len(example.ids)] for example in encoded] == [example.ids for example in encoded]
        assert len(encoded[-1].ids) == len(ids)
        taught = [0] * len(ids)
        for example in encoded:
            taught = [old or new for old, new in zip(taught, example.in_answer + [0] * len(ids), strict=False)]
        assert taught == [0] * len(played.prompt_ids) + played.response_mask


@pytest.mark.parametrize(
    ("name", "answers", "message"),
    [
        ("tool", [[call("lookup", word="answer")]], "ends with a tool call; add the generation that reads its result"),
        ("tool", [["42", "43"]], "generation 1 calls no tool and is the last, but the teacher gives 2 generations"),
        ("tool", [[call("lookup", word="a")] * 5], "generation 4 reaches a limit of tool_loop and is the last"),
        ("tool_tags", [["a</lookup>", "b</lookup>", "c"], None], "generation 2 reaches a limit of tool_loop and"),
        ("two_players", [["1", "2"], "3"], "has a list for node 'left', which has no tool loop; give one text"),
        ("workspace", [["1"], ["2"]], "an env of the workflow uses the sandbox, and there is none; pass `sandbox`"),
        ("two_players", ["1"], r"turn 0 has 1 answer; give one per rollout node \(left, right\)"),
    ],
)
def test_what_cannot_be_played_is_one_line(name, answers, message):
    dialogue = Dialogue(load_workflow(GALLERY / f"workflow_{name}.yaml"))
    with pytest.raises(UserError, match=f"^teacher: .*{message}"):
        asyncio.run(dialogue.demonstrate(PROBLEM, Script(answers)))


def test_a_workflow_whose_agents_read_a_vote_is_refused():
    with pytest.raises(UserError, match="node speak reads surest, and a teacher plays no vote or compute nodes"):
        Dialogue(load_workflow(GALLERY / "workflow_vote.yaml"))


def test_a_tool_that_runs_programs_is_answered_by_the_script_or_refused():
    dialogue = Dialogue(load_workflow(GALLERY.parents[1] / "workflows" / "workflow_single_agent_tool.yaml"))
    with pytest.raises(UserError, match="a tool of the workflow uses the sandbox, and there is none; answer its calls"):
        asyncio.run(dialogue.demonstrate(PROBLEM, Script([["```python\nprint(1)\n```", "1"]])))
