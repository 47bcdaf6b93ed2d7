"""What an agent's hooks are given, for tests of recipes."""

from __future__ import annotations

from typing import Any

from recipe.dag.types.context import Context
from recipe.dag.types.record import Call


def context_of(node: str, problem: str, *calls: Call, **fields: Any) -> Context:
    """Return the context of `node`, whose agent has its name, after `calls`; `fields` of it are as given."""
    made = {"uid": "u", "episode": 0, "turn": 0, "max_turns": 1, "agent": node, "node": node, "calls": list(calls)}
    made |= {"upstream": {call.node: call for call in calls}, "history": [c for c in calls if c.node == node]}
    made |= {"obs": None, "validate": False, "call_tool": None}
    return Context(sample={"prompt": [{"role": "user", "content": problem}]}, **(made | fields))
