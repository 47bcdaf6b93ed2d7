"""What becomes of a batch some of whose envs break: each costs its own episode."""

from __future__ import annotations

import pytest

from recipe.dag.core import tasks
from recipe.dag.episode import env, event_loops
from recipe.dag.episode.rows import rows_of
from tests.episode.envs_of import batch


def breaking(*, construct: str = "", reset: str = "", step: str = "", close: str = "", word: str = "") -> str:
    """An env for two players, each of whose methods breaks as given in the episode whose sample is bad (its constructor
    in the third instance). HANG: it waits for ever, `word` says how."""

    def when(condition: str, body: str) -> str:
        wait = "await asyncio.Event().wait()" if word else "threading.Event().wait()"
        return f"if {condition}:\n            {body.replace('HANG', wait)}" if body else "pass"

    return f"""
import asyncio, itertools, threading
import numpy as np
count = itertools.count(1)
class E:
    def __init__(self):
        {when("next(count) == 3", construct)}
    {word} def reset(self, sample, seed):
        self.bad = sample["bad"]
        {when("self.bad", reset)}
    {word} def step(self, actions, ground_truth):
        {when("self.bad", step)}
        return ["x", "y"], [1.0, 2.0], True
    {word} def close(self):
        {when("self.bad", close)}
""".replace("     def", "    def")


def six(world, code: str):
    """Episodes of a batch of six, the third one's sample being bad."""
    watch = {"sees_env": True}
    owner = {**watch, "env": ["env.py:E"], "env_pays": True}
    nodes = [
        {"id": "a", **watch},
        {"id": "b", "agent": "agent1", "after": ["a"], **owner},
    ]
    # Long enough for a busy machine, where nothing waits for ever.
    limit = 0.6 if "Event().wait()" in code else 60.0
    episode = {"call_timeout_s": limit, "on_user_error": "mask"}
    flow = world.workflow(nodes, files={"env.py": code}, episode=episode)
    return batch(world, flow, [world.sample(bad=k == 2) for k in range(6)])


def test_an_env_that_catches_every_cancellation_costs_one_episode_of_a_batch(world, monkeypatch):
    monkeypatch.setattr(tasks, "CLEAN_UP_S", 0.05)
    again = """while True:
                try:
                    HANG
                except asyncio.CancelledError:
                    continue"""
    costs_one(six(world, breaking(step=again, word="async")), "step", "step took longer than 0.6 s", calls=2)


BLOCK = "threading.Event().wait()"
"""Without `await`: nothing else runs on the loop, which the six envs share with at most one other."""


@pytest.mark.parametrize("method", ["reset", "step"])
def test_async_code_that_blocks_costs_the_episodes_of_its_loop(world, monkeypatch, method):
    monkeypatch.setattr(tasks, "CLEAN_UP_S", 0.05)
    monkeypatch.setattr(env, "CLOSE_LIMIT_S", 0.05)
    episodes = six(world, breaking(**{method: BLOCK}, word="async"))
    assert f"{method} took longer than 0.6 s" in episodes[2].fault["message"]
    assert sum(episode.fault is None for episode in episodes) >= 4


def test_async_code_that_blocks_when_it_is_closed_costs_nothing(world, monkeypatch):
    monkeypatch.setattr(tasks, "CLEAN_UP_S", 0.05)
    monkeypatch.setattr(env, "CLOSE_LIMIT_S", 0.05)
    monkeypatch.setattr(event_loops, "SHARED", 6)
    episodes = six(world, breaking(close=BLOCK, word="async"))
    assert [episode.fault for episode in episodes] == [None] * 6
    assert [len(episode.faults) for episode in episodes] == [0, 0, 1, 0, 0, 0]


def test_async_code_that_exits_costs_one_episode_of_a_batch(world):
    costs_one(six(world, breaking(step="raise SystemExit(3)", word="async")), "step", "SystemExit(3)", calls=2)


