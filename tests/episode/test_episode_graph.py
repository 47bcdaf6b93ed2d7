from __future__ import annotations

import asyncio

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.episode.graph import episode_graph


def diamond(world, **keys):
    nodes = [
        {"id": "plan", "agent": "agent0"},
        {"id": "left", "agent": "agent1", "after": ["plan"]},
        {"id": "right", "agent": "agent2", "after": ["plan"]},
        {"id": "judge", "agent": "agent3", "after": ["left", "right"]},
    ]
    return world.workflow(nodes, **keys)


def test_vote_and_compute_nodes_are_nodes_of_the_graph(world):
    flow = world.workflow(
        [
            {"id": "a"},
            {"id": "mix", "after": ["a"], "compute": "f.py:f"},
            {"id": "b", "after": ["mix"]},
            {"id": "reward", "after": ["b"], "reward": "f.py:f"},
        ]
    )
    a, mix, b = episode_graph(flow).nodes
    assert [node.ancestors for node in (a, mix, b)] == [frozenset(), {"a"}, {"a", "mix"}]
    assert (b.after, mix.agent) == (("mix",), None)


def looped(world, dependencies: dict[str, list[str]], loops: dict, **keys):
    """One agent per node."""
    nodes = [
        {"id": name, "agent": f"agent{group}", "after": needs}
        for group, (name, needs) in enumerate(dependencies.items())
    ]
    return world.workflow(nodes, loops=loops, **keys)


def test_a_loops_nodes_are_adjacent_and_waiting_for_one_is_waiting_for_all(world):
    needs = {"c": ["a"], "a": [], "x": [], "b": ["x"], "d": ["c"]}
    graph = episode_graph(looped(world, needs, {"talk": {"nodes": ["c", "b"], "max_rounds": 2}}))
    assert [node.id for node in graph.nodes] == ["a", "x", "c", "b", "d"]
    ancestors = {node.id: node.ancestors for node in graph.nodes}
    assert ancestors["c"] == {"a"} and ancestors["b"] == {"x"}
    assert ancestors["d"] == {"a", "x", "b", "c"}
    slots = [("d", 0), ("b", 1), ("c", 1), ("x", 0), ("b", 0), ("c", 0)]
    assert sorted(slots, key=graph.causal) == [("x", 0), ("c", 0), ("b", 0), ("c", 1), ("b", 1), ("d", 0)]


@pytest.mark.parametrize(
    ("loops", "message"),
    [
        ({"l": {"nodes": ["a", "c"], "max_rounds": 2}}, "cycle: loop l -> b -> loop l; add the nodes between them"),
        ({"l": {"nodes": ["a"], "max_rounds": 2}, "m": {"nodes": ["a"], "max_rounds": 2}}, "node a is already in"),
        ({"l": {"nodes": ["z"], "max_rounds": 2}}, "loop l: z does not run in an episode"),
    ],
)
def test_loops_that_cannot_run_are_refused(world, loops, message):
    with pytest.raises(UserError, match=message):
        episode_graph(looped(world, {"a": [], "b": ["a"], "c": ["b"]}, loops))


def test_calls_are_in_graph_order_whichever_ends_first(world):
    first = asyncio.Event

    async def main():
        right_done = first()

        async def script(prompt, sampling, request):
            if request.endswith("agent1"):
                await right_done.wait()
            if request.endswith("agent2"):
                right_done.set()
            return request

        made = world.runner(diamond(world), world.Client(script))
        return await made.run(world.sample(), "u", 3, step=0)

    episode = asyncio.run(main())
    assert [call.node for call in episode.calls] == ["plan", "left", "right", "judge"]
    assert [call.text for call in episode.calls] == [f"u-3-agent{k}" for k in range(4)]
    assert episode.fault is None and episode.turns == 1


def test_parallel_nodes_overlap(world):
    async def main():
        both = asyncio.Barrier(2)

        async def script(prompt, sampling, request):
            if request.endswith(("agent1", "agent2")):
                await both.wait()  # Deadlocks unless both generate at once.
            return "x"

        made = world.runner(diamond(world), world.Client(script))
        return await asyncio.wait_for(made.run(world.sample(), "u", 0, step=0), 20)

    assert asyncio.run(main()).fault is None


