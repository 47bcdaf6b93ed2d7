"""Episodes and their forks, and what `counterfactual` makes of them, compared with the enumeration of a game."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import product
from math import prod

import pytest

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.algorithms.estimate import estimate
from recipe.dag.core.errors import ModelServerFault
from recipe.dag.episode.batch import run_batch
from recipe.dag.episode.rows import rows_of
from recipe.dag.report.metrics import rollout_metrics
from recipe.dag.train.alternation import as_bound
from tests.episode.conftest import Client, Tool

PAY = """
PAYOFF = {PAYOFF}
def pay(episode):
    first, second, beside = (next(c.text for c in episode.calls if c.node == node) for node in ("x", "y", "z"))
    return {{call.agent: [PAYOFF[first + second + beside]] for call in episode.calls}}
"""
NODES = [
    {"id": "x"},
    {"id": "y", "agent": "agent1", "after": ["x"]},
    {"id": "z", "agent": "agent2"},
    {"id": "pay", "reward": "pay.py:pay", "after": ["y", "z"]},
]
"""y answers x, z speaks beside them."""
PAYOFF = {"".join(key): value for key, value in zip(product("ab", repeat=3), (3, -1, 7, 2, 0, 5, -4, 1), strict=True)}
CHANCE = {"x": 0.3, "ya": 0.8, "yb": 0.45, "z": 0.6}
"""The probability of the answer a: of x, of y after a and after b, and of z."""


def p(decision: str, answer: str) -> float:
    return CHANCE[decision] if answer == "a" else 1 - CHANCE[decision]


def q(node: str, x: str, y: str, z: str) -> float:
    """The expected payoff of a joint action in which what comes after `node` is sampled again."""
    return sum(p("y" + x, later) * PAYOFF[x + later + z] for later in "ab") if node == "x" else PAYOFF[x + y + z]


def exact(node: str, x: str, y: str, z: str) -> float:
    """The marginal value of a node's answer in the context of the others."""
    said, chance = {"x": x, "y": y, "z": z}, {"x": "x", "y": "y" + x, "z": "z"}[node]
    others = (q(node, **said | {node: other}) * p(chance, other) for other in "ab")
    return q(node, x, y, z) - sum(others)


def game(world, **options):
    algorithm = make_algorithm("counterfactual", **options)
    return world.workflow(NODES, files={"pay.py": PAY.format(PAYOFF=PAYOFF)}, algorithm=algorithm)


def played(world, flow, client, n=1, tools=(), forked=("main",), **options):
    """The episodes of a step of one sample, and their rows."""
    runner = world.runner(flow, client, tools)
    episodes = asyncio.run(run_batch(runner, [(world.sample(), "u")], n, step=0, forked=forked, **options))
    trainable = rows_of(episodes, unscored=flow.algorithm.unscored_scope, keep_unsampled_rewarded=True)
    return episodes, trainable


def test_the_expected_advantage_is_the_marginal_value_of_brute_force(world):
    """All answers of an episode and its three forks, weighted by their probabilities."""
    flow, answers = game(world, alternatives=2), {}
    runner_client = Client(lambda prompt, sampling, request: answers[tuple(request.split("-")[1:])])
    asked = [("0", "agent0"), ("0", "agent1"), ("0", "agent2")]  # the episode, then the forks at x, y and z
    asked += [("1", "agent0"), ("1", "agent1"), ("2", "agent1"), ("3", "agent2")]
    weights, sums = defaultdict(float), defaultdict(float)
    for letters in product("ab", repeat=len(asked)):
        answers.clear()
        answers.update(zip(asked, letters, strict=True))
        episodes, rows = played(world, flow, runner_client)
        chance = prod(
            p("y" + episode.calls[0].text if call.node == "y" else call.node, call.text)
            for episode in episodes
            for call in episode.calls
            if not call.replayed
        )
        for row, tokens in zip(rows, estimate(flow.algorithm, rows)[0], strict=True):
            if not any(row.response_mask):
                continue
            said = {call.node: call.text for call in episodes[row.episode].calls}
            node = row.calls[0].node
            key = (node, *(said[name] if name != "y" or node != "x" else "" for name in "xyz"))
            weights[key] += chance
            sums[key] += chance * tokens[0].item()
    assert len(weights) == 4 + 8 + 8
    for key, weight in weights.items():
        assert sums[key] / weight == pytest.approx(exact(*key), abs=1e-6), key


