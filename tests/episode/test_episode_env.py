from __future__ import annotations

import asyncio

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.core.user_code import load_object
from recipe.dag.episode.env import rewards
from recipe.dag.episode.env_class import load_env


def game(world, code: str, *, rewards: bool = True, **episode):
    """Two players, the second owns the env."""
    nodes = [
        {"id": "a", "sees_env": True},
        {"id": "b", "agent": "agent1", "after": ["a"], "sees_env": True, "env": ["env.py:E"], "env_pays": rewards},
    ]
    return world.workflow(nodes, files={"env.py": code}, episode={"max_turns": 2, **episode})


def step(body: str) -> str:
    return f"class E:\n    def step(self, actions, ground_truth):\n        {body}"


LOG = """
class E:
    log = []
    def __init__(self):
        self.steps = 0
    def reset(self, sample, seed):
        E.log.append(("reset", sample["ground_truth"], seed))
        return {"agent0": "start0", "agent1": "start1"}
    async def step(self, actions, ground_truth):
        self.steps += 1
        E.log.append((actions, ground_truth))
        return [f"obs0.{self.steps}", f"obs1.{self.steps}"], [1.0, self.steps], self.steps == 2
    def close(self):
        E.log.append("close")
"""


def test_an_env_lives_through_its_episode_and_speaks_per_agent(world):
    flow = game(world, LOG, max_turns=5)
    client = world.Client(lambda prompt, sampling, request: f"{request[-1]}{len(client.requests)}")
    episode = world.play(flow, client)
    assert episode.fault is None and episode.done and episode.turns == 2
    assert [call.reward for call in episode.calls] == [1.0, 1.0, 1.0, 2.0]
    seen = [call.prompt_text.split("Observation:\n")[1].split("<")[0] for call in episode.calls]
    # b sees what was there before its own step of this turn.
    assert seen == ["start0", "start1", "obs0.1", "obs1.1"] == [call.observation for call in episode.calls]
    reset, first, second, close = load_object("env.py:E", flow.path).log
    assert reset[:2] == ("reset", "4") and 0 <= reset[2] < 2**31
    assert (first, second, close) == ((["01", "12"], "4"), (["03", "14"], "4"), "close")


def test_a_node_behind_the_owner_sees_the_new_observation_in_the_same_turn(world):
    code = step("return 'new', 0, False") + "\n    def reset(self):\n        return 'old'"
    watch = {"sees_env": True}
    flow = world.workflow(
        [
            {"id": "own", **watch, "env": ["env.py:E"]},
            {"id": "beside", "agent": "agent1", **watch},
            {"id": "after", "agent": "agent2", "after": ["own"], **watch},
            {"id": "blind", "agent": "agent3", "after": ["own"]},
        ],
        files={"env.py": code},
    )
    prompts = {call.node: call.prompt_text for call in world.play(flow).calls}
    assert "Observation:\nold" in prompts["own"] and "Observation:\nold" in prompts["beside"]
    assert "Observation:\nnew" in prompts["after"]
    assert "Observation" not in prompts["blind"]


def test_without_rewards_with_env_the_env_rewards_no_agent(world):
    episode = world.play(game(world, step("return None, 1.0, True"), rewards=False))
    assert [call.reward for call in episode.calls] == [None, None]


@pytest.mark.parametrize(
    ("reward", "expected"),
    [("1", [1.0, 1.0]), ("[0, 2.5]", [0.0, 2.5]), ("{'agent1': 1, 'agent0': -1}", [-1.0, 1.0]), ("True", [1.0, 1.0])],
)
def test_rewards_may_be_one_a_list_or_by_name(world, reward, expected):
    episode = world.play(game(world, step(f"return None, {reward}, True")))
    assert [call.reward for call in episode.calls] == expected


def test_rewards_may_be_numpys(world):
    episode = world.play(
        game(world, "import numpy as np\n" + step("return None, np.array([0.5, 1.5]), np.bool_(True)"))
    )
    assert [call.reward for call in episode.calls] == [0.5, 1.5] and episode.done


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (step("raise ValueError('no')"), "ValueError: no"),
        (step("return None"), "not (obs, reward, done)"),
        (step("return None, float('nan'), False"), "not a finite number"),
        (step("return None, float('inf'), False"), "not a finite number"),
        (step("return None, None, False"), "not a finite number"),
        (step("return None, '1', False"), "not a finite number"),
        (step("return None, [1.0], False"), "1 rewards for 2 players"),
        (step("return None, {'agent0': 1}, False"), "its players are"),
        (step("return ['x'] * 3, 0, False"), "3 observations for 2 players"),
        (step("return {'agent0': 1, 'agent9': 2}, 0, False"), "agent9"),
        (step("return None, 0, [False, False]"), "not a bool"),
        (step("import sys; sys.exit(3)"), "SystemExit"),
        (step("raise StopIteration"), "StopIteration"),
        (step("raise TimeoutError('mine')"), "timed out mine"),
        (
            "class E:\n    def __init__(self):\n        raise OSError('gone')\n    def step(self, a, g): ...",
            "OSError: gone",
        ),
        (
            "class E:\n    def reset(self):\n        return [1]\n    def step(self, a, g): ...",
            "1 observations for 2 players",
        ),
    ],
)
def test_a_broken_env_is_a_fault_and_never_a_reward(world, code, message):
    episode = world.play(game(world, code, on_user_error="mask"))
    cause = "infrastructure" if "TimeoutError" in code else "user_code"
    assert (episode.fault["boundary"], episode.fault["cause"]) == ("env", cause)
    assert episode.fault["where"].startswith("env.py:E:")
    assert message in episode.fault["message"]
    assert all(call.reward is None for call in episode.calls)
    assert episode.attempts == (2 if cause == "infrastructure" else 1)


