"""Nodes with candidates: which one is kept, what later nodes see, what is recorded, and which rows they become."""

from __future__ import annotations

import asyncio
import json

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.episode.rows import rows_of
from recipe.dag.episode.shipment import pack, unpack
from recipe.dag.report.evaluation_log import episode_from
from recipe.dag.report.metrics import rollout_metrics
from recipe.dag.report.tools import tool_metrics
from recipe.dag.types.record import Generation, ToolResult

SCORE = """
from recipe.dag.types.context import Output
def number(context, *, sign=1.0):
    text = context.call.text
    return sign * float(text) if text.lstrip("-").isdigit() else None
def post_process(tokenizer, prompt_ids, response_ids, *, context):
    return Output(parsed={"said": context.call.text, "answer": context.call.text}, done="stop" in context.call.text)
def pay(episode):
    return {call.agent: 1.0 for call in episode.calls}
"""
NUMBER = {"k": 3, "by": "score.py:number"}


def flow_of(world, candidates: dict | None = None, *, agents=None, after: tuple[dict, ...] = (), solve=None, **keys):
    """A node `solve` with candidates, and the nodes `after` it; each call is paid 1."""
    nodes = [
        {"id": "solve", "candidates": candidates or NUMBER, "hooks": "score.py"} | (solve or {}),
        *after,
        {"id": "pay", "after": ["solve"], "reward": "score.py:pay"},
    ]
    return world.workflow(nodes, agents=agents, files={"score.py": SCORE}, **keys)


def in_order(world, *answers: str, **others: str):
    """A client that gives agent0 these answers by the order of their seeds, and other agents theirs."""
    seeds: dict[int, int] = {}

    def script(prompt, sampling, request):
        agent = request.rsplit("-", 1)[1]
        if agent in others:
            return others[agent]
        return answers[seeds.setdefault(sampling["seed"], len(seeds)) % len(answers)]

    client = world.Client(script)
    client.seeds = seeds
    return client


@pytest.mark.parametrize(
    ("answers", "options", "kept"),
    [
        (("1", "7", "3"), {}, 1),
        (("7", "1", "7"), {}, 0),
        (("x", "-7", "-3"), {}, 2),
        (("x", "y", "z"), {}, 0),
        (("1", "7", "3"), {"args": {"sign": -1.0}}, 0),
        (("1", "7", "3"), {"keep": "first"}, 0),
    ],
)
def test_the_best_candidate_is_kept_and_all_are_recorded(world, answers, options, kept):
    episode = world.play(flow_of(world, NUMBER | options), in_order(world, *answers))
    assert episode.fault is None, episode.fault
    (call,) = episode.calls
    assert (call.text, call.candidate, call.candidates, call.reward) == (answers[kept], kept, 3, 1.0)
    assert [other.candidate for other in episode.dropped] == [index for index in range(3) if index != kept]
    assert [sibling.text for sibling in episode.siblings_of(call)] == list(answers)
    sign = options.get("args", {}).get("sign", 1.0)
    scores = [None if answer.isalpha() else sign * float(answer) for answer in answers]
    assert [sibling.score for sibling in episode.siblings_of(call)] == scores
    assert all(other.unscored == (other.score is None) and other.reward is None for other in episode.dropped)


def test_candidates_answer_one_prompt_with_seeds_of_their_own(world):
    client = in_order(world, "1", "2", "3")
    episode = world.play(flow_of(world), client)
    assert len(client.seeds) == 3 and len({prompt for _, prompt, _ in client.requests}) == 1
    prompts = [call.prompt_ids for call in episode.all_calls]
    assert prompts[0] == prompts[1] == prompts[2] and prompts[0] is not prompts[1]
    alone = in_order(world, "1")
    world.play(world.workflow([{"id": "solve"}]), alone)
    assert next(iter(alone.seeds)) == next(iter(client.seeds)), "the first one is what the node alone would say"
    again = in_order(world, "1", "2", "3")
    world.play(flow_of(world), again)
    assert list(again.seeds) == list(client.seeds)


