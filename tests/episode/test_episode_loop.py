"""Loops as an episode runs them."""

from __future__ import annotations

import asyncio

import pytest

from recipe.dag.core.user_code import load_object
from recipe.dag.episode.rows import rows_of
from tests.episode.flows import AGREE, TALK, branches, debate, flow_of, moves, says, skips
from tests.episode.records import call_at


def test_a_loop_runs_until_its_condition_holds(world):
    client = says(world, **TALK, agent2=["no 5", "yes 4", "never"], agent3=["hm 4", "yes 4", "never"])
    episode = world.play(debate(world, until=AGREE), client)
    assert episode.fault is None and episode.skips == []
    assert moves(episode) == [
        ("solve_a", 0, 0),
        ("solve_b", 0, 0),
        ("talk_a", 0, 0),
        ("talk_b", 0, 0),
        ("talk_a", 0, 1),
        ("talk_b", 0, 1),
        ("judge", 0, 0),
    ]
    rows = rows_of([episode], merge=False)
    assert [(call.node, call.round, call.position) for row in rows for call in row.calls] == [
        (call.node, call.round, position) for position, call in enumerate(episode.calls)
    ]


def test_a_branch_tells_how_long_the_loops_before_a_call_ran(world):
    short = world.play(debate(world, until=AGREE), says(world, **TALK, agent2=["4"], agent3=["4"]))
    client = says(world, **TALK, agent2=["5", "4", "4"], agent3=["4", "4", "4"])
    long = world.play(debate(world, until=AGREE, episode={"max_turns": 2}), client)
    assert branches(short)["judge", 0, 0] == "0 debate x1" and branches(long)["judge", 0, 0] == "0 debate x2"
    assert branches(long)["talk_a", 0, 1] == "" and branches(long)["talk_a", 1, 0] == "0 debate x2"
    assert branches(long)["judge", 1, 0] == "0 debate x2; 1 debate x1"


@pytest.mark.parametrize("until", [None, AGREE])
def test_a_loop_never_runs_more_than_its_rounds(world, until):
    client = says(world, **TALK, agent2=["1", "2", "3"], agent3=["4", "5", "6"])
    episode = world.play(debate(world, until=until), client)
    assert [call.text for call in episode.calls if call.agent == "agent2"] == ["1", "2", "3"]
    assert [call.round for call in episode.calls_of("agent3")] == [0, 1, 2]


def test_the_default_prompt_of_a_round_shows_the_round_before(world):
    client = says(world, **TALK, agent2=["a0", "a1"], agent3=["b0", "b1"])
    episode = world.play(debate(world, max_rounds=2), client)
    prompts = {(call.node, call.round): call.prompt_text for call in episode.calls}
    head = "agent0:\nit is 4\n\nagent1:\nit is 5"
    assert f"{head}<" in prompts["talk_a", 0]
    assert f"{head}\n\nagent2:\na0<" in prompts["talk_b", 0]
    assert f"{head}\n\nagent2:\na0\n\nagent3:\nb0<" in prompts["talk_a", 1]
    assert f"{head}\n\nagent2:\na1\n\nagent3:\nb0<" in prompts["talk_b", 1]
    assert "agent3:\nb1<" in prompts["judge", 0]