def test_a_fan_in_reads_both_branches_and_parallel_nodes_do_not_read_each_other(world):
    client = world.Client(lambda prompt, sampling, request: f"by {request[-6:]}")
    world.play(diamond(world), client)
    prompts = {request[-6:]: prompt for request, prompt, _ in client.requests}
    assert "agent1:\nby agent1\n\nagent2:\nby agent2" in prompts["agent3"]
    assert "by agent0" not in prompts["agent3"]
    for reader in ("agent1", "agent2"):
        assert "agent0:\nby agent0" in prompts[reader]
        assert "by agent1" not in prompts[reader] and "by agent2" not in prompts[reader]


def test_a_node_sees_ancestors_of_this_turn_and_the_others_of_the_turn_before(world):
    code = """
seen = []
def pre_process(tokenizer, prompt_ids, obs, context=None):
    upstream = {name: call.turn for name, call in context.upstream.items()}
    seen.append((context.node, context.turn, upstream, [call.turn for call in context.history]))
    return prompt_ids
"""
    nodes = [
        {"id": name, "agent": f"agent{group}", "after": needs, "hooks": "seen.py"}
        for name, group, needs in (("a", 0, []), ("b", 1, []), ("c", 0, ["a"]))
    ]
    flow = world.workflow(nodes, files={"seen.py": code}, episode={"max_turns": 2})
    made = world.runner(flow)
    asyncio.run(made.run(world.sample(), "u", 0, step=0))
    from recipe.dag.core.user_code import load_object

    seen = {entry[:2]: entry[2:] for entry in load_object("seen.py", flow.path).seen}
    assert seen["a", 0] == ({}, [])
    assert seen["b", 0] == ({}, [])
    assert seen["c", 0] == ({"a": 0}, [0])
    assert seen["a", 1] == ({"a": 0, "b": 0, "c": 0}, [0, 0])
    assert seen["c", 1] == ({"a": 1, "b": 0, "c": 0}, [0, 0, 1])


def test_turns_go_on_until_an_output_is_done_and_the_turn_is_finished_first(world):
    code = """
from recipe.dag.types.context import Output
def post_process(tokenizer, prompt_ids, response_ids, context=None):
    return Output(text=f"turn {context.turn}", done=context.turn == 1)
"""
    nodes = [
        {"id": "a", "hooks": "done.py"},
        {"id": "b", "agent": "agent1", "after": ["a"]},
    ]
    episode = world.play(world.workflow(nodes, files={"done.py": code}, episode={"max_turns": 5}))
    assert [(call.node, call.turn) for call in episode.calls] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert episode.done and episode.turns == 2


def test_max_turns_ends_an_episode_that_no_node_ends(world):
    client = world.Client(lambda prompt, sampling, request: f"call{len(client.requests)}")
    episode = world.play(world.workflow([{"id": "a"}], episode={"max_turns": 3}), client)
    assert (episode.turns, episode.done, len(episode.calls)) == (3, False, 3)
    assert "agent0:\ncall1" in episode.calls[1].prompt_text


@pytest.mark.parametrize(
    ("group", "players"),
    [({"first": 1, "second": 0}, ("second", "first", "own")), ({"first": 0, "second": 1}, ("first", "second", "own"))],
)
def test_players_are_in_agent_order_up_to_the_owner(world, group, players):
    watch = {"sees_env": True}
    flow = world.workflow(
        [
            {"id": "first", "agent": f"agent{group['first']}", **watch},
            {"id": "second", "agent": f"agent{group['second']}", **watch},
            {"id": "blind", "agent": "agent2"},
            {"id": "own", "agent": "agent3", **watch, "env": ("e.py:E",)},
            {"id": "later", "agent": "agent4", **watch},
        ]
    )
    assert episode_graph(flow).players({"own": "e.py:E"}) == {"own": players}


def test_players_of_a_node_in_a_loop_are_of_its_loop(world):
    watch = {"sees_env": True}
    nodes = [
        {"id": name, "agent": f"agent{group}", **watch} for group, name in enumerate(("before", "a", "b", "after"))
    ]
    graph = episode_graph(world.workflow(nodes, loops={"talk": {"nodes": ["a", "b"], "max_rounds": 2}}))
    assert graph.players({"b": "e"}) == {"b": ("a", "b")}
    assert graph.players({"after": "e"}) == {"after": ("before", "a", "b", "after")}
    assert graph.players({"a": "f", "after": "e"})["after"] == ("before", "b", "after")
