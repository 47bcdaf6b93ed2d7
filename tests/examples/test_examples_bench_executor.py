"""The bench runs, and what a call may cost: operations of Python on the event loop's thread, which no machine's speed
changes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys

import pytest

from examples import bench_executor as bench

CALL_BUDGET = 1_900
"""Calls of functions, Python's and C's, per call of an agent: 1,300 when this was written, 10,500 before."""
TOKEN_BUDGET = 0.1
"""The same, per further token of the prompt: 0.014 when this was written, 16 before."""


@pytest.fixture(scope="module")
def tokenizer():
    return bench.train_tokenizer()


def count_operations(play, episodes: int) -> float:
    """Functions called per call of an agent."""
    count = 0

    def profile(frame, event, argument) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        asyncio.run(play(episodes))
    finally:
        sys.setprofile(None)
    return count / episodes / 3


def test_a_retool_ma_call_stays_in_its_budget_however_many_and_however_long(tokenizer, tmp_path, monkeypatch):
    cost, tokens = {}, {}
    for words in (30, 300):
        monkeypatch.setattr(bench, "WORDS_LONG", words)
        play, server = bench.play_retool_ma(tokenizer, 0.0, tmp_path)
        asyncio.run(play(1))  # templates are compiled, modules imported
        for episodes in (16, 128):
            server.calls, server.tokens = 0, [0, 0]
            cost[words, episodes] = count_operations(play, episodes)
        tokens[words] = server.tokens[0] / server.calls
    assert tokens[30] > 400 and tokens[300] > 3 * tokens[30]
    assert max(cost.values()) < CALL_BUDGET
    assert cost[300, 128] - cost[30, 128] < TOKEN_BUDGET * (tokens[300] - tokens[30])
    assert cost[30, 128] < 1.2 * cost[30, 16]


def test_the_stub_of_the_tool_loop_makes_three_generations(tokenizer, tmp_path):
    play, server = bench.play_tool_loop(tokenizer, 0.0, tmp_path)
    asyncio.run(play(8))
    assert server.calls == 8 * bench.CALLS


def test_it_prints_a_row_for_every_arm(run_example):
    printed = run_example("bench_executor.py", "--episodes", "1", "8", "--rounds", "1", "--wait", "0.001")
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines()[2:]}
    assert list(rows) == ["retool_ma", "chain", "tool_loop", "verl", "verifiers", "langgraph"]
    for name in ("retool_ma", "chain", "tool_loop", "verl"):
        assert all(float(cost) > 0 for cost in rows[name][:2])
    for name in ("verifiers", "langgraph"):
        if importlib.util.find_spec(name) is None:
            assert " ".join(rows[name]).startswith("not installed")
