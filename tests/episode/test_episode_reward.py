from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.core.errors import UserError
from recipe.dag.credit.batch import CreditBatch
from recipe.dag.episode.batch import run_batch
from recipe.dag.episode.reward import share
from recipe.dag.episode.rows import left_out_unscored, rows_of
from recipe.dag.report.metrics import rollout_metrics
from recipe.dag.types.record import Call
from tests.credit.with_defaults import group_relative
from tests.episode.records import episode_from_json
from tests.rows import of_calls

HEAD = "from recipe.dag.core.errors import GraderFault\nimport asyncio, threading\nimport numpy as np\n"


def scored(world, *bodies: str, word: str = "", frozen: bool = False, algorithm=None, on_user_error="fail", **keys):
    """Agents agent0 and agent1, two turns, one reward node per body."""
    code = HEAD + "".join(f"{word}def score{k}(episode, **kwargs):\n    {body}\n" for k, body in enumerate(bodies))
    nodes = [{"id": "a"}, {"id": "b", "agent": "agent1", "after": ["a"]}]
    for k in range(len(bodies)):
        nodes.append({"id": f"r{k}", "after": ["b"], "reward": f"reward.py:score{k}", **keys})
    policies = {"main": {"model": {"path": "m"}}, "fixed": {"model": {"path": "m"}, "frozen": True}}
    return world.workflow(
        nodes,
        agents=[{}, {"policy": "fixed" if frozen else "main"}],
        policies=policies,
        files={"reward.py": code},
        algorithm=algorithm or {},
        episode={"max_turns": 2, "call_timeout_s": 0.5 if "wait()" in code else 60.0, "on_user_error": on_user_error},
    )


@pytest.mark.parametrize("word", ["", "async "])
def test_a_float_goes_to_the_last_call_and_a_list_to_each(world, word):
    episode = world.play(scored(world, "return {'agent0': 1, 'agent1': [0.25, 0.5]}", word=word))
    assert [(call.agent, call.reward) for call in episode.calls] == [
        ("agent0", 0.0),
        ("agent1", 0.25),
        ("agent0", 1.0),
        ("agent1", 0.5),
    ]


def test_several_reward_nodes_add_up_and_may_share_the_agents(world):
    flow = scored(world, "return {'agent0': 1, 'agent1': 2}", "return {'agent1': np.array([10, 20])}", "return {}")
    assert [call.reward for call in world.play(flow).calls] == [0.0, 10.0, 1.0, 22.0]


def test_outcome_and_info_are_taken_over_and_nothing_else(world):
    body = (
        "episode.outcome, episode.info['n'] = np.float64(1), np.int64(3); episode.calls[0].response_ids.clear(); "
        "episode.calls[0].text = ''; episode.sample.clear(); episode.calls.pop(); return {'agent0': 0, 'agent1': 0}"
    )
    episode = world.play(scored(world, body, "assert episode.outcome == 1.0; return {}"))
    assert episode.fault is None
    assert (episode.outcome, episode.info) == (1.0, {"n": 3})
    assert len(episode.calls) == 4 and episode.calls[0].text == "ok" and episode.calls[0].response_ids
    assert episode.sample["ground_truth"] == "4"