def test_later_nodes_see_the_one_that_was_kept_alone(world):
    check = {"id": "check", "agent": "agent1", "after": ["solve"]}
    client = in_order(world, "1", "7", "3", agent1="fine")
    episode = world.play(flow_of(world, after=(check,)), client)
    prompt = next(prompt for request, prompt, _ in client.requests if request.endswith("agent1"))
    assert "7" in prompt and "1" not in prompt and "3" not in prompt
    assert [call.node for call in episode.calls] == ["solve", "check"] and len(episode.dropped) == 2


def test_a_conversation_goes_on_from_the_one_that_was_kept(world):
    memory = [{"memory": "chat"}]
    flow = flow_of(world, agents=memory, episode={"max_turns": 2})
    episode = world.play(flow, in_order(world, "1", "7", "3", "4", "5", "6"))
    first, second = episode.calls
    assert (first.text, second.text) == ("7", "6")
    known = first.prompt_ids + first.response_ids
    assert second.prompt_ids[: len(known)] == known
    rows = rows_of([episode])
    assert [len(row.calls) for row in rows] == [2, 1, 1, 1, 1], "the kept ones are one row"
    assert [call.candidate.index for call in rows[0].calls] == [1, 2]


def test_each_level_of_the_tree_knows_its_parent(world):
    refine = {"id": "refine", "after": ["solve"], "candidates": {"k": 2, "by": "score.py:number"}, "hooks": "score.py"}
    flow = flow_of(world, after=(refine,), episode={"max_turns": 2})
    episode = world.play(flow, in_order(world, "1", "7", "3", "5", "2", "9", "8", "4", "6", "0"))
    assert [(call.node, call.turn, call.text, call.parent_score) for call in episode.calls] == [
        ("solve", 0, "7", None),
        ("refine", 0, "5", 7.0),
        ("solve", 1, "9", 5.0),
        ("refine", 1, "6", 9.0),
    ]
    assert all(other.parent_score == call.parent_score for call in episode.calls for other in episode.siblings_of(call))


JUDGE = {"id": "judge", "agent": "agent1", "after": ["solve"], "hooks": "judge.py"}
VERDICT = """
from recipe.dag.types.context import Output
def post_process(tokenizer, prompt_ids, response_ids, *, context):
    said = context.upstream["solve"].text
    return Output(text=f"judged {said}", parsed={"points": int(said) if said.isdigit() else None})
"""


def judged_flow(world, **keys):
    (world.path / "judge.py").write_text(VERDICT)
    last = {"id": "last", "agent": "agent2", "after": ["judge"]}
    options = {"k": 3, "by": "judge", "key": "points"} | keys
    return flow_of(world, options, after=(JUDGE, last))


def test_a_judge_is_asked_about_each_and_only_its_word_on_the_kept_one_counts(world):
    client = in_order(world, "1", "7", "x", agent1="hm", agent2="end")
    episode = world.play(judged_flow(world), client)
    assert [(call.node, call.text) for call in episode.calls] == [
        ("solve", "7"),
        ("judge", "judged 7"),
        ("last", "end"),
    ]
    assert [(call.node, call.text, call.score, call.candidate) for call in episode.dropped] == [
        ("solve", "1", 1.0, 0),
        ("solve", "x", None, 2),
        ("judge", "judged 1", None, 0),
        ("judge", "judged x", None, 2),
    ]
    judges = [sampling["seed"] for request, _, sampling in client.requests if request.endswith("agent1")]
    assert len(set(judges)) == 3
    (last,) = [prompt for request, prompt, _ in client.requests if request.endswith("agent2")]
    assert "judged 7" in last and "judged 1" not in last
    rows = [(row.calls[0].node, row.is_dropped) for row in rows_of([episode])]
    assert rows == [("solve", False), ("judge", False), ("last", False), ("solve", True)]


def test_a_compute_node_scores_as_well(world):
    code = "def points(context): return {'score': -len(context.upstream['solve'].text)}\n"
    (world.path / "count.py").write_text(code)
    points = {"id": "points", "after": ["solve"], "compute": "count.py:points"}
    episode = world.play(flow_of(world, {"k": 2, "by": "points"}, after=(points,)), in_order(world, "long", "no"))
    assert episode.calls[0].text == "no" and [other.score for other in episode.dropped] == [-4.0]
    assert [(result.node, result.parsed) for result in episode.results] == [("points", {"score": -2})]


