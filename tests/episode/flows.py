"""Workflows of branches, loops and votes, and what to say of the episodes that they make."""

from __future__ import annotations

from recipe.dag.types.record import Episode
from tests.episode.conftest import KINDS

PARSE = """
from recipe.dag.types.context import Output
def post_process(tokenizer, prompt_ids, response_ids, *, context):
    text = context.call.text
    return Output(parsed={"answer": text.split()[-1] if text else None}, done="stop" in text)
"""
SEEN = """
from recipe.dag.types.context import Output
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
        agent = {} if KINDS & node.keys() else {"agent": f"agent{group}", **({"hooks": hook} if hook else {})}
        listed.append({"id": name, **agent, **node})
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


def branches(episode: Episode) -> dict[tuple, str]:
    return {(call.node, call.turn, call.round): call.branch for call in episode.calls}


def router(world, **keys):
    """An agent names a branch; a join waits for both."""
    nodes = {
        "route": {},
        "math": {"after": ["route"], "when": {"node": "route", "key": "answer", "equals": "math"}},
        "code": {"after": ["route"], "when": {"node": "route", "key": "answer", "equals": "code"}},
        "deep": {"after": ["code"]},
        "join": {"after": ["math", "deep"]},
    }
    return flow_of(world, nodes, **keys)


def debate(world, *, hook: str = "parse.py", until: dict | None = None, max_rounds: int = 3, **keys):
    """Two solvers, two debaters in a loop, and a judge."""
    nodes = {
        "solve_a": {},
        "solve_b": {},
        "talk_a": {"after": ["solve_a", "solve_b"]},
        "talk_b": {"after": ["solve_a", "solve_b", "talk_a"]},
        "judge": {"after": ["talk_b"]},
    }
    loop = {"nodes": ["talk_a", "talk_b"], "max_rounds": max_rounds, "until": until}
    return flow_of(world, nodes, hook=hook, loops={"debate": loop}, **keys)


TALK = {"agent0": "it is 4", "agent1": "it is 5", "agent4": "judged 4"}
AGREE = {"agree": ["talk_a", "talk_b"]}


def voters(world, ties: str = "first", v2: dict | None = None, **keys):
    nodes = {
        **{f"v{k}": {} for k in range(4)},
        "v2": v2 or {},
        "vote": {"after": ["v0", "v1", "v2", "v3"], "vote": {"ties": ties}},
        "last": {"after": ["vote"]},
    }
    return flow_of(world, nodes, **keys)
