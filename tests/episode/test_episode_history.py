"""All calls that a node can know of, in the order in which they were made."""

from __future__ import annotations

CODE = """
def pre_process(tokenizer, prompt_ids, obs, *, context):
    seen = [f"{call.node}{call.turn}{call.round}" for call in context.calls]
    return [{"role": "user", "content": " ".join(seen) or "-"}]
"""


def shown(world, nodes: list[dict], **keys) -> dict[tuple[str, int, int], list[str]]:
    own = {"hooks": "own.py"}
    flow = world.workflow([{**node, **own} for node in nodes], files={"own.py": CODE}, **keys)
    calls = world.play(flow).calls
    told = {(c.node, c.turn, c.round): c.prompt_text.split("user\n")[1].split("<|")[0] for c in calls}
    return {place: [] if text == "-" else text.split() for place, text in told.items()}


def test_a_node_sees_every_call_of_the_turns_before_and_its_ancestors_of_this_one(world):
    nodes = [{"id": "a"}, {"id": "b"}, {"id": "c", "after": ["a"]}]
    seen = shown(world, nodes, episode={"max_turns": 3})
    first, second = ["a00", "b00", "c00"], ["a10", "b10", "c10"]
    assert seen["c", 0, 0] == ["a00"] and seen["b", 0, 0] == []
    assert seen["a", 1, 0] == first
    assert seen["c", 2, 0] == [*first, *second, "a20"]


def test_a_node_in_a_loop_sees_every_round_before(world):
    nodes = [{"id": "a"}, {"id": "b", "after": ["a"]}, {"id": "j", "after": ["b"]}]
    seen = shown(world, nodes, loops={"talk": {"nodes": ["a", "b"], "max_rounds": 3}})
    assert seen["a", 0, 2] == ["a00", "b00", "a01", "b01"]
    assert seen["j", 0, 0] == ["a00", "b00", "a01", "b01", "a02", "b02"]