def test_arguments_come_from_the_workflow(world):
    flow = scored(world, "return {'agent0': kwargs['scale'], 'agent1': 0}", args={"scale": 0.5})
    assert world.play(flow).calls[2].reward == 0.5


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {'agent0': 1}", "no reward for agent1"),
        ("return 1.0", "returned float, not a dict"),
        ("return None", "returned NoneType"),
        ("return {'agent0': 1, 'agent1': 1, 'agent2': 1}", "['agent2']"),
        ("return {'agent0': float('nan'), 'agent1': 1}", "the reward of agent0 is nan"),
        ("return {'agent0': [1, float('inf')], 'agent1': 1}", "a reward of agent0 is inf"),
        ("return {'agent0': [1], 'agent1': 1}", "1 rewards for the 2 calls of agent0"),
        ("return {'agent0': '1', 'agent1': 1}", "the reward of agent0 is '1'"),
        ("return {'agent0': 1e39, 'agent1': 1}", "the reward of agent0 is 1e+39, not a finite number"),
        ("return {'agent0': 10**400, 'agent1': 1}", "the reward of agent0 is 1000"),
        ("episode.outcome = np.zeros(2); return {'agent0': 1, 'agent1': 1}", "episode.outcome is array"),
        ("episode.outcome = float('nan'); return {'agent0': 1, 'agent1': 1}", "episode.outcome is nan"),
        ("episode.info['x'] = object(); return {'agent0': 1, 'agent1': 1}", "episode.info is not JSON"),
        ("episode.info['x'] = np.zeros(2); return {'agent0': 1, 'agent1': 1}", "episode.info is not JSON"),
        ("return {}[0]", "KeyError: 0"),
        ("threading.Event().wait()", "the reward function took longer than 0.5 s"),
    ],
)
def test_a_broken_reward_is_a_fault_and_never_a_reward(world, body, message):
    episode = world.play(scored(world, body, on_user_error="mask"))
    assert episode.fault["boundary"] == "reward" and episode.fault["where"] == "reward.py:score0"
    assert message in episode.fault["message"]
    assert episode.attempts == 1


def test_a_hung_async_reward_is_cut(world):
    episode = world.play(scored(world, "await asyncio.Event().wait()", word="async "))
    assert episode.fault["message"] == "the reward function took longer than 0.5 s"


def test_a_frozen_agent_needs_no_reward(world):
    episode = world.play(scored(world, "return {'agent0': 1}", frozen=True))
    assert episode.fault is None and [call.reward for call in episode.calls_of("agent1")] == [None, None]


@pytest.mark.parametrize(
    ("reward", "problem"), [("1.0", ""), ("[]", ""), ("[1.0]", "1 rewards for the 0 calls of agent1")]
)
def test_a_reward_for_an_agent_that_was_skipped_goes_nowhere(world, reward, problem):
    nodes = [
        {"id": "a"},
        {"id": "b", "agent": "agent1", "when": {"sample": "missing", "exists": True}},
        {"id": "r", "after": ["a", "b"], "reward": "reward.py:score"},
    ]
    code = f"def score(episode):\n    return {{'agent0': 2.0, 'agent1': {reward}}}\n"
    episode = world.play(world.workflow(nodes, files={"reward.py": code}, episode={"on_user_error": "mask"}))
    if problem:
        assert problem in episode.fault["message"]
    else:
        assert episode.fault is None and [call.reward for call in episode.calls] == [2.0]


def call(agent: int, turn: int, reward: float | None, *, tokens: int = 1) -> Call:
    mask = [1] * tokens
    return Call(f"n{agent}", f"agent{agent}", agent, "main", turn, response_mask=mask, reward=reward)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        # Everyone gets the last agent's, in place of its own.
        ([call(0, 0, None), call(1, 0, 5.0), call(2, 0, 1.0)], [1.0, 1.0, 1.0]),
        # Turn by turn.
        ([call(0, 0, 0.0), call(1, 0, 0.5), call(0, 1, 3.0), call(1, 1, 1.0)], [0.5, 0.5, 1.0, 1.0]),
        # Once per turn, however often an agent moves in it, at its last call with tokens.
        (
            [call(0, 0, 1.0), call(1, 0, 0.25), call(0, 0, 1.0), call(1, 0, 0.5), call(0, 0, 1.0, tokens=0)],
            [0.0, 0.25, 0.75, 0.5, 0.0],
        ),
        # The last agent is the last of those that were rewarded in the turn.
        ([call(0, 0, None), call(1, 0, 2.0), call(2, 0, None)], [2.0, 2.0, 2.0]),
        ([call(0, 0, 3.0), call(0, 1, 4.0), call(2, 1, 1.0)], [3.0, 1.0, 1.0]),
        # The agents' order counts, not the order of their moves.
        ([call(1, 0, 2.0), call(0, 0, 7.0)], [2.0, 2.0]),
        ([call(0, 0, None), call(1, 0, None)], [None, None]),
    ],
)
def test_sharing_gives_every_agent_the_last_ones_reward_of_the_turn(calls, expected):
    calls = [replace(c) for c in calls]
    share(calls)
    assert [c.reward for c in calls] == expected
    share(calls)
    assert [c.reward for c in calls] == expected