@pytest.mark.parametrize("word", ["", "async "])
def test_an_env_that_hangs_ends_its_own_episode_only(world, word):
    wait = "await asyncio.Event().wait()" if word else "threading.Event().wait()"
    code = f"""
import asyncio, threading
class E:
    {word}def step(self, actions, ground_truth):
        if ground_truth == "hang":
            {wait}
        return None, 1.0, True
"""
    flow = game(world, code, call_timeout_s=3.0)

    async def main():
        made = world.runner(flow)
        samples = [world.sample(ground_truth="hang" if k % 10 == 0 else "go") for k in range(30)]
        return await asyncio.gather(*(made.run(sample, f"u{k}", 0, step=0) for k, sample in enumerate(samples)))

    episodes = asyncio.run(main())
    hung = [k for k, episode in enumerate(episodes) if episode.fault]
    assert hung == [0, 10, 20]
    assert {episodes[k].fault["message"] for k in hung} == {"step took longer than 3 s"}
    assert all(call.reward == 1.0 for k, e in enumerate(episodes) if k not in hung for call in e.calls)


def test_many_sync_envs_step_at_once(world):
    code = """
import threading
class E:
    barrier = threading.Barrier(64, timeout=60)
    def step(self, actions, ground_truth):
        E.barrier.wait()  # Breaks unless all 64 are inside at once.
        return None, 1.0, True
"""

    async def main():
        made = world.runner(game(world, code))
        return await asyncio.gather(*(made.run(world.sample(), f"u{k}", 0, step=0) for k in range(64)))

    assert [episode.fault for episode in asyncio.run(main())] == [None] * 64


def test_a_close_that_fails_is_counted_and_costs_nothing(world):
    code = step("return None, 1.0, True") + "\n    def close(self):\n        raise OSError('busy')"
    episode = world.play(game(world, code))
    assert episode.fault is None and [call.reward for call in episode.calls] == [1.0, 1.0]
    assert [fault["where"] for fault in episode.faults] == ["env.py:E:close"]


def test_the_group_meets_the_same_env_and_another_sample_another(world):
    flow = game(world, LOG)

    async def main():
        made = world.runner(flow)
        for uid, index in (("u", 0), ("u", 1), ("v", 0)):
            await made.run(world.sample(), uid, index, step=index)

    asyncio.run(main())
    seeds = [entry[2] for entry in load_object("env.py:E", flow.path).log if entry[0] == "reset"]
    assert seeds[0] == seeds[1] != seeds[2]


def test_one_env_stepped_by_two_nodes_is_one_instance_stepped_in_order(world):
    code = """
import time
class E:
    def reset(self):
        self.log, self.inside = [], 0
    async def step(self, actions, ground_truth):
        self.log.append(actions[-1])
        return ",".join(self.log), 0.0, False
"""
    owner = {"sees_env": True, "env": ["env.py:E"]}
    flow = world.workflow(
        [{"id": "a", **owner}, {"id": "b", "agent": "agent1", **owner}],
        files={"env.py": code},
        episode={"max_turns": 2},
    )

    async def main():
        b_called = asyncio.Event()

        async def script(prompt, sampling, request):
            if request.endswith("0") and not b_called.is_set():
                await b_called.wait()
            b_called.set()
            return request[-1]

        return await world.runner(flow, world.Client(script)).run(world.sample(), "u", 0, step=0)

    episode = asyncio.run(main())
    assert episode.fault is None
    assert "Observation:\n0,1" in episode.calls[2].prompt_text


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("E = 3", "an env is a class"),
        ("class E: ...", "an env is a class"),
        (
            "class E:\n    def reset(self, level): ...\n    def step(self, a, g): ...",
            "reset needs the argument `level",
        ),
    ],
)
def test_a_class_that_is_not_an_env_is_refused_at_once(world, code, message):
    flow = game(world, code)
    with pytest.raises(UserError, match=message):
        load_env("env.py:E", flow)


