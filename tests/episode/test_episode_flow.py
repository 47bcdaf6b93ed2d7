"""Branches, loops, votes and compute nodes as an episode runs them."""

from __future__ import annotations

import asyncio
import json

import pytest

from recipe.dag.episode.record import Episode
from recipe.dag.episode.rows import rows_of
from recipe.dag.errors import UserError
from recipe.dag.workflow.user_code import load_object

PARSE = """
from recipe.dag.episode.context import Output
def post_process(tokenizer, prompt_ids, response_ids, *, context):
    text = context.call.text
    return Output(parsed={"answer": text.split()[-1] if text else None}, done="stop" in text)
"""
SEEN = """
from recipe.dag.episode.context import Output
seen = []
def pre_process(tokenizer, prompt_ids, obs, *, context):
    upstream = {name: (call.turn, call.round) for name, call in context.upstream.items()}
    history = [(call.turn, call.round) for call in context.history]
    seen.append((context.node, context.turn, context.round, context.max_rounds, upstream, history))
    return prompt_ids
"""


def flow_of(world, nodes: dict[str, dict], *, hook: str | None = "parse.py", **keys):
    """One agent per rollout node."""
    listed = []
    for group, (name, node) in enumerate(nodes.items()):
        role = node.get("node_role", "ROLLOUT")
        options = {"process_path": hook} if role == "ROLLOUT" and hook else {}
        options |= node.pop("agent_options", {})
        listed.append({"node_id": name, "agent_group": group, "agent_options": options, **node})
    files = {"parse.py": PARSE, "seen.py": SEEN, **keys.pop("files", {})}
    return world.workflow(listed, files=files, **keys)


def says(world, **lines):
    """`lines`: what agent k of the workflow says, by "agentK"; a list: one after another."""

    def script(prompt, sampling, request):
        line = lines[request.rsplit("-", 1)[1]]
        return line.pop(0) if isinstance(line, list) else line

    return world.Client(script)


def moves(episode: Episode) -> list[tuple]:
    return [(call.node, call.turn, call.round) for call in episode.calls]


def skips(episode: Episode) -> list[tuple]:
    return [(skip.node, skip.turn, skip.round, skip.reason) for skip in episode.skips]


def router(world, **keys):
    """An agent names a branch; a join waits for both."""
    nodes = {
        "route": {},
        "math": {"dependencies": ["route"], "when": {"node": "route", "key": "answer", "equals": "math"}},
        "code": {"dependencies": ["route"], "when": {"node": "route", "key": "answer", "equals": "code"}},
        "deep": {"dependencies": ["code"]},
        "join": {"dependencies": ["math", "deep"]},
    }
    return flow_of(world, nodes, **keys)


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
    assert [row.agent for row in rows_of([episode])] == [call.agent for call in episode.calls]


def branches(episode: Episode) -> dict[tuple, str]:
    return {(call.node, call.turn, call.round): call.branch for call in episode.calls}


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
    assert [row.call_branches for row in rows] == [(call.branch,) for call in math.calls]


def test_a_branch_remembers_the_turns_before_and_no_peers_of_this_one(world):
    nodes = {"solve": {}, "hint": {"when": {"node": "solve", "matches": "help"}}, "peer": {}}
    flow = flow_of(world, nodes, episode={"max_turns": 2})
    episode = world.play(flow, says(world, agent0=["please help", "fine"], agent1="a hint", agent2="hm"))
    assert moves(episode) == [("solve", 0, 0), ("peer", 0, 0), ("solve", 1, 0), ("hint", 1, 0), ("peer", 1, 0)]
    assert list(branches(episode).values()) == ["", "", *["0.0 without hint"] * 3]


def test_a_join_hears_only_the_branch_that_ran(world):
    client = says(world, agent0="go math", agent1="by math", agent4="joined")
    episode = world.play(router(world), client)
    join = episode.call_at("join").prompt_text
    assert "agent1:\nby math" in join and "agent3" not in join


def test_what_was_skipped_in_this_turn_is_not_heard_from_the_turn_before(world):
    client = says(world, agent0=["go math", "go code"], agent1="by math", agent2="by code", agent3="deep", agent4="end")
    episode = world.play(router(world, episode={"max_turns": 2}), client)
    assert "agent1:\nby math" in episode.calls[2].prompt_text
    late = episode.call_at("join").prompt_text
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


def debate(world, *, hook: str = "parse.py", until: dict | None = None, max_rounds: int = 3, **keys):
    """Two solvers, two debaters in a loop, and a judge."""
    nodes = {
        "solve_a": {},
        "solve_b": {},
        "talk_a": {"dependencies": ["solve_a", "solve_b"]},
        "talk_b": {"dependencies": ["solve_a", "solve_b", "talk_a"]},
        "judge": {"dependencies": ["talk_b"]},
    }
    loop = {"nodes": ["talk_a", "talk_b"], "max_rounds": max_rounds, "until": until}
    return flow_of(world, nodes, hook=hook, loops={"debate": loop}, **keys)


