"""Branches as an episode runs them, and the record of all that passes by nodes."""

from __future__ import annotations

import asyncio
import json

import pytest

from recipe.dag.episode.rows import rows_of
from tests.episode.flows import branches, flow_of, moves, router, says, skips, voters
from tests.episode.records import call_at, episode_from_json


@pytest.mark.parametrize(
    ("route", "ran", "skipped"),
    [
        ("math", ["route", "math", "join"], [("code", 0, 0, "when"), ("deep", 0, 0, "dependencies")]),
        ("code", ["route", "code", "deep", "join"], [("math", 0, 0, "when")]),
        (
            "none",
            ["route"],
            [(name, 0, 0, "when") for name in ("math", "code")]
            + [(name, 0, 0, "dependencies") for name in ("deep", "join")],
        ),
    ],
)
def test_a_branch_runs_what_its_condition_says(world, route, ran, skipped):
    client = says(world, agent0=f"go {route}", agent1="by math", agent2="by code", agent3="deeper", agent4="joined")
    episode = world.play(router(world), client)
    assert episode.fault is None
    assert [call.node for call in episode.calls] == ran
    assert skips(episode) == sorted(skipped, key=lambda skip: ["math", "code", "deep", "join"].index(skip[0]))
    assert [skip.agent for skip in episode.skips] == [
        {"math": "agent1", "code": "agent2", "deep": "agent3", "join": "agent4"}[skip[0]] for skip in skips(episode)
    ]
    assert [row.calls[0].agent for row in rows_of([episode])] == [call.agent for call in episode.calls]


def test_a_branch_is_what_was_skipped_on_the_way_to_a_call(world):
    lines = {"agent1": "by math", "agent2": "by code", "agent3": "deeper", "agent4": "joined"}
    math, code = (world.play(router(world), says(world, agent0=f"go {way}", **lines)) for way in ("math", "code"))
    # that it took this way itself is no news to an alternative
    assert branches(math) == {
        ("route", 0, 0): "",
        ("math", 0, 0): "",
        ("join", 0, 0): "0.0 without code; 0.0 without deep",
    }
    assert branches(code)["join", 0, 0] == "0.0 without math" and branches(code)["deep", 0, 0] == ""
    rows = rows_of([math], merge=False)
    assert [call.branch for row in rows for call in row.calls] == [call.branch for call in math.calls]


def test_a_branch_contains_earlier_turns_but_not_the_peers_of_this_turn(world):
    nodes = {"solve": {}, "hint": {"when": {"node": "solve", "matches": "help"}}, "peer": {}}
    flow = flow_of(world, nodes, episode={"max_turns": 2})
    episode = world.play(flow, says(world, agent0=["please help", "fine"], agent1="a hint", agent2="hm"))
    assert moves(episode) == [("solve", 0, 0), ("peer", 0, 0), ("solve", 1, 0), ("hint", 1, 0), ("peer", 1, 0)]
    assert list(branches(episode).values()) == ["", "", *["0.0 without hint"] * 3]


def test_a_join_hears_only_the_branch_that_ran(world):
    client = says(world, agent0="go math", agent1="by math", agent4="joined")
    episode = world.play(router(world), client)
    join = call_at(episode, "join").prompt_text
    assert "agent1:\nby math" in join and "agent3" not in join


def test_what_was_skipped_in_this_turn_is_not_heard_from_the_turn_before(world):
    client = says(world, agent0=["go math", "go code"], agent1="by math", agent2="by code", agent3="deep", agent4="end")
    episode = world.play(router(world, episode={"max_turns": 2}), client)
    assert "agent1:\nby math" in episode.calls[2].prompt_text
    late = call_at(episode, "join").prompt_text
    assert "agent3:\ndeep" in late and "by math" not in late


def test_a_branch_may_look_at_the_sample_and_at_the_turn_before(world):
    nodes = {
        "solve": {},
        "hint": {"when": {"all_of": [{"sample": "level", "at_least": 2}, {"node": "solve", "matches": "help"}]}},
    }
    flow = flow_of(world, nodes, episode={"max_turns": 3})

    async def main():
        made = world.runner(flow, says(world, agent0=["please help", "fine", "fine"] * 2, agent1="a hint"))
        return [await made.run(world.sample(level=level), "u", 0, step=0) for level in (2, 1)]

    hard, easy = asyncio.run(main())
    assert [skip[1] for skip in skips(hard)] == [0, 2]
    assert [skip[1] for skip in skips(easy)] == [0, 1, 2]


def test_a_record_with_all_of_it_survives_json(world):
    client = says(world, agent0="7", agent1="5", agent2="5", agent3="7", agent5="end")
    episode = world.play(voters(world, loops={"l": {"nodes": ["v0"], "max_rounds": 2}}), client)
    branch = world.play(router(world), says(world, agent0="none"))
    assert episode.results and branch.skips
    for made in (episode, branch):
        data = json.loads(json.dumps(made.to_json(), allow_nan=False))
        assert episode_from_json(data) == made
        for key in ("results", "skips", "ended_by"):
            del data[key]  # as a record from before there were such things
        for call in data["calls"]:
            del call["round"], call["env_info"]
        assert episode_from_json(data).ended_by == ""
