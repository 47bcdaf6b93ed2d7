"""No feature without an example: every estimator, block, condition and kind of node occurs in a shipped workflow; and
the gallery's workflows play."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from examples.gallery.mcp_server import make_app
from recipe.dag.algorithms.base import Algorithm
from recipe.dag.algorithms.catalogue import BLOCKS, SELECTABLE
from recipe.dag.algorithms.estimate import estimate
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.batch import run_batch
from recipe.dag.episode.listed_tools import with_listed_tools, with_stand_ins
from recipe.dag.episode.make_tools import make_tools
from recipe.dag.episode.rows import rows_of
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.reward.entry_json import to_json
from recipe.dag.types.record import Episode
from recipe.dag.types.tool import Tool, close_tool
from recipe.dag.workflow.condition import Condition
from recipe.dag.workflow.node import Kind
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.source import read_source
from tests.test_shipped import ROOT, WORKFLOWS

FOLDER = ROOT / "examples" / "gallery"
GALLERY = sorted(path.stem.removeprefix("workflow_") for path in FOLDER.glob("workflow_*.yaml"))
GYM = "reasoning_gym"
# tests/envs/test_workspace_episodes.py plays the second in a sandbox, tests/coach/test_coach_gallery.py the third,
# tests/tiny/test_tiny_engine.py the fourth, whose answers are not numbers
SPECIAL = (GYM, "workspace", "coach", "doors")


@pytest.fixture(scope="module")
def shipped() -> list[Workflow]:
    return [load_workflow(file) for file in WORKFLOWS]


def flow_of(name: str) -> Workflow:
    return load_workflow(FOLDER / f"workflow_{name}.yaml")


def gym_problem() -> dict[str, Any]:
    return pytest.importorskip("reasoning_gym.factory").create_dataset("chain_sum", size=1, seed=0)[0]


def play(
    name: str, server_class: type, answer: Callable[[str], str], *, online: bool = False, **sample: Any
) -> Episode:
    """Run one episode of the workflow, in which the model answers each prompt with `answer(prompt)`. `online`: with the
    servers that its tools ask."""
    (episode,) = play_group(name, server_class, lambda prompt, _: answer(prompt), 1, online=online, **sample)
    return episode


def play_group(
    name: str, server_class: type, answer: Callable[[str, int], str], n: int, *, online: bool = False, **sample: Any
) -> list[Episode]:
    """Run a group of episodes, in which the model answers each prompt with `answer(prompt, index of the episode)`."""

    class Server(server_class):
        """Ends each message with a token, as agents with a memory need it."""

        def apply_chat_template(self, messages, tokenize=True, return_dict=True, **kwargs):
            text = "".join(f"{message['content']}\0" for message in messages)
            return self.encode(text) if tokenize else text

        async def generate(self, request_id, prompt_ids, sampling):
            index = int(request_id.split("-")[1])
            self.answer = lambda prompt: answer(prompt, index)[: sampling["max_tokens"] - 1]
            return await super().generate(request_id, prompt_ids, sampling)

    workflow, server = flow_of(name), Server(lambda prompt: "")
    workflow = asyncio.run(with_listed_tools(workflow)) if online else with_stand_ins(workflow)
    endpoints = {name: PolicyEndpoint(server, server, 9999) for name in workflow.policies}
    tools = make_tools(workflow, None, online=online)
    runner = EpisodeRunner(workflow, endpoints, tools, seed=0)
    prompt = [{"role": "user", "content": "Which number?"}]
    sample = {"prompt": prompt, "ground_truth": "42", "extra_info": {"level": 5, "game": "up"}} | sample
    if name == GYM:
        problem = {"generator": "chain_sum", "options": "{}", "entry": to_json(gym_problem())}
        sample["extra_info"]["reasoning_gym"] = problem
    return asyncio.run(_run_and_close(runner, sample, n, tools))


async def _run_and_close(
    runner: EpisodeRunner, sample: dict[str, Any], n: int, tools: dict[str, Tool]
) -> list[Episode]:
    try:
        return await run_batch(runner, [(sample, "u")], n, step=0)
    finally:
        for tool in tools.values():
            await close_tool(tool)


def called(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def conditions(found: Condition | None) -> list[Condition]:
    if found is None:
        return []
    inner = [one for several in (found.all_of, found.any_of, found.none_of) for one in several or ()]
    return [found, *(deeper for one in inner for deeper in conditions(one))]


def test_every_estimator_and_block_has_a_workflow(shipped):
    assert {workflow.algorithm.estimator for workflow in shipped} >= set(SELECTABLE)
    assert any(":" in workflow.algorithm.estimator for workflow in shipped)
    used = {name for name in Algorithm.model_fields for flow in shipped if name in flow.algorithm.model_fields_set}
    assert used >= {block.__name__.lower() for block in BLOCKS} | {"dynamic_sampling", "drop_zero_variance"}


def test_every_condition_and_kind_of_node_has_a_workflow(shipped):
    whens = [node.when for flow in shipped for node in flow.nodes]
    untils = [loop.until for flow in shipped for loop in flow.loops.values()]
    used = {key for when in (*whens, *untils) for one in conditions(when) for key in one.model_fields_set}
    assert used >= set(Condition.model_fields)
    kinds = {node.kind for flow in shipped for node in flow.nodes}
    assert kinds >= {Kind.ROLLOUT, Kind.VOTE, Kind.REWARD, Kind.COMPUTE}
    assert any(node.env_route for flow in shipped for node in flow.nodes)
    assert any("workflow" in node for file in WORKFLOWS for node in read_source(file).data["nodes"])


@pytest.mark.parametrize("name", [name for name in GALLERY if name not in SPECIAL])
@pytest.mark.parametrize("said", ["42 (95 %), \\boxed{42}", "3 (40 %), \\boxed{3}", "nothing"])
def test_a_workflow_of_the_gallery_plays(name: str, said: str, scripted_server):
    episodes = play_group(name, scripted_server, lambda prompt, _: said, 2)
    compares = any(node.scope == "group" for node in flow_of(name).nodes)
    for episode in episodes:
        assert episode.fault is None, episode.fault
        assert episode.outcome == float(said.startswith("42"))
        # the judge's server says the same, which is no verdict: the solver's call cannot be scored
        unscored = ["solver"] if name in ("api_judge", "api_jury") else []
        if not compares:  # a group without an answer cannot be compared
            assert [call.agent for call in episode.calls if call.reward is None] == unscored
        assert [call.agent for call in episode.calls if call.reward is None and not call.unscored] == []


def test_the_groups_answer_is_the_label_without_a_truth(scripted_server):
    answers = ["41", "42", "41", "nothing"]
    episodes = play_group("majority_label", scripted_server, lambda _, index: answers[index], 4, ground_truth="42")
    checked = [episode.calls[-1] for episode in episodes]
    assert [call.reward_parts["majority"] for call in checked] == [1.0, 0.0, 1.0, 0.0]
    assert [call.reward_parts["diverse"] for call in checked] == pytest.approx([0.05 * d for d in (2 / 3, 1, 2 / 3, 1)])
    assert [episode.outcome for episode in episodes] == [0.0, 1.0, 0.0, 0.0]
    assert episodes[0].info["majority/label"] == "41" and episodes[0].info["majority/right"] == 0.0


def test_answers_are_ranked_by_a_judge_and_by_a_function(scripted_server):
    def answer(prompt: str, index: int) -> str:
        return ("8", "3", "10")[index] if "0 to 10" in prompt else ("42 (50 %)", "42 (90 %)", "41 (10 %)")[index]

    episodes = play_group("ranking", scripted_server, answer, 3)
    parts = [episode.calls[0].reward_parts for episode in episodes]
    assert [part["ranks"] for part in parts] == [0.5, 0.0, 1.0]
    assert [part["surest"] for part in parts] == pytest.approx([0.05, 0.1, 0.0])
    assert [episode.outcome for episode in episodes] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(("error", "outcome"), [(0, 1.0), (1, 0.0)])
def test_an_answer_to_a_problem_of_reasoning_gym_is_paid_by_its_verifier(scripted_server, error, outcome):
    text = f"<answer>{int(gym_problem()['answer']) + error}</answer>"
    assert play(GYM, scripted_server, lambda _: text).outcome == outcome


def test_the_two_players_are_paid_by_the_env_and_read_what_it_says(scripted_server):
    def answer(prompt: str) -> str:
        return "40" if "off by" not in prompt else "42" if "off by 2" in prompt else "30"

    episode = play("two_players", scripted_server, answer)
    said = [(agent, turn, text) for turn, text in enumerate(("40", "42")) for agent in ("left", "right")]
    assert [(call.agent, call.turn, call.text) for call in episode.calls] == said
    assert [call.reward for call in episode.calls] == [0.0, 0.0, 1.0, 1.0]
    assert episode.calls[1].env_info == {"distance": 2} and episode.ended_by == "done"


def test_a_call_between_tags_is_answered_in_the_same_message(scripted_server):
    def answer(prompt: str) -> str:
        word = "answer" if "<lookup>" not in prompt else "question"
        return "42 (90 %)" if prompt.count("<found>") == 2 else f"It says <lookup>{word}</lookup> and more"

    episode = play("tool_tags", scripted_server, answer)
    solve, check = episode.calls
    results = [(result.status, result.text) for result in solve.tool_results]
    assert results == [("success", "42"), ("failed", "'question' is not in the table")]
    assert check.tool_results[0].text == "'answer' is not in t" and episode.outcome == 1.0


def test_the_model_calls_the_tool_until_its_lookups_are_used_up(scripted_server):
    request = '<tool_call>{"name": "lookup", "arguments": {"word": "answer"}}</tool_call>'
    episode = play("tool", scripted_server, lambda prompt: "42 (90 %)" if prompt.count("<tool_call>") == 3 else request)
    (call,) = episode.calls
    assert [(result.status, result.text) for result in call.tool_results] == [("success", "42")] * 3
    assert episode.outcome == 1.0


def test_the_vote_decides_and_pays_what_it_would_lose(scripted_server):
    answers = iter(["\\boxed{42}", "\\boxed{41}", "\\boxed{42}", "\\boxed{41}", "\\boxed{42}"])
    episode = play("majority_vote", scripted_server, lambda _: next(answers))
    assert episode.results[0].parsed["answer"] == "42" and episode.outcome == 1.0
    # without one of the three, the tie is won by the first answer that is left
    assert [call.reward for call in episode.calls] == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_no_voter_that_is_right_is_paid_less_than_one_that_is_wrong(scripted_server):
    """Five calls of one agent in one turn: each has the advantage of its own reward."""
    answers = {0: iter(("41", "42", "41", "42", "42")), 1: iter(("41", "41", "41", "42", "41"))}
    episodes = play_group("majority_vote", scripted_server, lambda _, index: f"\\boxed{{{next(answers[index])}}}", 2)
    calls = [call for episode in episodes for call in episode.calls]
    advantages, _ = estimate(flow_of("majority_vote").algorithm, rows_of(episodes))
    paid = [(call.parsed["answer"] == "42", row[0].item()) for call, row in zip(calls, advantages, strict=True)]
    assert min(advantage for right, advantage in paid if right) >= max(a for right, a in paid if not right)
    assert max(advantage for _, advantage in paid) > 0


def test_a_mixture_reads_all_answers_and_is_paid_together(scripted_server):
    def answer(prompt: str) -> str:
        if "answers of several people" not in prompt:
            return "draft \\boxed{41}"
        assert all(f"{node}:\ndraft" in prompt for node in ("first", "second", "third"))
        return "\\boxed{42}"

    episode = play("mixture", scripted_server, answer)
    assert episode.outcome == 1.0
    assert [call.reward_parts.get("team", 0.0) for call in episode.calls] == [0.5, 0.5, 0.5, 0.0]


@pytest.mark.parametrize(
    ("draft", "verdict", "earned"), [("41", "WRONG", 1.0), ("41", "CORRECT", 0.0), ("42", "WRONG", 0.0)]
)
def test_the_chain_pays_the_reviewer_for_a_true_verdict(scripted_server, draft, verdict, earned):
    def answer(prompt: str) -> str:
        if "step by step. Finish" in prompt:
            return f"\\boxed{{{draft}}}"
        return f"Step 1 ... VERDICT: {verdict}." if "do not write a solution" in prompt else "\\boxed{42}"

    episode = play("chain", scripted_server, answer)
    assert [call.reward for call in episode.calls] == [float(draft == "42"), earned, 1.0] and episode.outcome == 1.0


def test_reflection_revises_until_the_critic_is_content_and_pays_improvements(scripted_server):
    def answer(prompt: str) -> str:
        if "VERDICT: CORRECT or" in prompt:
            return "**VERDICT:** correct" if "answer:\n\\boxed{42}" in prompt else "Step 2 is off. VERDICT: WRONG"
        return "\\boxed{42}" if "Step 2 is off" in prompt else "\\boxed{41}"

    episode = play("reflection", scripted_server, answer)
    assert [(call.node, call.round, call.reward) for call in episode.calls] == [
        ("answer", 0, 0.0),
        ("criticize", 0, 1.0),
        ("answer", 1, 1.5),
        ("criticize", 1, 1.0),
    ]
    assert episode.outcome == 1.0


def test_a_long_document_is_read_in_parts_and_answered_from_the_notes(scripted_server):
    words = [f"word{k}" for k in range(1000)]

    def answer(prompt: str) -> str:
        if "notes about a document" in prompt:
            assert "word" not in prompt
            return "\\boxed{42}"
        parts.append(prompt.split("of the document:\n")[1].split("\n\n")[0])
        assert f"Notes so far:\n{'(none)' if len(parts) == 1 else f'note {len(parts) - 1}'}\n" in prompt
        return f"note {len(parts)}"

    parts: list[str] = []
    episode = play("summary", scripted_server, answer, extra_info={"context": " ".join(words)})
    assert len(parts) == 4 and " ".join(parts).split() == words
    assert [call.node for call in episode.calls] == ["read"] * 4 + ["answer"]
    assert [call.reward for call in episode.calls] == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_the_best_of_four_is_kept_and_all_four_learn(scripted_server):
    def answer(prompt: str, index: int) -> str:
        if "0 to 10" in prompt:
            return str(int(prompt.split("student:\n")[1].split(" ")[0]) - 40)
        said.append(index)
        return f"{40 + said.count(index)} (90 %)"

    said: list[int] = []
    (episode,) = play_group("best_of", scripted_server, answer, 1)
    solve, judge = episode.calls
    assert (solve.text, solve.score, judge.text) == ("44 (90 %)", 4.0, "4") and episode.outcome == 0.0
    rows = [row for row in rows_of([episode]) if row.calls[0].node == "solve"]
    advantages, _ = estimate(flow_of("best_of").algorithm, rows)
    assert [tokens[0].item() for tokens in advantages] == [1.5, -1.5, -0.5, 0.5]


def test_a_tree_refines_the_surest_answer(scripted_server):
    def answer(prompt: str) -> str:
        sure.append(30 + 7 * len(sure) % 50)
        return f"42 ({sure[-1]} %)"

    sure: list[int] = []
    episode = play("tree", scripted_server, answer)
    assert [(call.node, call.round) for call in episode.calls] == [("solve", 0), ("improve", 0), ("improve", 1)]
    for number, call in enumerate(episode.calls):
        siblings = sure[3 * number : 3 * number + 3]
        assert call.score == max(siblings) / 100
        assert call.parent_score == (episode.calls[number - 1].score if number else None)
    assert len(rows_of([episode])) == 9


def test_the_answers_to_the_questions_are_found_in_the_texts(scripted_server):
    """The model asks with the question's own words, and answers with what a right reader would."""
    lines = (FOLDER / "questions.jsonl").read_text().splitlines()
    for question in map(json.loads, lines):
        request = called("search", query=question["problem"])
        episode = play("search", scripted_server, lambda prompt, request=request: "42" if "[1]" in prompt else request)
        (result,) = episode.calls[0].tool_results
        assert result.status == "success" and f" {question['answer']} " in result.text, question