def test_what_a_node_sees_in_a_loop(world):
    flow = debate(world, hook="seen.py", max_rounds=2, episode={"max_turns": 2})
    episode = world.play(flow)
    assert episode.fault is None
    seen = {entry[:3]: entry[3:] for entry in load_object("seen.py", flow.path).seen}
    solved = {"solve_a": (0, 0), "solve_b": (0, 0)}
    assert seen["talk_a", 0, 0] == (2, solved, [])
    assert seen["talk_b", 0, 0] == (2, {**solved, "talk_a": (0, 0)}, [])
    assert seen["talk_a", 0, 1] == (2, {**solved, "talk_a": (0, 0), "talk_b": (0, 0)}, [(0, 0)])
    assert seen["talk_b", 0, 1] == (2, {**solved, "talk_a": (0, 1), "talk_b": (0, 0)}, [(0, 0)])
    assert seen["judge", 0, 0] == (1, {**solved, "talk_a": (0, 1), "talk_b": (0, 1)}, [])
    again = {"solve_a": (1, 0), "solve_b": (1, 0)}
    # The turn before is seen as it ended.
    assert seen["talk_a", 1, 0] == (2, {**again, "talk_a": (0, 1), "talk_b": (0, 1), "judge": (0, 0)}, [(0, 0), (0, 1)])
    assert seen["talk_b", 1, 1][1] == {**again, "talk_a": (1, 1), "talk_b": (1, 0), "judge": (0, 0)}
    assert seen["solve_b", 1, 0][1]["solve_b"] == (0, 0)


def test_generations_of_two_rounds_have_two_seeds_and_round_0_keeps_its_own(world):
    looped, plain = (says(world, **TALK, agent2="x", agent3="y") for _ in range(2))
    world.play(debate(world, max_rounds=3), looped)
    world.play(debate(world, max_rounds=1), plain)
    seeds = {request: [] for request, _, _ in looped.requests}
    for request, _, sampling in looped.requests:
        seeds[request].append(sampling["seed"])
    assert len({seed for own in seeds.values() for seed in own}) == len(looped.requests) == 9
    assert {request: [own[0]] for request, own in seeds.items()} == {
        request: [sampling["seed"]] for request, _, sampling in plain.requests
    }


def test_a_branch_inside_a_loop_and_the_nodes_that_wait_for_it(world):
    """The critic stops the loop; the fixer works only where the critic says so; the reader hears the last fix."""
    nodes = {
        "critic": {},
        "fixer": {"after": ["critic"], "when": {"node": "critic", "key": "answer", "equals": "fix"}},
        "reader": {"after": ["fixer"]},
    }
    until = {"node": "critic", "key": "answer", "equals": "good"}
    loops = {"repair": {"nodes": ["critic", "fixer"], "max_rounds": 5, "until": until}}
    flow = flow_of(world, nodes, loops=loops)
    client = says(world, agent0=["fix", "fix", "good"], agent1=["first", "second"], agent2="read")
    episode = world.play(flow, client)
    assert skips(episode) == [("fixer", 0, 2, "when")]
    assert [call.round for call in episode.calls_of("agent1")] == [0, 1]
    assert "agent1:\nsecond" in call_at(episode, "reader").prompt_text
    assert "agent1:\nfirst" in episode.calls[2].prompt_text  # the critic, one round later
    good = world.play(flow, says(world, agent0="good", agent2="read"))
    assert skips(good) == [("fixer", 0, 0, "when"), ("reader", 0, 0, "dependencies")]


def test_a_round_in_which_all_nodes_are_skipped_is_the_last(world):
    """Where the solvers agree there is no debate."""
    nodes = {
        "a": {},
        "b": {},
        "talk": {"after": ["a", "b"], "when": {"none_of": [{"agree": ["a", "b"]}]}},
        "vote": {"vote": {}, "after": ["talk"]},
        "judge": {"after": ["a", "b", "vote"]},
    }
    flow = flow_of(world, nodes, loops={"debate": {"nodes": ["talk", "vote"], "max_rounds": 3}})
    episode = world.play(flow, says(world, agent0="is 4", agent1="be 4", agent4="so 4"))
    assert skips(episode) == [("talk", 0, 0, "when"), ("vote", 0, 0, "dependencies")]
    assert [call.node for call in episode.calls] == ["a", "b", "judge"]
    episode = world.play(flow, says(world, agent0="is 4", agent1="be 5", agent2="so", agent4="so 4"))
    assert [call.round for call in episode.calls_of("agent2")] == [0, 1, 2] and not episode.skips