def test_sharing_moves_every_part_of_a_reward():
    calls = [call(0, 0, 3.0), call(1, 0, 1.0), call(0, 0, None, tokens=0), call(1, 0, 0.5)]
    for one, parts in zip(calls, ({"own": 3.0}, {"a": 0.5, "b": 0.5}, {}, {"a": 0.5}), strict=True):
        one.reward_parts = parts
    share(calls)
    assert [c.reward for c in calls] == [1.5, 1.0, 0.0, 0.5]
    assert [c.reward_parts for c in calls] == [{"a": 1.0, "b": 0.5}, {"a": 0.5, "b": 0.5}, {}, {"a": 0.5}]


def test_calls_keep_what_each_node_paid_and_old_records_load_without_it(world):
    code = """
class E:
    async def step(self, actions, ground_truth): return None, [0.0, 1.0], False
def grade(episode): return {"agent0": 0.5, "agent1": -0.25}
def style(episode):
    assert episode.calls[1].reward_parts == {"b": 1.0, "grade": -0.25}
    episode.calls[1].reward_parts.clear()
    return {"agent1": 2.0}
"""
    watch = {"sees_env": True}
    step = {**watch, "env": ["e.py:E"], "env_pays": True}
    nodes = [
        {"id": "a", **watch},
        {"id": "b", "agent": "agent1", **step},
        *({"id": name, "after": ["b"], "reward": f"e.py:{name}"} for name in ("grade", "style")),
    ]
    episode = world.play(world.workflow(nodes, files={"e.py": code}))
    assert episode.fault is None
    parts = [{"b": 0.0, "grade": 0.5}, {"b": 1.0, "grade": -0.25, "style": 2.0}]
    assert [c.reward_parts for c in episode.calls] == parts and [c.reward for c in episode.calls] == [0.5, 2.75]
    assert [of_calls(row, "parts") for row in rows_of([episode])] == [(part,) for part in parts]
    data = json.loads(json.dumps(episode.to_json()))
    assert episode_from_json(data) == episode
    for one in data["calls"]:
        del one["reward_parts"], one["role"], one["branch"]
    old = episode_from_json(data)
    assert [(c.reward_parts, c.role, c.branch) for c in old.calls] == [({}, "", "")] * 2


def test_rewards_are_shared_before_missing_ones_are_reported(world):
    flow = scored(world, "return {'agent1': [0.25, 1.0]}", algorithm={"share_reward_in_agent": True})
    episode = world.play(flow)
    assert episode.fault is None
    assert [(c.agent, c.reward) for c in episode.calls] == [
        ("agent0", 0.25),
        ("agent1", 0.25),
        ("agent0", 1.0),
        ("agent1", 1.0),
    ]
    last = rows_of([episode], train_turns="last")
    assert [(row.calls[0].agent, of_calls(row, "reward")) for row in last] == [("agent0", (1.0,)), ("agent1", (1.0,))]


def test_sharing_takes_the_envs_rewards_too_and_counts_them_once(world):
    code = """
class E:
    async def step(self, actions, ground_truth): return None, [0.0, 1.0], False
"""
    watch = {"sees_env": True}
    step = {**watch, "env": ["e.py:E"], "env_pays": True}
    nodes = [{"id": "a", **watch}, {"id": "b", "agent": "agent1", **step}]
    flow = world.workflow(nodes, files={"e.py": code}, algorithm={"share_reward_in_agent": True})
    assert [c.reward for c in world.play(flow).calls] == [1.0, 1.0]


def test_an_agent_that_its_env_rewarded_once_is_rewarded(world):
    """Its env was not stepped in the first turn."""
    code = """
class E:
    async def step(self, actions, ground_truth): return None, 1.0, False
def score(episode):
    return {"agent1": 0.0} if episode.calls_of("agent1") else {}
"""
    watch = {"sees_env": True}
    step = {"env": ["e.py:E"], "env_pays": True}
    nodes = [
        {"id": "a", **watch},
        {"id": "b", "agent": "agent1", "when": {"node": "b2", "exists": True}, **watch, **step},
        {"id": "b2", "agent": "agent1", "after": ["a"]},
        {"id": "r", "after": ["b2"], "reward": "e.py:score"},
    ]
    episode = world.play(world.workflow(nodes, files={"e.py": code}, episode={"max_turns": 2}))
    assert episode.fault is None
    assert [(c.node, c.reward) for c in episode.calls if c.agent == "agent0"] == [("a", None), ("a", 1.0)]