def test_fewer_candidates_may_be_enough_in_validation(world):
    options = {"k": 3, "by": "score.py:number", "validation_k": 2}
    episode = world.play(flow_of(world, options), in_order(world, "1", "2", "3"), validate=True)
    assert [call.text for call in episode.all_calls] == ["2", "1"]
    for given, validate in ((options, False), (options | {"validation_k": None}, True)):
        episode = world.play(flow_of(world, given), in_order(world, "1", "2", "3"), validate=validate)
        assert [call.text for call in episode.all_calls] == ["3", "1", "2"]
    client = in_order(world, "4", agent1="hm", agent2="end")
    episode = world.play(judged_flow(world, validation_k=1), client, validate=True)
    assert [call.text for call in episode.all_calls] == ["4", "judged 4", "end"] and not episode.calls[0].candidates


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 'high'", "gave the score str 'high'; give a finite number, or None"),
        ("return True", "gave the score bool True"),
        ("return float('nan')", "gave the score float nan"),
        ("return context.nothing", "AttributeError"),
    ],
)
def test_a_broken_score_is_a_fault_and_never_a_score(world, body, message):
    flow = flow_of(world, {"k": 2, "by": "score.py:broken"})
    (world.path / "score.py").write_text(SCORE + f"def broken(context):\n    {body}\n")
    with pytest.raises(UserError) as caught:
        world.play(flow, in_order(world, "1", "2"))
    assert message in str(caught.value) and "node solve: candidates.by score.py:broken" in str(caught.value)


def test_an_episode_that_fails_records_the_candidates_it_had(world):
    def script(prompt, sampling, request):
        raise ConnectionError("gone")

    flow = flow_of(world, episode={"retries": 0})
    episode = world.play(flow, world.Client(script))
    assert episode.fault["boundary"] == "model" and len(episode.calls) == 1 and len(episode.dropped) == 2


def test_an_env_is_stepped_once_by_the_one_that_was_kept(world):
    env = """
class Env:
    def reset(self, sample, seed): return "go"
    def step(self, actions, ground_truth): return "seen", float(actions[-1]), True
"""
    (world.path / "env.py").write_text(env)
    options = {"hooks": "score.py", "env": ["env.py:Env"], "env_pays": True}
    flow = flow_of(world, solve={**options})
    episode = world.play(flow, in_order(world, "1", "7", "3"))
    assert [call.reward for call in episode.calls] == [8.0] and all(call.reward is None for call in episode.dropped)


def test_each_candidate_has_its_own_tool_results(world):
    tool = world.Tool("look", lambda arguments, state: f"result {arguments['q']}")

    def script(prompt, sampling, request):
        text = prompt.rsplit("assistant\n", 1)[1]
        if "result" in prompt:
            return prompt.split("result ")[1].split("\n")[0]
        number = numbers.setdefault(sampling["seed"], len(numbers))
        assert text == ""
        return f'<tool_call>{{"name": "look", "arguments": {{"q": {number}}}}}</tool_call>'

    numbers: dict[int, int] = {}
    agents = [{"tools": [{"name": "look"}], "tool_loop": {"max_generations": 2}}]
    episode = world.play(flow_of(world, agents=agents), world.Client(script), [tool])
    results = [[result.text for result in call.tool_results] for call in episode.siblings_of(episode.calls[0])]
    assert results == [["result 0"], ["result 1"], ["result 2"]] and episode.calls[0].text == "2"
    assert tool_metrics([episode])["summary"]["total"] == 3


def test_a_record_with_candidates_survives_the_file_and_the_wire(world):
    episode = world.play(judged_flow(world), in_order(world, "1", "7", "2", agent1="hm", agent2="end"))
    before = episode.to_json()
    assert episode_from(json.loads(json.dumps(before))).to_json() == before
    assert unpack(pack(episode), {}).to_json() == before