def test_the_calculator_computes_and_its_refusals_are_read(scripted_server):
    def answer(prompt: str) -> str:
        if "no equations" not in prompt:
            return called("calculator", expression="x = 6*7")
        return "42 (99 %)" if "1764" in prompt else called("calculator", expression="(6*7)^2")

    episode = play("calculator", scripted_server, answer)
    assert [result.status for result in episode.calls[0].tool_results] == ["failed", "success"]
    assert episode.outcome == 1.0


@pytest.fixture
def notes_server(monkeypatch):
    """The example's server, on a thread of its own; MCP_URL names it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    runner = web.AppRunner(make_app(FOLDER / "texts"))

    async def start() -> int:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner.addresses[0][1]

    port = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    monkeypatch.setenv("MCP_URL", f"http://127.0.0.1:{port}/mcp")
    yield
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)


def test_the_model_is_shown_a_servers_tools_and_calls_them(scripted_server, notes_server):
    def answer(prompt: str) -> str:
        if "no such note" not in prompt:
            return called("read_note", name="lights.md")
        return "42 (99 %)" if "has 42 steps" in prompt else called("read_note", name="lighthouses.md")

    episode = play("mcp", scripted_server, answer, online=True)
    assert episode.fault is None, episode.fault
    assert [result.status for result in episode.calls[0].tool_results] == ["failed", "success"]
    assert episode.outcome == 1.0
    (agent,) = asyncio.run(with_listed_tools(flow_of("mcp"))).agents
    assert [tool.kwargs["listed"]["name"] for tool in agent.tools] == ["read_note"]  # of the two that it lists


def test_thoughts_call_nothing_and_are_not_handed_over(scripted_server):
    prompts = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        if "solve said" in prompt:
            return "42 (80 %)"
        if "1764" in prompt:
            return "<think>Maybe 7.</think>42 (99 %)"
        return f"<think>{called('calculator', expression='1/0')}</think>{called('calculator', expression='42^2')}"

    episode = play("thinking", scripted_server, answer)
    solve, check = episode.calls
    assert [result.text for result in solve.tool_results] == ["1764"] and solve.parsed["answer"] == "42"
    assert "solve said: 42 (99 %)" in prompts[-1] and "<think>" not in prompts[-1] and episode.outcome == 1.0