def test_chained_credit_and_sharing_exclude_each_other(world):
    algorithm = {"share_reward_in_agent": True, "estimator": "gae_chain"}
    with pytest.raises(UserError, match="gae_chain already propagates rewards"):
        world.runner(scored(world, "return {}", algorithm=algorithm))


def test_a_reward_function_sees_results_and_skips_and_changes_neither(world):
    body = (
        "assert episode.skips[0].node == 'c' and episode.results[0].parsed == {'n': 1}; "
        "episode.results[0].parsed.clear(); episode.skips.clear(); return {'agent0': 1}"
    )
    nodes = [
        {"id": "a"},
        {"id": "n", "after": ["a"], "compute": "reward.py:count"},
        {"id": "c", "when": {"node": "n", "key": "n", "equals": 2}},
        {"id": "r", "after": ["c"], "reward": "reward.py:score"},
    ]
    code = f"def count(context):\n    return {{'n': 1}}\ndef score(episode):\n    {body}\n"
    episode = world.play(world.workflow(nodes, files={"reward.py": code}))
    assert episode.fault is None and len(episode.skips) == 1 and episode.results[0].parsed == {"n": 1}


def test_a_grader_that_crashed_is_the_infrastructures(world):
    episode = world.play(scored(world, "raise GraderFault('died')"))
    assert (episode.fault["boundary"], episode.attempts, len(episode.faults)) == ("grader", 2, 2)


def test_a_reward_that_is_not_a_function_is_refused(world):
    with pytest.raises(UserError, match="node r0: reward.py is not a function"):
        world.runner(scored(world, "return {}", reward="reward.py"))


def test_a_coachs_unreadable_answer_is_a_counted_fault_and_not_a_score(world):
    """As in MARTI's coaching, where such an answer counts 5 of 10."""
    code = """
import re

REPLIES = {"u0": "Score: 8", "u1": "I would rather not say.", "u2": "Score: 0"}

def coach(episode):
    found = re.fullmatch(r"Score: (\\d+)", REPLIES[episode.uid])
    if found is None:
        raise ValueError(f"no score in {REPLIES[episode.uid]!r}")
    return {"agent0": int(found[1]) / 10}
"""
    nodes = [
        {"id": "solve"},
        {"id": "coach", "after": ["solve"], "reward": "coach.py:coach"},
    ]
    runner = world.runner(world.workflow(nodes, files={"coach.py": code}, episode={"on_user_error": "mask"}))
    episodes = [asyncio.run(runner.run(world.sample(), uid, 0, step=0)) for uid in ("u0", "u1", "u2")]
    assert [(row.uid, *of_calls(row, "reward")) for row in rows_of(episodes)] == [("u0", 0.8), ("u2", 0.0)]
    assert episodes[1].calls[0].reward is None and "no score in" in episodes[1].fault["message"]
    metrics = rollout_metrics(episodes)
    assert metrics["faults/reward"] == 1.0 and metrics["episode/masked"] == pytest.approx(1 / 3)
    assert metrics["agent/agent0/reward/mean"] == pytest.approx(0.4)


JUDGE = """
import errno, aiohttp, httpx
from recipe.dag.core.errors import GraderFault, ModelServerFault
from recipe.dag.core.errors import Refused
tries = []

def score(episode):
    tries.append(episode.uid)
    if len(tries) == 1:
        {error}
    return {{"agent0": 1.0}}
"""