def test_a_fork_repeats_what_it_does_not_change_and_learns_from_its_own_call(world):
    client = Client(lambda prompt, sampling, request: "ab"[sampling["seed"] % 2])
    flow = game(world, alternatives=3)
    ended = []
    episodes, rows = played(world, flow, client, n=2, on_done=ended.append)
    assert [(e.index, e.forked and (e.forked["from"], e.forked["at"])) for e in episodes[:7]] == [
        (0, None), (2, (0, "x")), (4, (0, "x")), (6, (0, "y")), (8, (0, "y")), (10, (0, "z")), (12, (0, "z")),
    ]  # fmt: skip
    assert [e.index for e in episodes[7:]] == [1, 3, 5, 7, 9, 11, 13] and len(ended) == 14
    assert ended[0].forked and not ended[-1].forked, "forks are reported as they end, their episode behind them"
    for episode in episodes:
        sampled = [call.node for call in episode.calls if not call.replayed]
        at = episode.forked["at"] if episode.forked else None
        assert sampled == {None: ["x", "y", "z"], "x": ["x", "y"], "y": ["y"], "z": ["z"]}[at]
        assert [call.node for call in episode.calls if call.train] == ([at] if at else ["x", "y", "z"])
    assert {(row.trunk, row.episode) for row in rows if any(row.response_mask)} == {
        (trunk, trunk + 2 * number) for trunk in (0, 1) for number in range(7)
    }
    assert len(client.requests) == len({sampling["seed"] for _, _, sampling in client.requests}) == 2 * (3 + 4 + 2 + 2)
    metrics = rollout_metrics(episodes, flow)
    assert metrics["tokens/sampled"] == 2 * len(client.requests), "a letter and the end of the turn; no call twice"
    again, _ = played(world, flow, Client(client.script), n=2)
    assert [[call.text for call in e.calls] for e in again] == [[call.text for call in e.calls] for e in episodes]


def test_a_bound_on_decisions_draws_them_by_lot_and_validation_has_no_forks(world):
    flow = game(world, alternatives=2, decisions=1)
    episodes, _ = played(world, flow, Client(lambda *_: "a"), n=24)
    forked = [episode.forked["at"] for episode in episodes if episode.forked]
    assert len(forked) == 24 and set(forked) == {"x", "y", "z"}
    runner = world.runner(flow, Client(lambda *_: "a"))
    assert len(asyncio.run(run_batch(runner, [(world.sample(), "u")], 2, step=0))) == 2


def test_a_fork_that_fails_is_no_reward(world):
    """Its alternative is missing, and the others are compared without it."""

    def answer(prompt, sampling, request):
        if request == "u-1-agent0":
            raise ModelServerFault("the server is gone")
        return {"u-0-agent0": "a", "u-2-agent0": "b"}.get(request, "a")

    flow = game(world, alternatives=3)
    episodes, rows = played(world, flow, Client(answer))
    assert [episode.index for episode in episodes if episode.fault] == [1]
    advantages = estimate(flow.algorithm, rows)[0]
    of_x = {r.episode: a[0].item() for r, a in zip(rows, advantages, strict=True) if r.calls[0].node == "x" and len(a)}
    assert of_x == {0: PAYOFF["aaa"] - PAYOFF["baa"], 2: PAYOFF["baa"] - PAYOFF["aaa"]}
    assert len(rows_of(episodes, on_failure="drop_group")) == len(rows_of(episodes)) > 0
    episodes[0].fault = episodes[1].fault
    assert rows_of(episodes, on_failure="drop_group") == []


def test_decisions_of_policies_that_do_not_learn_in_the_step_are_not_forked(world):
    policies = {name: {"model": {"path": "m"}, "train_cycle": 1} for name in ("main", "other")}
    algorithm = make_algorithm("counterfactual", alternatives=2)
    agents = [{}, {"policy": "other"}, {}]
    files = {"pay.py": PAY.format(PAYOFF=PAYOFF)}
    flow = world.workflow(NODES, agents=agents, files=files, policies=policies, algorithm=algorithm)
    for forked, at in ((["main"], ["x", "z"]), (["other"], ["y"]), ([], [])):
        episodes, _ = played(world, flow, Client(lambda *_: "a"), forked=forked)
        assert [episode.forked["at"] for episode in episodes[1:]] == at


