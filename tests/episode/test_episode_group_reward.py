"""Reward nodes with the scope `group`: what they see, when they run, and what happens if they fail."""

from __future__ import annotations

import asyncio
import json

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.episode.batch import run_batch
from recipe.dag.episode.failure import TooManyFailed
from recipe.dag.episode.rows import rows_of
from recipe.dag.report.evaluation_log import episode_from
from recipe.dag.train.selection import collect

RANK = """
seen = []
def rank(episodes, *, scale=1.0):
    seen.append([(episode.uid, episode.index) for episode in episodes])
    return [{"agent0": scale * len(episodes) + episode.index} for episode in episodes]
"""


def flow_of(world, code: str = RANK, *, nodes: tuple[dict, ...] = (), kind: str = "reward", **keys):
    """One agent; a reward node `rank` of the group, and further reward nodes."""
    ranked = {"id": "rank", "after": ["solve"], kind: "reward.py:rank", "scope": "group"}
    return world.workflow([{"id": "solve"}, ranked, *nodes], files={"reward.py": code}, **keys)


def play(world, flow, samples: int = 1, n: int = 3, client=None, earlier=()):
    async def main():
        pairs = [(world.sample(f"q{k}"), f"u{k}") for k in range(samples)]
        episodes = await run_batch(world.runner(flow, client), pairs, n, step=0, earlier=earlier)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return episodes

    return asyncio.run(main())


def rewards(episodes) -> list[float | None]:
    return [call.reward for episode in episodes for call in episode.calls]


def test_each_group_is_scored_once_with_its_episodes_in_order(world):
    code = RANK + "def report(episode):\n    episode.info['seen'] = seen\n    return {}\n"
    report = {"id": "report", "reward": "reward.py:report", "after": ["rank"]}
    episodes = play(world, flow_of(world, code, nodes=(report,)), samples=2)
    assert rewards(episodes) == [3.0, 4.0, 5.0] * 2
    assert sorted(episodes[-1].info["seen"]) == [[(uid, index) for index in range(3)] for uid in ("u0", "u1")]


@pytest.mark.parametrize("word", ["", "async "])
def test_it_may_be_async_and_its_rewards_are_those_of_an_episode(world, word):
    code = f"""
{word}def rank(episodes):
    for episode in episodes:
        episode.outcome, episode.info["of"] = float(episode.index == 0), len(episodes)
        episode.calls[0].text = "changed"
    episodes[2].calls[0].train = False
    return [{{"agent0": [0.5]}}, {{"agent0": None}}, {{}}]
"""
    pays = "def rest(episode): return {'agent0': 1.0}\n"
    rest = {"id": "rest", "reward": "reward.py:rest", "after": ["solve"]}
    first, second, third = play(world, flow_of(world, code + pays, nodes=(rest,)))
    assert (first.outcome, second.outcome) == (1.0, 0.0) and [e.info for e in (first, third)] == [{"of": 3}] * 2
    assert first.calls[0].reward == 1.5 and first.calls[0].reward_parts == {"rank": 0.5, "rest": 1.0}
    assert second.calls[0].unscored and second.calls[0].reward is None
    assert third.calls[0].reward == 1.0 and not third.calls[0].train and first.calls[0].text == "ok"
    assert [row.episode for row in rows_of([first, second, third])] == [0]


def test_a_failed_episode_is_absent(world):
    hook = "def post_process(tokenizer, prompt_ids, response_ids, *, context):\n    assert context.episode != 1\n"
    flow = world.workflow(
        [
            {"id": "solve", "hooks": "hook.py"},
            {"id": "rank", "after": ["solve"], "reward": "reward.py:rank", "scope": "group"},
        ],
        files={"hook.py": hook + "    return response_ids\n", "reward.py": RANK},
        episode={"on_user_error": "mask"},
    )
    episodes = play(world, flow)
    assert [episode.fault is not None for episode in episodes] == [False, True, False]
    assert rewards(episodes) == [2.0, None, 4.0]


def test_a_node_after_it_sees_its_rewards(world):
    code = RANK + "def double(episode): return {'agent0': episode.calls[-1].reward}\n"
    after = {"id": "double", "reward": "reward.py:double", "after": ["rank"]}
    before = {"id": "early", "reward": "reward.py:double", "after": ["solve"]}
    assert rewards(play(world, flow_of(world, code, nodes=(after,)))) == [6.0, 8.0, 10.0]
    # one that does not depend on it runs when its episode ends, before any reward is there
    assert rewards(play(world, flow_of(world, code, nodes=(before,)))) == [None] * 3