@pytest.mark.parametrize(
    ("error", "attempts", "cause"),
    [
        ("raise ConnectionRefusedError(111, 'refused')", 2, "infrastructure"),
        ("raise httpx.ReadTimeout('slow')", 2, "infrastructure"),
        ("raise OSError(errno.EMFILE, 'Too many open files')", 2, "infrastructure"),
        ("raise TimeoutError", 2, "infrastructure"),
        ("raise httpx.ConnectError('refused')", 2, "infrastructure"),
        ("raise aiohttp.ServerDisconnectedError", 2, "infrastructure"),
        ("raise aiohttp.ClientPayloadError('cut off')", 2, "infrastructure"),
        ("raise ModelServerFault('the judge is down')", 2, "infrastructure"),
        ("raise GraderFault('crashed')", 2, "infrastructure"),
        ("raise Refused('the prompt is not allowed')", 1, "engine"),
        ("raise aiohttp.InvalidURL('judge')", 1, "user_code"),
        ("raise KeyError('rubric')", 1, "user_code"),
    ],
)
def test_an_error_of_the_infrastructure_inside_a_reward_is_tried_again_and_a_bug_is_not(world, error, attempts, cause):
    pay = {"id": "r", "after": ["a"], "reward": "reward.py:score"}
    files = {"reward.py": JUDGE.format(error=error)}
    episode = world.play(world.workflow([{"id": "a"}, pay], files=files, episode={"on_user_error": "mask"}))
    assert (episode.attempts, [fault["cause"] for fault in episode.faults]) == (attempts, [cause])
    assert (episode.fault is None) == (attempts == 2)
    assert [call.reward for call in episode.calls] == ([1.0] if attempts == 2 else [None])


def summed(episode) -> list[tuple]:
    return [(call.agent, call.reward, call.train, call.unscored) for call in episode.calls]


@pytest.mark.parametrize("word", ["", "async "])
def test_none_takes_the_call_out_and_leaves_the_others(world, word):
    episode = world.play(scored(world, "return {'agent0': [None, 1.0], 'agent1': 0.5}", word=word))
    assert episode.fault is None
    assert summed(episode) == [
        ("agent0", None, False, True),
        ("agent1", 0.0, True, False),
        ("agent0", 1.0, True, False),
        ("agent1", 0.5, True, False),
    ]
    assert [(row.calls[0].agent, *of_calls(row, "reward")) for row in rows_of([episode])] == [
        ("agent1", 0.0),
        ("agent0", 1.0),
        ("agent1", 0.5),
    ]
    # Credit that chains calls gets no row for it either: there is no reward to hand on.
    assert len(rows_of([episode], keep_unsampled_rewarded=True)) == 3 and rows_of([episode], unscored="episode") == []
    assert episode_from_json(json.loads(json.dumps(episode.to_json()))) == episode
    metrics = rollout_metrics([episode])
    assert (metrics["agent/agent0/unscored"], metrics["agent/agent1/unscored"]) == (1.0, 0.0)


def test_none_for_an_agent_is_none_for_each_of_its_calls_and_no_missing_reward(world):
    episode = world.play(scored(world, "return {'agent0': None, 'agent1': 1}"))
    assert episode.fault is None
    assert [(call.agent, call.unscored) for call in episode.calls] == [("agent0", True), ("agent1", False)] * 2


def test_what_another_node_pays_for_an_unscored_call_is_dropped_in_any_order(world):
    unknown, known = "return {'agent0': [None, 2.0]}", "return {'agent0': [4.0, 4.0], 'agent1': 1}"
    for bodies in ((unknown, known), (known, unknown)):
        episode = world.play(scored(world, *bodies))
        assert [(call.reward, len(call.reward_parts)) for call in episode.calls_of("agent0")] == [(None, 0), (6.0, 2)]


@pytest.mark.parametrize(
    ("scope", "kept"),
    [("call", [0, 1, 3]), ("link", [0, 1, 2, 3]), ("earlier", [1, 3]), ("trajectory", [1, 3]), ("episode", [])],
)
def test_calls_that_are_worth_something_unknown_go_with_the_unscored_one(world, scope, kept):
    """Else what could not be scored would count as nothing earned."""
    episode = world.play(scored(world, "return {'agent0': [1.0, None], 'agent1': 1}"))
    assert [call.agent for call in episode.calls] == ["agent0", "agent1", "agent0", "agent1"]
    rows = rows_of([episode], unscored=scope, merge=False)
    assert sorted(row.calls[0].position for row in rows) == kept