def test_policies_that_exchange_roles_learn_from_the_decisions_of_their_role_in_the_step(world):
    policies = {name: {"model": {"path": "m"}} for name in ("main", "other")}
    cory = {"roles": ["agent0", "agent1"], "every": 1}
    flow = world.workflow(
        NODES,
        agents=[{}, {"policy": "other"}, {}],
        files={"pay.py": PAY.format(PAYOFF=PAYOFF)},
        policies=policies,
        algorithm=make_algorithm("counterfactual", alternatives=2, cory=cory),
    )
    client = Client(lambda prompt, sampling, request: "ab"[sampling["seed"] % 2])
    for step, roles in ((0, {"x": "main", "y": "other"}), (1, {"x": "other", "y": "main"})):
        bound = as_bound(flow, step)
        episodes, rows = played(world, bound, client, forked=bound.trained_policies())
        assert [episode.forked["at"] for episode in episodes[1:]] == ["x", "y", "z"]
        for policy in ("main", "other"):
            own = [row for row in rows if row.policy == policy]
            for row, tokens in zip(own, estimate(bound.algorithm, own)[0], strict=True):
                (node,) = (call.node for call in row.calls)
                assert policy == roles.get(node, "main")
                if any(row.response_mask):
                    pair = [episodes[0], *(one for one in episodes[1:] if one.forked["at"] == node)]
                    first, second = (one.calls[0].reward for one in pair)
                    gain = first - second if row.episode == 0 else second - first
                    assert tokens[0].item() == pytest.approx(gain)


def test_a_fork_plays_the_index_of_its_episode(world):
    """A prompt and a reward that depend on the index, as in self-play with sides."""
    hook = """
def pre_process(tokenizer, prompt_ids, obs, *, context):
    return prompt_ids + tokenizer.encode(f"player {context.episode % 2}")
"""
    pay = "def pay(episode):\n    return {call.agent: [float(episode.index)] for call in episode.calls}\n"
    nodes = [
        {"id": "x"},
        {"id": "y", "agent": "agent1", "after": ["x"], "hooks": "h.py"},
        {"id": "pay", "reward": "pay.py:pay", "after": ["y"]},
    ]
    algorithm = make_algorithm("counterfactual", alternatives=3)
    flow = world.workflow(nodes, files={"h.py": hook, "pay.py": pay}, algorithm=algorithm, episode={"retries": 0})

    def answer(prompt, sampling, request):
        return prompt.split("player ")[1][0] if "agent1" in request else "x"

    episodes, _ = played(world, flow, Client(answer), n=3)
    assert [e.fault for e in episodes] == [None] * 15 and [e.index for e in episodes] == [
        k + 3 * number for k in range(3) for number in range(5)
    ]
    for episode in episodes:
        assert episode.calls[1].text == str(episode.trunk % 2)
        assert [call.reward for call in episode.calls] == [episode.trunk, episode.trunk]


GUESS = """
class Guess:
    def reset(self):
        return "start"
    def step(self, actions, ground_truth):
        return "no", float(actions[0] == "0"), actions[0] == "0", {}
"""
GRADE = """
def grade(episode):
    first, check = episode.calls[0].text, [call for call in episode.calls if call.agent == "agent1"]
    episode.outcome = float(first == "0")
    episode.info = {"last": int(episode.calls[-1].text), "coach/agent0/mean": float(first), "coach/agent0/count": 1}
    return {"agent1": [None if call.text == "1" else 1.0 for call in check]}
"""


def test_means_are_those_of_the_run_without_forks(world):
    """An env that ends on success: of a long episode, more is forked."""
    nodes = [
        {"id": "guess", "env": "guess.py:Guess", "sees_env": True, "env_pays": True},
        {"id": "check", "agent": "agent1", "after": ["guess"], "when": {"node": "guess", "equals": "0"}},
        {"id": "grade", "reward": "grade.py:grade", "after": ["check"]},
    ]
    flow = world.workflow(
        nodes,
        files={"guess.py": GUESS, "grade.py": GRADE},
        algorithm=make_algorithm("counterfactual", alternatives=4),
        episode={"max_turns": 10},
    )
    client = Client(lambda prompt, sampling, request: str(sampling["seed"] % 2))
    plain, _ = played(world, flow, client, n=50, forked=())
    decisions, requests = sum(call.train for episode in plain for call in episode.calls), len(client.requests)
    episodes, _ = played(world, flow, client, n=50)
    metrics, expected = rollout_metrics(episodes, flow), rollout_metrics(plain, flow)
    assert metrics.pop("episode/forks") == 3 * decisions and len(episodes) == 50 + 3 * decisions
    assert metrics["tokens/sampled"] == 2 * (len(client.requests) - requests) > 2 * expected["tokens/sampled"]
    differ = {key for key in metrics.keys() | expected.keys() if metrics.get(key) != expected.get(key)}
    assert {key for key in differ if "seconds" not in key} == {"tokens/prompt", "tokens/sampled"}
    assert 0 < expected["agent/agent1/skipped"] < 1 and expected["left_out/calls_unscored"] > 0