def test_metrics_count_all_candidates_but_an_agents_calls_once(world):
    flow = flow_of(world)
    episode = world.play(flow, in_order(world, "1", "7", "x"))
    metrics = rollout_metrics([episode], flow)
    assert metrics["agent/agent0/calls"] == 1 and metrics["tokens/sampled"] == 6
    assert metrics["agent/agent0/candidates/score"] == 4.0 and metrics["agent/agent0/candidates/kept"] == 7.0
    assert metrics["agent/agent0/candidates/spread"] == 6.0 and metrics["agent/agent0/candidates/unscored"] == 1


def test_rows_of_candidates_hold_what_they_are_compared_with(world):
    episode = world.play(flow_of(world), in_order(world, "1", "7", "x"))
    kept, first = rows_of([episode])  # a candidate without a score is not trained on
    calls = kept.calls + first.calls
    assert [call.reward for call in calls] == [1.0, 0.0] and (kept.is_dropped, first.is_dropped) == (False, True)
    assert [call.candidate.scores for call in calls] == [(1.0, 7.0, None)] * 2
    assert [call.candidate.index for call in calls] == [1, 0]
    assert [episode.all_calls[call.position].text for call in calls] == ["7", "1"]
    assert rows_of([episode], outside_loss=lambda _: {1})[1].loss_mask() == [0, 0]


@pytest.mark.parametrize("scope", ["call", "earlier", "agent", "episode", "link"])
def test_without_the_one_that_was_kept_no_candidate_is_trained_on(world, scope):
    """Its siblings lost against it, so they alone would be a one-sided comparison."""
    flow = flow_of(world, episode={"max_turns": 2})
    (world.path / "score.py").write_text(
        SCORE
        + "def pay(episode):\n    return {'agent0': [1.0 if call.turn == 0 else None for call in episode.calls]}\n"
    )
    episode = world.play(flow, in_order(world, "1", "7", "3", "4", "5", "6"))
    assert [call.unscored for call in episode.calls] == [False, True] and len(episode.dropped) == 4
    rows = rows_of([episode], unscored=scope, keep_unsampled_rewarded=scope == "link")
    trained = [(row.calls[0].turn, row.is_dropped) for row in rows if any(row.loss_mask())]
    assert trained == ([(0, False), (0, True), (0, True)] if scope in ("call", "link") else [])


def test_a_candidate_that_was_cut_off_is_one_too(world):
    generations = [Generation([20, 21], [-1.0, -1.0], "length"), "7", "3"]
    client = world.Client(lambda prompt, sampling, request: generations.pop(0))
    episode = world.play(flow_of(world), client)
    assert episode.calls[0].text == "7" and {call.stop_reason for call in episode.dropped} == {"length", "stop"}


def test_a_tool_of_a_hook_is_recorded_with_its_candidate(world):
    hook = """
from recipe.dag import Agent, Output
class Looks(Agent):
    async def prompt(self, context):
        await context.call_tool("look", q="p")
        return [{"role": "user", "content": "?"}]
    async def parse(self, context):
        result = await context.call_tool("look", q=context.call.text)
        return Output(parsed={"score": len(result.text)})
def score(context): return context.call.parsed["score"]
"""
    (world.path / "hook.py").write_text(hook)
    tool = world.Tool("look", lambda arguments, state: ToolResult("look", arguments, "success", arguments["q"] * 2))
    flow = flow_of(
        world,
        {"k": 2, "by": "hook.py:score"},
        agents=[{"tools": [{"name": "look"}]}],
        solve={"hooks": "hook.py:Looks"},
    )
    episode = world.play(flow, in_order(world, "a", "bcd"), [tool])
    results = [[result.text for result in call.tool_results] for call in episode.all_calls]
    assert results == [["pp", "bcdbcd"], ["pp", "aa"]]


def test_many_episodes_at_once_do_not_mix_their_candidates(world):
    flow = flow_of(world)
    runner = world.runner(flow, world.Client(lambda prompt, sampling, request: str(sampling["seed"] % 1000)))

    async def main():
        return await asyncio.gather(*(runner.run(world.sample(), f"u{k}", 0, step=0) for k in range(20)))

    for episode in asyncio.run(main()):
        scores = [call.score for call in episode.all_calls]
        assert len(scores) == 3 and scores[0] == max(scores)