def test_an_agent_that_is_done_ends_its_loop_and_the_turn_is_finished(world):
    client = says(world, **TALK, agent2=["stop 1", "2", "3"], agent3=["4", "5", "6"])
    episode = world.play(debate(world, episode={"max_turns": 4}), client)
    assert moves(episode)[2:] == [("talk_a", 0, 0), ("talk_b", 0, 0), ("judge", 0, 0)]
    assert (episode.done, episode.turns, episode.ended_by) == (True, 1, "done")


def test_loops_do_not_wait_for_what_runs_beside_them(world):
    flow = flow_of(world, {"talk": {}, "slow": {}}, loops={"l": {"nodes": ["talk"], "max_rounds": 3}})

    async def main():
        third = asyncio.Event()

        async def script(prompt, sampling, request):
            if request.endswith("agent1"):
                await third.wait()  # Set in the loop's last round.
            elif len(client.requests) >= 4:
                third.set()
            return "x"

        client = world.Client(script)
        return await asyncio.wait_for(world.runner(flow, client).run(world.sample(), "u", 0, step=0), 20)

    assert moves(asyncio.run(main())) == [("talk", 0, 0), ("talk", 0, 1), ("talk", 0, 2), ("slow", 0, 0)]


def test_agents_sample_and_use_tools_as_their_own_in_every_round(world):
    nodes = {"coder": {}, "critic": {"after": ["coder"], "when": {"node": "coder", "matches": "done"}}}
    agents = [
        {"tools": ["calc"], "tool_loop": {}, "sampling": {"temperature": 0.5}, "validation": {"temperature": 0.0}},
        {"sampling": {"temperature": 0.9, "max_tokens": 7}, "validation": {"max_tokens": 5}},
    ]
    flow = flow_of(world, nodes, hook=None, agents=agents, loops={"l": {"nodes": ["coder", "critic"], "max_rounds": 2}})
    use = '<tool_call>{"name": "calc", "arguments": {}}</tool_call>'

    def run(validate: bool):
        client = says(world, agent0=[use, "done", use, "done"], agent1="ok")
        counts = []

        def work(arguments, state):
            state["uses"] = state.get("uses", 0) + 1
            counts.append(state["uses"])
            return str(state["uses"])

        episode = world.play(flow, client, [world.Tool("calc", work)], validate=validate)
        assert episode.fault is None and counts == [1, 2]  # the tool's state lives through the rounds
        assert [len(call.tool_results) for call in episode.calls] == [1, 0, 1, 0]
        assert all("calc" in prompt for request, prompt, _ in client.requests if request.endswith("0"))
        assert not any("['calc']" in prompt for request, prompt, _ in client.requests if request.endswith("1"))
        shown = {request[-1]: set() for request, _, _ in client.requests}
        for request, _, sampling in client.requests:
            shown[request[-1]].add((sampling["temperature"], sampling["max_tokens"]))
        return shown

    assert run(False) == {"0": {(0.5, 512)}, "1": {(0.9, 7)}}
    assert run(True) == {"0": {(0.0, 512)}, "1": {(0.9, 5)}}


def test_what_a_round_appends_to_its_own_prompt_merges_into_one_row(world):
    grow = """
def pre_process(tokenizer, prompt_ids, obs, *, context):
    if not context.history:
        return prompt_ids
    last = context.history[-1]
    return last.prompt_ids + last.response_ids + tokenizer.encode(" again ")
"""
    nodes = {"talk": {}, "other": {"after": ["talk"]}}
    flow = flow_of(
        world, nodes, hook="grow.py", files={"grow.py": grow}, loops={"l": {"nodes": ["talk"], "max_rounds": 3}}
    )
    talk, other = rows_of([world.play(flow)])
    assert [(call.round, call.position) for call in talk.calls] == [(0, 0), (1, 1), (2, 2)]
    assert [(call.round, call.position) for call in other.calls] == [(0, 3)]
