"""Several envs by name, in loops, and behind nodes that were skipped."""

from __future__ import annotations

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.core.user_code import load_object
from tests.episode.envs_of import batch

TWO = """
class Base:
    made = []
    def __init__(self, level=0):
        self.level = level
        Base.made.append((type(self).__name__, level))
    async def step(self, actions, ground_truth):
        return f"{type(self).__name__} {self.level} heard {actions}", [1.0, 2.0], False, {"level": self.level}
class Maths(Base):
    def reset(self, sample, seed):
        self.seed = seed
        return f"maths {sample['ground_truth']}"
class Code(Base): ...
"""


def routed(world, **keys):
    options = {"sees_env": True, "env": ["maths", "env.py:Code"], "env_route": "extra_info.kind"}
    nodes = [
        {"id": "a", "sees_env": True},
        {"id": "b", "agent": "agent1", "after": ["a"], **options, "env_pays": True},
        {"id": "after", "agent": "agent2", "after": ["b"], "when": {"env": "b", "key": "level", "at_least": 3}},
    ]
    envs = {"maths": {"path": "env.py:Maths", "kwargs": {"level": 3}}}
    return world.workflow(
        nodes, files={"env.py": TWO}, envs=envs, episode={"max_turns": 2, "on_user_error": "mask"}, **keys
    )


def test_each_episode_gets_the_env_that_its_sample_names(world):
    flow = routed(world)
    samples = [world.sample(extra_info={"kind": kind}) for kind in ("maths", "env.py:Code")]
    maths, code = batch(world, flow, samples)
    assert maths.fault is code.fault is None
    assert load_object("env.py:Base", flow.path).made == [("Maths", 3), ("Code", 0)]
    assert "Observation:\nmaths 4" in maths.calls[0].prompt_text
    assert "Observation" not in code.calls[0].prompt_text  # Code has no reset, so there is nothing to see yet
    assert "Maths 3 heard" in maths.calls_of("agent0")[1].prompt_text
    assert [call.reward for call in code.calls] == [1.0, 2.0, 1.0, 2.0]
    # Its info decides a branch, and stays in the record.
    assert [call.node for call in maths.calls] == ["a", "b", "after"] * 2 and not maths.skips
    assert [call.node for call in code.calls] == ["a", "b"] * 2
    assert [call.env_info for call in maths.calls] == [{}, {"level": 3}, {}] * 2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"kind": "chess"}, "env_route: extra_info.kind is 'chess'; the envs are maths, env.py:Code"),
        ({}, "env_route: extra_info.kind is not in the sample; the envs are maths, env.py:Code"),
    ],
)
def test_a_sample_that_names_no_env_costs_its_episodes_only(world, extra, message):
    samples = [world.sample(extra_info=extra), world.sample(extra_info={"kind": "maths"})]
    lost, fine = batch(world, routed(world), samples)
    assert (lost.fault["boundary"], lost.fault["where"], lost.fault["message"]) == ("env", "node b", message)
    assert lost.calls == [] and lost.attempts == 1
    assert fine.fault is None and len(fine.calls) == 6


def test_several_envs_need_a_route(world):
    flow = world.workflow([{"id": "a", "env": ("env.py:Maths", "env.py:Code")}])
    with pytest.raises(UserError, match="node a: `env` names 2 envs; add `env_route`"):
        world.runner(flow)


def test_two_nodes_may_step_an_env_each(world):
    """Each is a player of its own env alone."""
    watch = {"sees_env": True, "env_pays": True}
    code = """
class E:
    async def step(self, actions, ground_truth): return None, len(actions), False
class F:
    async def step(self, actions, ground_truth): return None, 10 * len(actions), False
"""
    nodes = [
        {"id": "a", **watch, "env": ["env.py:E"]},
        {"id": "b", "agent": "agent1", **watch, "env": ["env.py:F"]},
    ]
    episode = world.play(world.workflow(nodes, files={"env.py": code}))
    assert [call.reward for call in episode.calls] == [1.0, 10.0]


LOOPED = """
class E:
    def __init__(self):
        self.log = []
    async def step(self, actions, ground_truth):
        self.log.append(actions)
        return f"step {len(self.log)}", [len(self.log)] * len(actions), len(self.log) == 5, {"steps": len(self.log)}
"""
OWN = {"env": ["env.py:E"], "env_pays": True}