def test_a_tool_that_does_not_repeat_its_results_masks_the_fork(world):
    def answer(prompt, sampling, request):
        if "tool_response" in prompt or "agent1" in request:
            return "a"
        return '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'

    results, agents = [], [{"tools": ["look"], "tool_loop": {}}, {}]
    nodes = [{"id": "use"}, {"id": "read", "agent": "agent1", "after": ["use"]}]
    algorithm = make_algorithm("counterfactual", alternatives=2)
    flow = world.workflow(nodes, agents=agents, algorithm=algorithm, episode={"retries": 1, "max_masked": 1.0})
    tool = Tool("look", lambda arguments, state: results.append(1) or str(len(results)))
    episodes, _ = played(world, flow, Client(answer), tools=[tool])
    assert [episode.fault is None for episode in episodes] == [True, True, False]
    assert "node use: has another prompt or answer than in the episode" in episodes[2].fault["message"]
    assert "make it deterministic" in episodes[2].fault["message"]
    assert len(results) == 3, "the episode, its fork at `use`, and one attempt of the fork at `read`"
    assert rollout_metrics(episodes, flow)["faults/fork"] == 1


ENV = """
class Count:
    def reset(self):
        self.said = []
        return "start"
    def step(self, actions, ground_truth):
        self.said += actions
        return f"said {' '.join(self.said)}", float(self.said[-1]), len(self.said) == 3, {}
"""


def test_the_env_is_stepped_again_and_earlier_rewards_cancel(world):
    nodes = [{"id": "play", "env": "count.py:Count", "sees_env": True, "env_pays": True}]
    algorithm = make_algorithm("counterfactual", alternatives=2)
    flow = world.workflow(nodes, files={"count.py": ENV}, algorithm=algorithm, episode={"max_turns": 4})
    episodes, rows = played(world, flow, Client(lambda prompt, sampling, request: str(sampling["seed"] % 10)))
    trunk, *forks = episodes
    assert [fork.forked["at"] for fork in forks] == ["play", "play.1", "play.2"]
    said = [[float(call.text) for call in episode.calls] for episode in episodes]
    for turn, fork in enumerate(forks):
        assert said[1 + turn][:turn] == said[0][:turn] and said[1 + turn][turn:] != said[0][turn:]
        assert [call.reward for call in fork.calls] == said[1 + turn]
        assert fork.calls[turn].observation == trunk.calls[turn].observation
    found = {
        (row.episode, row.calls[0].turn): tokens[0].item()
        for row, tokens in zip(rows, estimate(flow.algorithm, rows)[0], strict=True)
        if any(row.response_mask)
    }
    gains = [sum(said[0]) - sum(other) for other in said[1:]]
    assert found == {(0, t): gain for t, gain in enumerate(gains)} | {(1 + t, t): -gain for t, gain in enumerate(gains)}


MOODY = """
import itertools
count = itertools.count()
class Moody:
    def reset(self):
        return f"mood {next(count)}"
    def step(self, actions, ground_truth):
        return "", 0.0, True, {}
"""
TALKATIVE = """
from recipe.dag.types.context import Output
count = []
def post_process(tokenizer, prompt_ids, response_ids, *, context):
    count.append(1)
    return Output(text=f"{context.call.text} {len(count)}")
"""


@pytest.mark.parametrize("case", ["env", "skipped", "parse"])
def test_a_fork_in_another_context_is_not_compared(world, case):
    """The observation, the failure or the text that the decision is shown is not that of the episode."""
    nodes = [{"id": "before", "agent": "agent1"}, {"id": "at", "after": ["before"]}]
    agents, tools = [{}, {"policy": "fixed"}], []
    if case == "env":
        nodes[1] |= {"env": "moody.py:Moody", "sees_env": True}
    elif case == "parse":
        nodes[0] |= {"hooks": "talkative.py"}
    else:
        agents[1] |= {"tools": ["look"], "tool_loop": {}, "on_failure": "skip"}
        tools = [Tool("look", lambda arguments, state, runs=[]: runs.append(1) or str(len(runs)))]

    def answer(prompt, sampling, request):
        if case == "skipped" and "agent1" in request and "tool_response" not in prompt:
            return '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
        return "a"

    flow = world.workflow(
        nodes,
        agents=agents,
        files={"moody.py": MOODY, "talkative.py": TALKATIVE},
        policies={"main": {"model": {"path": "m"}}, "fixed": {"model": {"path": "m"}, "frozen": True}},
        algorithm=make_algorithm("counterfactual", alternatives=2),
        episode={"retries": 0, "max_masked": 1.0},
    )
    episodes, _ = played(world, flow, Client(answer), tools=tools)
    trunk, fork = episodes
    assert trunk.fault is None and "does not repeat its results" in fork.fault["message"]