@pytest.mark.parametrize(
    ("head", "actions"),
    [
        ("def step(self, actions, ground_truth):", "actions"),
        ("def step(self, ground_truth, actions):", "actions"),
        ("def step(self, *, actions, ground_truth):", "actions"),
        ("async def step(self, actions, **kwargs):", "actions"),
        ("def step(self, **kwargs):", "kwargs['actions']"),
        ("@staticmethod\n    def step(ground_truth, actions):", "actions"),
        ("@classmethod\n    def step(cls, ground_truth, actions):", "actions"),
        ("def step(self, said, truth):", "said"),
        ("def step(self, ground_truth, answer):", "ground_truth"),
        ("def step(self, actions, ground_truth, /):", "actions"),
        ("def step(self, *args):", "args[0]"),
        ("def step(self, agents, actions, ground_truth):", "actions"),
        ("def step(self, said, truth, *, agent):", "said"),
    ],
)
def test_a_step_gets_its_arguments_by_name_where_it_calls_them_so(world, head, actions):
    code = f"class E:\n    {head}\n        return None, float(isinstance({actions}, list)), True"
    episode = world.play(game(world, code))
    assert [call.reward for call in episode.calls] == [1.0, 1.0]


@pytest.mark.parametrize("head", ["actions, ground_truth, agents, agent", "said, truth, *, agent, agents"])
def test_a_step_that_asks_is_told_whose_actions_they_are(world, head):
    """Actions are in the order of `agents` in the workflow; here the first agent moves last."""
    code = f"""
class E:
    def reset(self, agents):
        self.reset_agents = agents
    def step(self, {head}):
        return None, 0.0, True, {{"agents": agents, "agent": agent, "reset": self.reset_agents}}
"""
    nodes = [
        {"id": "a", "agent": "agent1", "sees_env": True},
        {"id": "b", "agent": "agent0", "after": ["a"], "sees_env": True, "env": ["env.py:E"], "env_pays": True},
    ]
    episode = world.play(world.workflow(nodes, files={"env.py": code}))
    expected = {"agents": ["agent0", "agent1"], "agent": "agent0", "reset": ["agent1", "agent0"]}
    assert [call.env_info for call in episode.calls] == [{}, expected]
    assert [call.done for call in episode.calls] == [False, True]


def test_an_env_adds_to_the_state_of_tools(world):
    code = """
class E:
    def reset(self, seed):
        self.tool_state = {"search": {"index": f"of {seed}"}, "unused": {}}
    def step(self, actions, ground_truth):
        return None, 0.0, True
"""
    states = []
    tool = world.Tool("search", lambda arguments, state: states.append(dict(state)) or str(state.setdefault("n", 0)))
    hooks = "class H:\n    async def parse(self, context):\n        await context.call_tool('search')"
    hooks += "\n        await context.call_tool('search')"
    nodes = [{"id": "a", "hooks": "hooks.py:H", "env": ["env.py:E"]}]
    flow = world.workflow(nodes, agents=[{"tools": ["search"]}], files={"env.py": code, "hooks.py": hooks})
    sample = world.sample(tools_kwargs={"search": {"create_kwargs": {"site": "web", "index": "none"}}})
    runner = world.runner(flow, None, [tool])
    episodes = [asyncio.run(runner.run(sample, uid, 0, step=0)) for uid in ("u0", "u1")]
    assert [episode.fault for episode in episodes] == [None, None]
    assert [state.keys() for state in states] == [{"site", "index"}, {"site", "index", "n"}] * 2
    assert states[0]["index"] == states[1]["index"] != states[2]["index"] and states[0]["site"] == "web"


@pytest.mark.parametrize("state", ["3", "{'search': 3}", "['search']"])
def test_a_malformed_tool_state_is_an_error_of_the_env(world, state):
    code = f"class E:\n    tool_state = {state}\n    def step(self, actions, ground_truth): return None, 0.0, True"
    with pytest.raises(UserError, match="`tool_state` is .*, not a dict of dicts"):
        world.play(game(world, code))


@pytest.mark.parametrize(
    ("signature", "given"),
    [
        ("self", set()),
        ("self, agents, sandbox=None", {"agents", "sandbox"}),
        ("self, seed=0", {"seed"}),
        ("self, sample", {"sample"}),
        ("self, **kw", {"sample", "seed"}),
        ("self, level=1", set()),
    ],
)
def test_reset_is_given_what_it_takes(world, signature, given):
    flow = game(world, f"class E:\n    def reset({signature}): ...\n    def step(self, a, g): ...")
    assert load_env("env.py:E", flow).reset_arguments == given


@pytest.mark.parametrize(
    ("reward", "acted", "chained", "paid"),
    [
        (1.0, [True, True, True], False, [0.0, 1.0, 1.0]),
        (1.0, [True, False, True], False, [1.0, 0.0, 1.0]),  # its second node was skipped
        ({"a": 2.0, "b": 3.0}, [True, False, True], False, [2.0, 0.0, 3.0]),
        (1.0, [True, True, False], True, [0.0, 1.0, 0.0]),
        (1.0, [False, False, True], False, [1.0, 0.0, 1.0]),  # it did not act; what it is paid goes nowhere
    ],
)
def test_an_agent_is_paid_once_at_its_last_action(reward, acted, chained, paid):
    assert rewards(reward, ["a", "a", "b"], "here", chained=chained, acted=acted) == paid