def looped(world, until: dict | None = None, **keys):
    watch = {"sees_env": True}
    nodes = [
        {"id": "before", **watch},
        {"id": "a", "agent": "agent1", "after": ["before"], **watch},
        {"id": "b", "agent": "agent2", "after": ["a"], **watch, **OWN},
        {"id": "after", "agent": "agent3", "after": ["b"], **watch},
    ]
    loops = {"play": {"nodes": ["a", "b"], "max_rounds": 9, "until": until}}
    return world.workflow(nodes, files={"env.py": LOOPED}, loops=loops, **keys)


def test_an_env_in_a_loop_is_stepped_in_each_round_until_its_info_says_so(world):
    flow = looped(world, {"env": "b", "key": "steps", "at_least": 3})
    episode = world.play(flow)
    assert episode.fault is None and not episode.done
    assert [(c.node, c.round, c.reward) for c in episode.calls] == [
        ("before", 0, None),
        *[(node, number, number + 1.0) for number in range(3) for node in ("a", "b")],
        ("after", 0, None),
    ]
    prompts = {(call.node, call.round): call.prompt_text for call in episode.calls}
    assert "Observation" not in prompts["a", 0]
    assert "Observation:\nstep 2" in prompts["a", 2] and "Observation:\nstep 2" in prompts["b", 2]
    assert "Observation:\nstep 3" in prompts["after", 0]


def test_an_env_that_is_done_ends_its_loop(world):
    episode = world.play(looped(world, episode={"max_turns": 3}))
    assert [call.round for call in episode.calls_of("agent2")] == [0, 1, 2, 3, 4]
    assert (episode.turns, episode.ended_by, episode.calls[-1].node) == (1, "done", "after")


def test_an_env_after_a_loop_takes_the_last_round_and_is_seen_by_all_its_nodes(world):
    code = """
class E:
    def __init__(self): self.count = 0
    async def step(self, actions, ground_truth):
        self.count += 1
        return None, 1.0, False, {"count": self.count, "actions": actions}
"""
    twice = {"env": "one", "key": "count", "equals": 2}
    nodes = [
        {"id": "talk", "sees_env": True},
        {"id": "one", "agent": "agent1", "after": ["talk"], **OWN},
        {"id": "two", "agent": "agent2", "after": ["one"], **OWN},
        # The env has been stepped again since `one` stepped it.
        {"id": "end", "agent": "agent3", "after": ["two"], "when": twice},
    ]
    flow = world.workflow(nodes, files={"env.py": code}, loops={"l": {"nodes": ["talk"], "max_rounds": 3}})
    said = iter(["first", "second", "third"])
    episode = world.play(flow, world.Client(lambda p, s, request: next(said) if request.endswith("0") else "ok"))
    assert [call.env_info.get("actions") for call in episode.calls[3:]] == [["third", "ok"], ["third", "ok"], None]
    rewards = [("talk", None), ("talk", None), ("talk", 2.0), ("one", 1.0), ("two", 1.0), ("end", None)]
    assert [(call.node, call.reward) for call in episode.calls] == rewards


def test_a_skipped_player_acts_with_nothing_and_earns_nothing(world):
    code = """
class E:
    async def step(self, actions, ground_truth):
        return [f"you said {a!r}" for a in actions], [1.0, 2.0, 4.0], False, {"actions": actions}
"""
    watch = {"sees_env": True}
    nodes = [
        {"id": "a", **watch},
        {"id": "b", "agent": "agent1", **watch, "when": {"sample": "missing", "exists": True}},
        {"id": "c", "agent": "agent2", **watch, **OWN},
    ]
    episode = world.play(world.workflow(nodes, files={"env.py": code}))
    assert [(call.node, call.reward) for call in episode.calls] == [("a", 1.0), ("c", 4.0)]
    assert episode.calls[1].env_info == {"actions": ["ok", "", "ok"]}


def test_a_skipped_owner_steps_nothing(world):
    asked = {"node": "a", "matches": "go"}
    nodes = [
        {"id": "a", "sees_env": True},
        {"id": "b", "agent": "agent1", "when": asked, "after": ["a"], **OWN},
    ]
    lines = ["go", "wait", "go"]
    client = world.Client(lambda prompt, sampling, request: lines.pop(0) if request.endswith("0") else "b")
    flow = world.workflow(nodes, files={"env.py": LOOPED}, episode={"max_turns": 3})
    episode = world.play(flow, client)
    rewards = [("a", 1.0), ("b", 1.0), ("a", None), ("a", 2.0), ("b", 2.0)]
    assert [(call.node, call.reward) for call in episode.calls] == rewards
    assert all("Observation:\nstep 1" in call.prompt_text for call in episode.calls[2:4])