@pytest.mark.parametrize(
    ("options", "scope"),
    [
        ({}, "trajectory"),
        ({"gamma_turn": 0.0}, "call"),
        ({"gamma_turn": 0.9}, "earlier"),
        ({"estimator": "reinforce_pp"}, "earlier"),
        ({"estimator": "reinforce_pp", "stat_unit": "call"}, "call"),
        ({"estimator": "gae"}, "link"),
        ({"estimator": "gae_chain"}, "link"),
        ({"estimator": "ippo"}, "link"),
        ({"estimator": "ippo", "stream": "call"}, "call"),
        ({"estimator": "mappo"}, "link"),
        ({"estimator": "qmix"}, "episode"),
    ],
)
def test_what_an_unscored_call_takes_with_it_follows_from_the_estimator(options, scope):
    assert make_algorithm(**options).unscored_scope == scope


def test_none_leaves_the_group_compared_without_it(world):
    body = "return {'agent0': None if episode.index == 0 else float(episode.index), 'agent1': 1}"
    flow = scored(world, body)

    async def main():
        return await run_batch(world.runner(flow), [(world.sample("q"), "u")], 3, step=0)

    rows = [row for row in rows_of(asyncio.run(main())) if row.calls[0].agent == "agent0"]
    assert {row.episode for row in rows} == {1, 2}
    advantages, _ = group_relative(CreditBatch.from_rows(rows), scale="none")
    assert [pytest.approx(-0.5), pytest.approx(0.5)] == sorted({column[0].item() for column in advantages})


def test_a_call_that_a_reward_function_takes_out_keeps_its_reward_and_does_not_train(world):
    body = "episode.calls.reverse(); episode.calls[-1].train = False; return {'agent0': [3.0, 1.0], 'agent1': 0}"
    episode = world.play(scored(world, body))
    assert summed(episode)[0] == ("agent0", 3.0, False, False) and all(call.train for call in episode.calls[1:])
    assert len(rows_of([episode])) == 3 and len(rows_of([episode], keep_unsampled_rewarded=True)) == 4


def test_sharing_what_is_unknown_leaves_the_turn_out(world):
    flow = scored(world, "return {'agent0': 1, 'agent1': [None, 2.0]}", algorithm={"share_reward_in_agent": True})
    episode = world.play(flow)
    assert summed(episode) == [
        ("agent0", None, False, True),
        ("agent1", None, False, True),
        ("agent0", 2.0, True, False),
        ("agent1", 2.0, True, False),
    ]


@pytest.mark.parametrize("merge", [True, False])
def test_a_link_stays_in_the_chain_and_outside_the_loss(world, merge):
    episode = world.play(scored(world, "return {'agent0': [None, 1.0], 'agent1': 0.5}"))
    rows = rows_of([episode], unscored="link", merge=merge)
    assert [(call.agent, call.reward, call.learns, call.unscored) for row in rows for call in row.calls] == [
        ("agent0", 0.0, False, True),
        ("agent1", 0.0, True, False),
        ("agent0", 1.0, True, False),
        ("agent1", 0.5, True, False),
    ]
    assert not any(rows[0].loss_mask()) and any(rows[0].response_mask)


def test_a_link_without_tokens_is_kept_where_rewards_are_propagated(world):
    episode = world.play(scored(world, "return {'agent0': [None, 1.0], 'agent1': 0.5}"))
    episode.calls[0].response_mask = [0] * len(episode.calls[0].response_mask)
    assert len(rows_of([episode], unscored="link")) == 3
    first = rows_of([episode], unscored="link", keep_unsampled_rewarded=True)[0]
    assert first.response_ids == [] and of_calls(first, "unscored") == (True,)


def test_calls_left_out_are_counted_by_the_scope(world):
    flow = scored(world, "return {'agent0': [1.0, None], 'agent1': 1}")
    episode = world.play(flow)
    for scope, count in (("call", 1), ("link", 1), ("earlier", 2), ("trajectory", 2), ("episode", 4)):
        assert len(left_out_unscored(episode, scope, {"main"})) == count
        assert left_out_unscored(episode, scope, {"other"}) == set()
    assert rollout_metrics([episode], flow)["left_out/calls_unscored"] == 2  # grpo compares trajectories
    assert "val/left_out/calls_unscored" not in rollout_metrics([episode], flow, prefix="val/")
