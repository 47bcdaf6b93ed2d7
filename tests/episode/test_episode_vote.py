"""Vote and compute nodes as an episode runs them."""

from __future__ import annotations

import json

import pytest

from recipe.dag.core.errors import UserError
from tests.episode.flows import flow_of, says, skips, voters
from tests.episode.records import call_at


def test_a_vote_takes_the_majority_and_is_seen_downstream(world):
    client = says(world, agent0="a 7", agent1="b 5", agent2="c 5", agent3="", agent5="end")
    episode = world.play(voters(world), client)
    (result,) = episode.results
    assert (result.node, result.turn, result.round, result.text) == ("vote", 0, 0, "5")
    assert result.parsed == {"answer": "5", "share": 2 / 3, "votes": {"5": 2, "7": 1}}
    assert "vote:\n5<" in call_at(episode, "last").prompt_text
    assert [call.node for call in episode.calls] == ["v0", "v1", "v2", "v3", "last"]


@pytest.mark.parametrize(("ties", "winner"), [("first", "7"), ("none", None)])
def test_ties(world, ties, winner):
    client = says(world, agent0="7", agent1="5", agent2="5", agent3="7", agent5="end")
    episode = world.play(voters(world, ties), client)
    assert episode.results[0].parsed["answer"] == winner
    assert ('vote:\n{"answer": null' in call_at(episode, "last").prompt_text) is (winner is None)


def test_a_skipped_voter_abstains(world):
    flow = voters(world, v2={"when": {"sample": "missing", "exists": True}})
    episode = world.play(flow, says(world, agent0="7", agent1="7", agent3="5", agent5="end"))
    assert episode.results[0].parsed == {"answer": "7", "share": 2 / 3, "votes": {"7": 2, "5": 1}}


def test_a_loop_may_vote_and_stop_on_the_outcome(world):
    nodes = {
        "a": {},
        "b": {},
        "c": {},
        "vote": {"vote": {}, "after": ["a", "b", "c"]},
        "speaker": {"after": ["vote"]},
    }
    until = {"node": "vote", "key": "share", "at_least": 1.0}
    loops = {"debate": {"nodes": ["a", "b", "c", "vote"], "max_rounds": 4, "until": until}}
    client = says(world, agent0=["1", "2", "2"], agent1=["2", "2", "2"], agent2=["3", "3", "2"], agent4="two")
    episode = world.play(flow_of(world, nodes, loops=loops), client)
    assert [(r.round, r.parsed["share"]) for r in episode.results] == [(0, 1 / 3), (1, 2 / 3), (2, 1.0)]
    # In the next round every debater hears how the vote went.
    assert "vote:\n2" in [call.prompt_text for call in episode.calls if (call.node, call.round) == ("a", 2)][0]
    assert "vote:\n2" in call_at(episode, "speaker").prompt_text


COMPUTE = """
import asyncio, threading
from recipe.dag.types.context import Output
def merge(context, *, scale=1):
    assert threading.current_thread() is not threading.main_thread()
    texts = [context.upstream[name].text for name in ("a", "b")]
    return {"sum": scale * sum(map(int, texts)), "turn": context.turn, "problem": context.problem}
async def name(context):
    return f"sum is {context.results['merge'].parsed['sum']}"
def finish(context):
    return Output(text="", parsed={"big": True}, done=context.results["merge"].parsed["sum"] > 100)
async def hang(context): await asyncio.Event().wait()
def sync_hang(context): threading.Event().wait()
def broken(context): return {}["x"]
def number(context): return 3
def opaque(context): return {"x": object()}
async def tools(context): return (await context.call_tool("calc", n=1)).text
"""


def computed(world, ref: str = "merge", scale: int = 1, **keys):
    nodes = {
        "a": {},
        "b": {},
        "merge": {
            "after": ["a", "b"],
            "compute": f"compute.py:{ref}",
            "args": {"scale": scale} if ref == "merge" else {},
        },
        "say": {"after": ["merge"], "compute": "compute.py:name"},
        "end": {"after": ["merge"], "compute": "compute.py:finish"},
        "last": {"after": ["say", "merge"], "when": {"node": "merge", "key": "sum", "at_least": 10}},
    }
    if ref != "merge":
        nodes = {name: node for name, node in nodes.items() if name in ("a", "b", "merge")}
    return flow_of(world, nodes, files={"compute.py": COMPUTE}, **keys)


def test_compute_nodes_hand_their_results_on(world):
    episode = world.play(computed(world, scale=2), says(world, agent0="3", agent1="4", agent5="bye"))
    assert episode.fault is None and not episode.done
    assert [(r.node, r.text, r.parsed) for r in episode.results] == [
        ("merge", "", {"sum": 14, "turn": 0, "problem": "question"}),
        ("say", "sum is 14", {}),
        ("end", "", {"big": True}),
    ]
    prompt = call_at(episode, "last").prompt_text
    assert "say:\nsum is 14\n\nmerge:\n" in prompt and json.dumps(episode.results[0].parsed) in prompt
    small = world.play(computed(world), says(world, agent0="3", agent1="4"))
    assert skips(small) == [("last", 0, 0, "when")]


def test_a_compute_node_may_end_the_episode(world):
    client = says(world, agent0="60", agent1="60", agent5="bye")
    episode = world.play(computed(world, episode={"max_turns": 3}), client)
    assert (episode.turns, episode.ended_by, call_at(episode, "last").text) == (1, "done", "bye")


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("hang", "the function took longer than 0.6 s"),
        ("sync_hang", "the function took longer than 0.6 s"),
        ("broken", "KeyError: 'x'"),
        ("number", "returned int 3, not an Output, a str or a dict"),
        ("opaque", "is not JSON"),
        ("tools", "called the tool 'calc', but only agents have tools"),
    ],
)
def test_a_broken_compute_node_costs_its_episode(world, ref, message):
    spec = {"call_timeout_s": 0.6 if "hang" in ref else 60.0, "on_user_error": "mask"}
    flow = computed(world, ref, episode=spec)
    episode = world.play(flow, says(world, agent0="3", agent1="4"))
    assert episode.fault["boundary"] == "hook" and message in episode.fault["message"]
    assert episode.fault["where"].startswith("node merge")
    assert [call.text for call in episode.calls] == ["3", "4"] and episode.results == []


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"compute": "compute.py:nothing"}, "defines no `nothing`"),
        ({"compute": "compute.py"}, "node merge: compute.py is not a function"),
        (
            {"compute": "compute.py:short"},
            "node merge: compute.py:short must take the positional arguments",
        ),
    ],
)
def test_compute_nodes_that_cannot_run_are_refused_at_once(world, node, message):
    files = {"compute.py": f"{COMPUTE}\nshort = lambda: {{}}\n"}  # a value, into which the file's checks do not look
    flow = flow_of(world, {"a": {}, "merge": node}, files=files)
    with pytest.raises(UserError, match=message):
        world.runner(flow)