def test_rewards_are_shared_after_the_group_is_scored(world):
    code = "def rank(episodes): return [{'agent1': 10.0 + episode.index} for episode in episodes]\n"
    nodes = [
        {"id": "a"},
        {"id": "b", "agent": "agent1", "after": ["a"]},
        {"id": "rank", "after": ["b"], "reward": "reward.py:rank", "scope": "group"},
    ]
    flow = world.workflow(nodes, files={"reward.py": code}, algorithm={"share_reward_in_agent": True})
    assert rewards(play(world, flow, n=2)) == [10.0, 10.0, 11.0, 11.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {'agent0': 1.0}", "returned dict, not a list with a dict of rewards for each of the episodes"),
        ("return [{'agent0': 1.0}]", "returned 1 dicts of rewards for 3 episodes"),
        ("return [{'agent0': 1.0}] * 2 + [1.0]", "returned float, not a dict"),
        ("return [{}] * 3", "no reward for agent0"),
        ("return [{'agent0': float('nan')}] * 3", "the reward of agent0 is nan"),
        ("return [{'agent9': 1.0}] * 3", "['agent9']"),
        ("raise KeyError('x')", "KeyError: 'x'"),
    ],
)
def test_a_broken_function_ends_the_run_in_a_line_or_masks_the_group(world, body, message):
    code = f"def rank(episodes):\n    {body}\n"
    with pytest.raises(UserError) as caught:
        play(world, flow_of(world, code))
    assert message in str(caught.value) and "group u0" in str(caught.value)
    with pytest.raises(TooManyFailed, match="all 3 episodes failed"):
        play(world, flow_of(world, code, episode={"on_user_error": "mask"}))


LOSES = """
failures = 0
def rank(episodes):
    global failures
    rewards = [{"agent0": 1.0} for episode in episodes]
    if episodes[0].uid == "u1" and failures < FAILURES:
        failures += 1
        raise ConnectionError("the judge is down")
    return rewards
def info(episode):
    episode.info["times"] = episode.info.get("times", 0) + 1
    return {}
"""


@pytest.mark.parametrize(("failures", "expected"), [(1, [1.0] * 6), (9, [1.0] * 3 + [None] * 3)])
def test_a_lost_connection_is_retried_and_then_fails_the_group_alone(world, failures, expected):
    first = {"id": "info", "reward": "reward.py:info", "after": ["solve"]}
    flow = flow_of(world, LOSES.replace("FAILURES", str(failures)), nodes=(first,), episode={"retries": 1})
    episodes = play(world, flow, samples=2)
    assert rewards(episodes) == expected and all(episode.info == {"times": 1} for episode in episodes)
    lost = [episode.fault is not None for episode in episodes]
    assert lost == [reward is None for reward in expected]
    assert [len(episode.faults) for episode in episodes] == [0] * 3 + [min(failures, 2)] * 3


def test_a_later_batch_scores_the_whole_group_anew(world):
    flow = flow_of(world)
    before = play(world, flow, n=2)
    assert rewards(before) == [2.0, 3.0]
    read = [episode_from(json.loads(json.dumps(episode.to_json()))) for episode in before]  # as from the log
    after = play(world, flow, n=4, earlier=read)
    assert [episode.index for episode in after] == [2, 3]
    assert rewards(read) == [4.0, 5.0] and rewards(after) == [6.0, 7.0]


def test_dynamic_sampling_looks_at_the_rewards_of_the_group(world):
    code = """
def rank(episodes):
    informative = int(episodes[0].uid[1:]) % 2
    return [{"agent0": float(informative * episode.index)} for episode in episodes]
"""
    dynamic = {"drop_zero_variance": True, "dynamic_sampling": {"max_batches": 4}}
    flow = flow_of(world, code, algorithm=dynamic)
    runner = world.runner(flow)

    async def roll_out(batch: int):
        return await run_batch(runner, [(world.sample(), f"u{2 * batch + k}") for k in range(2)], 3, step=0)

    rollouts = asyncio.run(collect(roll_out, rows_of, flow, groups=2))
    assert rollouts.batches == 2 and {row.uid for row in rollouts.rows} == {"u1", "u3"}
