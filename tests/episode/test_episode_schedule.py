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
    """A DAG with up to two loops over neighbours in a topological order (so that a loop's nodes are
    adjacent), the env that each node steps, and the nodes that watch one."""
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
        options = {"sees_env": name in shape.watch, "env": shape.envs.get(name, ()), "hooks": hook}
        options["env_pays"] = name in shape.envs
        node = {"id": name, "agent": f"agent{group % 3}", "after": needs, **options}
        nodes.append({**node, "when": (whens or {}).get(name)})
    return nodes


def chance(luck: int, question) -> float:
    return zlib.crc32(repr((luck, question)).encode()) / 2**32


def play(graph: EpisodeGraph, shape, order: random.Random) -> tuple[Schedule, list[tuple[str, Task]]]:
    """The schedule after its last task, and what started and ended when."""
    asked = set()

    def ask(question, probability: float) -> bool:
        assert question not in asked
        asked.add(question)
        return chance(shape.luck, question) < probability

    schedule = Schedule(
        graph,
        shape.envs,
        should_run=lambda node, number: ask((node.id, number), 0.8),
        should_repeat=lambda loop, number: ask((loop, number), 0.7),
    )
    running, log = schedule.initial_tasks(), []
    log += [("start", task) for task in running]
    while running:
        task = running.pop(order.randrange(len(running)))
        log.append(("over", task))
        new = schedule.on_finished(task)
        log += [("start", task) for task in new]
        running += new
    return schedule, log


def of_shape(world, shape) -> EpisodeGraph:
    return episode_graph(world.workflow(nodes_of(shape), loops=shape.loops))


@ANYTHING
@given(shapes(), st.integers(0, 2**16))
def test_what_runs_does_not_depend_on_which_task_ends_first(world, shape, seed):
    graph = of_shape(world, shape)
    schedule, log = play(graph, shape, random.Random(seed))
    other, other_log = play(graph, shape, random.Random(seed + 1))
    assert (schedule.skipped, schedule.rounds) == (other.skipped, other.rounds)
    assert sorted(log) == sorted(other_log)


@ANYTHING
@given(shapes(), st.integers(0, 2**16))
def test_each_node_runs_or_is_skipped_once_in_each_round(world, shape, seed):
    graph = of_shape(world, shape)
    schedule, log = play(graph, shape, random.Random(seed))
    ran = {(task.node, task.round) for _, task in log}
    assert not ran & set(schedule.skipped)
    for node in graph.nodes:
        rounds = range(schedule.rounds.get(node.loop, 0) + 1)
        assert {slot for slot in {*ran, *schedule.skipped} if slot[0] == node.id} == {(node.id, r) for r in rounds}
    assert len(log) == len(set(log))
    steps = {(task.node, task.round) for _, task in log if task.kind == "step"}
    assert steps == {slot for slot in ran if slot[0] in shape.envs}


@ANYTHING
@given(shapes(), st.integers(0, 2**16))
def test_a_task_starts_after_all_that_it_waits_for(world, shape, seed):
    graph = of_shape(world, shape)
    _, log = play(graph, shape, random.Random(seed))

    def ends(name: str, rounds) -> list[int]:
        return [at for at, (e, t) in enumerate(log) if e == "over" and t.node == name and t.round in rounds]

    for start, (event, task) in enumerate(log):
        if event != "start":
            continue
        node = graph.by_id[task.node]
        for name in node.ancestors:
            same_loop = node.loop is not None and graph.by_id[name].loop == node.loop
            assert all(at < start for at in ends(name, range(task.round + 1 if same_loop else 10)))
        for peer in graph.bodies.get(node.loop, ()):
            assert all(at < start for at in ends(peer.id, range(task.round)))


@ANYTHING
@given(shapes(), st.integers(0, 2**16))
def test_an_env_is_stepped_after_all_its_players_have_run(world, shape, seed):
    graph = of_shape(world, shape)
    _, log = play(graph, shape, random.Random(seed))
    for start, (event, task) in enumerate(log):
        if event != "start" or task.kind != "step":
            continue
        for player in graph.players(shape.envs)[task.node]:
            same_loop = graph.by_id[player].loop == graph.by_id[task.node].loop
            runs = [t for e, t in log if e == "start" and t.node == player and t.kind == "run"]
            for run in (t for t in runs if t.round == task.round or not same_loop):
                assert log.index(("over", run)) < start


@ANYTHING
@given(shapes(), st.integers(0, 2**16))
def test_a_node_whose_dependencies_were_all_skipped_is_skipped(world, shape, seed):
    graph = of_shape(world, shape)
    schedule, log = play(graph, shape, random.Random(seed))
    ran = {(task.node, task.round) for _, task in log}

    def has_input(node, number: int) -> bool:
        def has_run(name: str) -> bool:
            loop = graph.by_id[name].loop
            return (name, number) in ran if loop == node.loop else any(other == name for other, _ in ran)

        return not node.after or any(has_run(name) for name in node.after)

    for slot, reason in schedule.skipped.items():
        idle = not has_input(graph.by_id[slot[0]], slot[1])
        assert reason == ("dependencies" if idle else "when")
        assert idle or chance(shape.luck, slot) >= 0.8
    for slot in ran:
        assert has_input(graph.by_id[slot[0]], slot[1])
        assert chance(shape.luck, slot) < 0.8


def test_a_shared_env_is_never_stepped_twice_at_once(world):
    watch = {"sees_env": True, "env": ("e",)}
    nodes = [{"id": name, "agent": f"agent{k}", **watch} for k, name in enumerate("abc")]
    graph = episode_graph(world.workflow(nodes, loops={"l": {"nodes": ["b"], "max_rounds": 2}}))
    schedule = Schedule(graph, dict.fromkeys("abc", "e"), should_run=lambda *_: True, should_repeat=lambda *_: True)
    assert schedule.initial_tasks() == [Task("a", 0, "run"), Task("b", 0, "run"), Task("c", 0, "run")]
    assert schedule.on_finished(Task("c", 0, "run")) == []
    assert schedule.on_finished(Task("b", 0, "run")) == []
    assert schedule.on_finished(Task("a", 0, "run")) == [Task("a", 0, "step")]
    assert schedule.on_finished(Task("a", 0, "step")) == [Task("b", 0, "step")]
    assert schedule.on_finished(Task("b", 0, "step")) == [Task("b", 1, "run")]
    assert schedule.on_finished(Task("b", 1, "run")) == [Task("b", 1, "step")]
    assert schedule.on_finished(Task("b", 1, "step")) == [Task("c", 0, "step")]
    assert schedule.on_finished(Task("c", 0, "step")) == []


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