TALK = {"agent0": "it is 4", "agent1": "it is 5", "agent4": "judged 4"}
AGREE = {"agree": ["talk_a", "talk_b"]}


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
    assert [(row.node, row.round, row.call_positions) for row in rows] == [
        (call.node, call.round, (position,)) for position, call in enumerate(episode.calls)
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


def test_a_branch_inside_a_loop_and_who_waits_for_it(world):
    """The critic stops the loop; the fixer works only where the critic says so; the reader hears the last fix."""
    nodes = {
        "critic": {},
        "fixer": {"dependencies": ["critic"], "when": {"node": "critic", "key": "answer", "equals": "fix"}},
        "reader": {"dependencies": ["fixer"]},
    }
    until = {"node": "critic", "key": "answer", "equals": "good"}
    loops = {"repair": {"nodes": ["critic", "fixer"], "max_rounds": 5, "until": until}}
    flow = flow_of(world, nodes, loops=loops)
    client = says(world, agent0=["fix", "fix", "good"], agent1=["first", "second"], agent2="read")
    episode = world.play(flow, client)
    assert skips(episode) == [("fixer", 0, 2, "when")]
    assert [call.round for call in episode.calls_of("agent1")] == [0, 1]
    assert "agent1:\nsecond" in episode.call_at("reader").prompt_text
    assert "agent1:\nfirst" in episode.calls[2].prompt_text  # the critic, one round later
    good = world.play(flow, says(world, agent0="good", agent2="read"))
    assert skips(good) == [("fixer", 0, 0, "when"), ("reader", 0, 0, "dependencies")]


def test_a_round_in_which_nobody_moves_is_the_last(world):
    """Where the solvers agree there is no debate."""
    nodes = {
        "a": {},
        "b": {},
        "talk": {"dependencies": ["a", "b"], "when": {"none_of": [{"agree": ["a", "b"]}]}},
        "vote": {"node_role": "VOTE", "dependencies": ["talk"]},
        "judge": {"dependencies": ["a", "b", "vote"]},
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


def voters(world, ties: str = "first", v2: dict | None = None, **keys):
    nodes = {
        **{f"v{k}": {} for k in range(4)},
        "v2": v2 or {},
        "vote": {"node_role": "VOTE", "dependencies": ["v0", "v1", "v2", "v3"], "vote": {"ties": ties}},
        "last": {"dependencies": ["vote"]},
    }
    return flow_of(world, nodes, **keys)


def test_a_vote_takes_the_majority_and_is_seen_downstream(world):
    client = says(world, agent0="a 7", agent1="b 5", agent2="c 5", agent3="", agent5="end")
    episode = world.play(voters(world), client)
    (result,) = episode.results
    assert (result.node, result.turn, result.round, result.text) == ("vote", 0, 0, "5")
    assert result.parsed == {"answer": "5", "share": 2 / 3, "votes": {"5": 2, "7": 1}}
    assert "vote:\n5<" in episode.call_at("last").prompt_text
    assert [call.node for call in episode.calls] == ["v0", "v1", "v2", "v3", "last"]


@pytest.mark.parametrize(("ties", "winner"), [("first", "7"), ("none", None)])
def test_ties(world, ties, winner):
    client = says(world, agent0="7", agent1="5", agent2="5", agent3="7", agent5="end")
    episode = world.play(voters(world, ties), client)
    assert episode.results[0].parsed["answer"] == winner
    assert ('vote:\n{"answer": null' in episode.call_at("last").prompt_text) is (winner is None)


def test_a_skipped_voter_abstains(world):
    flow = voters(world, v2={"when": {"sample": "missing", "exists": True}})
    episode = world.play(flow, says(world, agent0="7", agent1="7", agent3="5", agent5="end"))
    assert episode.results[0].parsed == {"answer": "7", "share": 2 / 3, "votes": {"7": 2, "5": 1}}


def test_a_loop_may_vote_and_stop_on_the_outcome(world):
    nodes = {
        "a": {},
        "b": {},
        "c": {},
        "vote": {"node_role": "VOTE", "dependencies": ["a", "b", "c"]},
        "speaker": {"dependencies": ["vote"]},
    }
    until = {"node": "vote", "key": "share", "at_least": 1.0}
    loops = {"debate": {"nodes": ["a", "b", "c", "vote"], "max_rounds": 4, "until": until}}
    client = says(world, agent0=["1", "2", "2"], agent1=["2", "2", "2"], agent2=["3", "3", "2"], agent4="two")
    episode = world.play(flow_of(world, nodes, loops=loops), client)
    assert [(r.round, r.parsed["share"]) for r in episode.results] == [(0, 1 / 3), (1, 2 / 3), (2, 1.0)]
    # In the next round every debater hears how the vote went.
    assert "vote:\n2" in [call.prompt_text for call in episode.calls if (call.node, call.round) == ("a", 2)][0]
    assert "vote:\n2" in episode.call_at("speaker").prompt_text


COMPUTE = """
import asyncio, threading
from recipe.dag.episode.context import Output
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
            "node_role": "DEFAULT",
            "dependencies": ["a", "b"],
            "executable_ref": f"compute.py:{ref}",
            "executable_kwargs": {"scale": scale} if ref == "merge" else {},
        },
        "say": {"node_role": "DEFAULT", "dependencies": ["merge"], "executable_ref": "compute.py:name"},
        "end": {"node_role": "DEFAULT", "dependencies": ["merge"], "executable_ref": "compute.py:finish"},
        "last": {"dependencies": ["say", "merge"], "when": {"node": "merge", "key": "sum", "at_least": 10}},
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
    prompt = episode.call_at("last").prompt_text
    assert "say:\nsum is 14\n\nmerge:\n" in prompt and json.dumps(episode.results[0].parsed) in prompt
    small = world.play(computed(world), says(world, agent0="3", agent1="4"))
    assert skips(small) == [("last", 0, 0, "when")]


def test_a_compute_node_may_end_the_episode(world):
    client = says(world, agent0="60", agent1="60", agent5="bye")
    episode = world.play(computed(world, episode={"max_turns": 3}), client)
    assert (episode.turns, episode.ended_by, episode.call_at("last").text) == (1, "done", "bye")


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("hang", "the function took longer than 1.5 s"),
        ("sync_hang", "the function took longer than 1.5 s"),
        ("broken", "KeyError: 'x'"),
        ("number", "returned int 3, not an Output, a str or a dict"),
        ("opaque", "is no JSON"),
        ("tools", "called the tool 'calc', but only agents have tools"),
    ],
)
def test_a_broken_compute_node_costs_its_episode(world, ref, message):
    flow = computed(world, ref, episode={"call_timeout_s": 1.5 if "hang" in ref else 60.0})
    episode = world.play(flow, says(world, agent0="3", agent1="4"))
    assert episode.fault["boundary"] == "hook" and message in episode.fault["message"]
    assert episode.fault["where"].startswith("node merge")
    assert [call.text for call in episode.calls] == ["3", "4"] and episode.results == []


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({}, "node merge: a DEFAULT node needs `executable_ref"),
        ({"executable_ref": "compute.py:nothing"}, "there is no `nothing`"),
        ({"executable_ref": "compute.py"}, "node merge: compute.py is no function"),
    ],
)
def test_compute_nodes_that_cannot_run_are_refused_at_once(world, node, message):
    flow = flow_of(world, {"a": {}, "merge": {"node_role": "DEFAULT", **node}}, files={"compute.py": COMPUTE})
    with pytest.raises(UserError, match=message):
        world.runner(flow)


def test_agents_sample_and_use_tools_as_their_own_in_every_round(world):
    nodes = {
        "coder": {},
        "critic": {"dependencies": ["coder"], "when": {"node": "coder", "matches": "done"}},
    }
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
    nodes = {"talk": {}, "other": {"dependencies": ["talk"]}}
    flow = flow_of(
        world, nodes, hook="grow.py", files={"grow.py": grow}, loops={"l": {"nodes": ["talk"], "max_rounds": 3}}
    )
    talk, other = rows_of([world.play(flow)])
    assert (talk.call_rounds, talk.call_positions, talk.round) == ((0, 1, 2), (0, 1, 2), 0)
    assert (other.call_rounds, other.call_positions) == ((0,), (3,))


def test_a_record_with_all_of_it_survives_json(world):
    client = says(world, agent0="7", agent1="5", agent2="5", agent3="7", agent5="end")
    episode = world.play(voters(world, loops={"l": {"nodes": ["v0"], "max_rounds": 2}}), client)
    branch = world.play(router(world), says(world, agent0="none"))
    assert episode.results and branch.skips
    for made in (episode, branch):
        data = json.loads(json.dumps(made.to_json(), allow_nan=False))
        assert Episode.from_json(data) == made
        for key in ("results", "skips", "ended_by"):
            del data[key]  # as a record from before there were such things
        for call in data["calls"]:
            del call["round"], call["env_info"]
        assert Episode.from_json(data).ended_by == ""