def test_a_hook_that_blocks_all_episodes_is_named(world, monkeypatch, caplog):
    monkeypatch.setattr(event_loops, "BLOCKED_S", 0.4)
    hook = """
import time
class H:
    async def pre_process(self, tokenizer, prompt_ids, obs, *, context):
        time.sleep(3)
        return [{"role": "user", "content": "go"}]
"""
    nodes = [{"id": "a", "hooks": "hook.py:H"}]
    batch(world, world.workflow(nodes, files={"hook.py": hook}), [world.sample()])
    # A busy machine may stop everything for a while, too; that is reported as well, but without the hook.
    reports = [record.getMessage() for record in caplog.records if record.name == event_loops.__name__]
    of_hook = [text for text in reports if "hook.py" in text and "in pre_process" in text]
    assert len(of_hook) == 1 and "async code must not block" in of_hook[0]


def costs_one(episodes, method: str, message: str, *, calls: int) -> None:
    """One episode is lost, for this reason, and nothing of it is learnt; the others are as ever."""
    (lost,) = [episode for episode in episodes if episode.fault]
    assert message in lost.fault["message"] and lost.fault["where"] == f"env.py:E:{method}"
    assert lost.fault["boundary"] == "env" and lost.attempts == 1
    assert [call.reward for call in lost.calls] == [None] * calls
    others = [episode for episode in episodes if episode is not lost]
    assert [[call.reward for call in episode.calls] for episode in others] == [[1.0, 2.0]] * 5
    assert {row.uid for row in rows_of(episodes)} == {episode.uid for episode in others}


@pytest.mark.parametrize("word", ["", "async"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("HANG", "step took longer than 0.6 s"),
        ("raise ValueError('boom')", "ValueError: boom"),
        ("raise StopAsyncIteration", "StopAsyncIteration"),
        ("return None, float('nan'), False", "not a finite number"),
        ("return None, [1.0, -4e38], False", "not a finite number"),
        ("return None, [1.0, np.float32('nan')], False", "not a finite number"),
        ("return None, 0.0, float('nan')", "returned done = float nan, not a bool"),
        ("return None, 0.0, 2", "returned done = int 2, not a bool"),
        ("return ['x'], 0.0, False", "1 observations for 2 players"),
        ("return ['x'] * 3, 0.0, False", "3 observations for 2 players"),
        ("return {'agent0': 1, 'agent7': 2}, 0.0, False", "returned observations for ['agent7']"),
        ("return None, [1.0] * 3, False", "3 rewards for 2 players"),
        ("return None, [], False", "0 rewards for 2 players"),
        ("return None, {'agent0': 1.0}, False", "its players are ['agent0', 'agent1']"),
        ("return None, 0.0, False, {}, {}", "not (obs, reward, done) or (obs, reward, done, info)"),
        ("return None, 0.0, False, [1]", "returned info = list [1], not a dict"),
        ("return None, 0.0, False, {'x': float('nan')}", "an info that is not JSON"),
        ("return None, 0.0, False, {'x': object()}", "an info that is not JSON"),
        ("return 1", "not (obs, reward, done)"),
    ],
)
def test_a_broken_step_costs_one_episode_of_a_batch(world, word, body, message):
    costs_one(six(world, breaking(step=body, word=word)), "step", message, calls=2)


@pytest.mark.parametrize("word", ["", "async"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("HANG", "reset took longer than 0.6 s"),
        ("raise OSError('gone')", "OSError: gone"),
        ("return ['only one']", "1 observations for 2 players"),
    ],
)
def test_a_broken_reset_costs_one_episode_of_a_batch(world, word, body, message):
    costs_one(six(world, breaking(reset=body, word=word)), "reset", message, calls=0)


@pytest.mark.parametrize(
    ("body", "message"), [("HANG", "__init__ took longer than 0.6 s"), ("raise OSError('gone')", "OSError: gone")]
)
def test_a_broken_constructor_costs_one_episode_of_a_batch(world, body, message):
    costs_one(six(world, breaking(construct=body)), "__init__", message, calls=0)


@pytest.mark.parametrize("word", ["", "async"])
@pytest.mark.parametrize("body", ["HANG", "raise OSError('busy')"])
def test_a_close_that_breaks_costs_nothing(world, word, body):
    episodes = six(world, breaking(close=body, word=word))
    assert [episode.fault for episode in episodes] == [None] * 6
    assert [[fault["where"] for fault in episode.faults] for episode in episodes] == [
        ["env.py:E:close"] if k == 2 else [] for k in range(6)
    ]
    assert [call.reward for row in rows_of(episodes) for call in row.calls] == [1.0, 2.0] * 6
