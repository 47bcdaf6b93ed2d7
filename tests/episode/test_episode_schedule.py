from __future__ import annotations

import asyncio
import random
import zlib
from dataclasses import asdict
from types import SimpleNamespace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipe.dag.episode.graph import EpisodeGraph, episode_graph
from recipe.dag.episode.schedule import Schedule, Task

ANYTHING = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NAMES = "abcdefg"


@st.composite
def shapes(draw) -> SimpleNamespace:
    """A DAG with up to two loops over neighbours in a topological order (so that nothing stands between a loop's
    nodes), who steps which env, and who watches."""
    dice = random.Random(draw(st.integers(0, 2**32)))
    size = dice.randint(1, len(NAMES))
    needs = {NAMES[k]: [name for name in NAMES[:k] if dice.random() < 0.3] for k in range(size)}
    cuts = sorted(dice.choices(range(size + 1), k=4))
    loops = {}
    for name, start, stop in (("l", *cuts[:2]), ("m", *cuts[2:])):
        if start < stop:
            loops[name] = {"nodes": list(NAMES[start:stop]), "max_rounds": dice.randint(1, 3)}
    envs = {name: dice.choice(["env.py:E", "env.py:F"]) for name in needs if dice.random() < 0.25}
    watch = {name for name in needs if dice.random() < 0.5}
    return SimpleNamespace(needs=needs, loops=loops, envs=envs, watch=watch, luck=dice.randrange(2**32))


def nodes_of(shape, whens: dict | None = None, hook: str | None = None) -> list[dict]:
    nodes = []
    for group, (name, needs) in enumerate(shape.needs.items()):
        options = {"obs_with_env": name in shape.watch, "env_path": shape.envs.get(name, ()), "process_path": hook}
        options["rewards_with_env"] = name in shape.envs
        node = {"node_id": name, "agent_group": group % 3, "dependencies": needs, "agent_options": options}
        nodes.append({**node, "when": (whens or {}).get(name)})
    return nodes


def chance(luck: int, *place) -> float:
    return zlib.crc32(repr((luck, *place)).encode()) / 2**32


def play(graph: EpisodeGraph, shape, order: random.Random) -> tuple[Schedule, list[tuple[str, Task]]]:
    """The schedule after its last task, and what started and ended when."""
    asked = set()

    def ask(place, probability: float) -> bool:
        assert place not in asked
        asked.add(place)
        return chance(shape.luck, place) < probability

    schedule = Schedule(
        graph,
        shape.envs,
        allowed=lambda place, round: ask((place.id, round), 0.8),
        again=lambda loop, round: ask((loop, round), 0.7),
    )
    running, log = schedule.start(), []
    log += [("start", task) for task in running]
    while running:
        task = running.pop(order.randrange(len(running)))
        log.append(("over", task))
        new = schedule.over(task)
        log += [("start", task) for task in new]
        running += new
    return schedule, log


@ANYTHING
@given(shapes(), st.integers(0, 2**16))
def test_moves_follow_their_dependencies_and_never_the_clock(world, shape, seed):
    graph = episode_graph(world.workflow(nodes_of(shape), loops=shape.loops))
    schedule, log = play(graph, shape, random.Random(seed))
    other, other_log = play(graph, shape, random.Random(seed + 1))
    assert (schedule.skipped, schedule.rounds) == (other.skipped, other.rounds)
    assert sorted(log) == sorted(other_log)

    moved = {(task.node, task.round) for _, task in log}
    assert not moved & set(schedule.skipped)
    for place in graph.nodes:  # each node moved or was skipped once in each round, and no round was left out
        rounds = range(schedule.rounds.get(place.loop, 0) + 1)
        assert {slot for slot in {*moved, *schedule.skipped} if slot[0] == place.id} == {(place.id, r) for r in rounds}
    assert len(log) == len(set(log))
    steps = {(task.node, task.round) for _, task in log if task.kind == "step"}
    assert steps == {slot for slot in moved if slot[0] in shape.envs}

    def before(event: str, task: Task, node: str, rounds) -> bool:
        """All that `node` did in `rounds` ended before `task` started."""
        start = log.index((event, task))
        ends = [at for at, (e, t) in enumerate(log) if e == "over" and t.node == node and t.round in rounds]
        return all(at < start for at in ends)

    for event, task in log:
        if event != "start":
            continue
        place = graph.by_id[task.node]
        everything = range(10)
        for name in place.ancestors:
            near = place.loop is not None and graph.by_id[name].loop == place.loop
            assert before(event, task, name, range(task.round + 1) if near else everything)
        if place.loop is not None:
            for peer in graph.bodies[place.loop]:
                assert before(event, task, peer.id, range(task.round))
        if task.kind == "step":
            for player in graph.players(shape.envs)[task.node]:
                near = graph.by_id[player].loop == place.loop
                moves = [t for e, t in log if e == "start" and t.node == player and t.kind == "move"]
                for move in (t for t in moves if t.round == task.round or not near):
                    assert log.index(("over", move)) < log.index((event, task))


@ANYTHING
@given(shapes(), st.integers(0, 2**16))
def test_who_has_nothing_to_go_by_is_skipped(world, shape, seed):
    graph = episode_graph(world.workflow(nodes_of(shape), loops=shape.loops))
    schedule, log = play(graph, shape, random.Random(seed))
    ran = {(task.node, task.round) for _, task in log}

    def heard(place, name: str, round: int) -> bool:
        loop = graph.by_id[name].loop
        return (name, round) in ran if loop == place.loop else any(node == name for node, _ in ran)

    for (node, round), reason in schedule.skipped.items():
        place = graph.by_id[node]
        silent = bool(place.dependencies) and not any(heard(place, name, round) for name in place.dependencies)
        assert reason == ("dependencies" if silent else "when")
        assert silent or chance(shape.luck, (node, round)) >= 0.8
    for node, round in ran:
        place = graph.by_id[node]
        assert not place.dependencies or any(heard(place, name, round) for name in place.dependencies)
        assert chance(shape.luck, (node, round)) < 0.8


def test_a_shared_env_is_never_stepped_twice_at_once(world):
    watch = {"obs_with_env": True, "env_path": ("e",)}
    nodes = [{"node_id": name, "agent_group": k, "agent_options": watch} for k, name in enumerate("abc")]
    graph = episode_graph(world.workflow(nodes, loops={"l": {"nodes": ["b"], "max_rounds": 2}}))
    schedule = Schedule(graph, dict.fromkeys("abc", "e"), allowed=lambda *_: True, again=lambda *_: True)
    assert schedule.start() == [Task("a", 0, "move"), Task("b", 0, "move"), Task("c", 0, "move")]
    assert schedule.over(Task("c", 0, "move")) == []
    assert schedule.over(Task("b", 0, "move")) == []
    assert schedule.over(Task("a", 0, "move")) == [Task("a", 0, "step")]
    assert schedule.over(Task("a", 0, "step")) == [Task("b", 0, "step")]
    assert schedule.over(Task("b", 0, "step")) == [Task("b", 1, "move")]
    assert schedule.over(Task("b", 1, "move")) == [Task("b", 1, "step")]
    assert schedule.over(Task("b", 1, "step")) == [Task("c", 0, "step")]
    assert schedule.over(Task("c", 0, "step")) == []


ENV = """
class E:
    def reset(self, sample, seed):
        self.heard = [seed]
        return f"start {seed}"
    async def step(self, actions, ground_truth):
        self.heard.append(actions)
        total = len(str(self.heard))
        return f"{total} {actions}", [total + k for k in range(len(actions))], False, {"total": total}
class F(E): ...
"""
SHOW = """
def pre_process(tokenizer, prompt_ids, obs, *, context):
    heard = [(name, call.turn, call.round, call.text) for name, call in context.upstream.items()]
    history = [(call.node, call.turn, call.round, call.text) for call in context.history]
    return [{"role": "user", "content": str([context.node, context.turn, context.round, obs, heard, history])}]
"""


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes(), st.integers(0, 2**16))
def test_the_record_is_the_same_whichever_generation_ends_first(world, shape, seed):
    """What an agent says depends on all that it is shown, so a difference anywhere would spread."""
    draw = random.Random(shape.luck)
    names = list(shape.needs)
    whens = {name: {"node": draw.choice(names), "matches": "[0-7]"} for name in names if draw.random() < 0.4}
    loops = {
        name: {**loop, "until": {"node": draw.choice(loop["nodes"]), "matches": "[0-3]"}}
        for name, loop in shape.loops.items()
    }
    files = {"env.py": ENV, "show.py": SHOW}
    flow = world.workflow(nodes_of(shape, whens, "show.py"), loops=loops, files=files, episode={"max_turns": 2})

    def record(delays: random.Random) -> dict:
        async def script(prompt, sampling, request):
            for _ in range(delays.randrange(30)):
                await asyncio.sleep(0)
            return str(zlib.crc32(f"{prompt} {sampling['seed']}".encode()) % 10)

        return asdict(world.play(flow, world.Client(script), max_model_len=2**16))

    first, second = record(random.Random(seed)), record(random.Random(seed + 1))
    for episode in (first, second):
        assert episode["fault"] is None
        for part in (episode, *episode["calls"]):
            for key in ("seconds", "generation_seconds", "start_seconds"):
                part.pop(key, None)
    assert first == second
