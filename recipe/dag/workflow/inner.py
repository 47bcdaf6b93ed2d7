"""What a sub-workflow brings, and what of it stays behind.

Invariant: what the including file decides in its place is named in a warning, unless both say the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.dag.workflow.problem import Problem
from recipe.dag.workflow.schema import Agent
from recipe.dag.workflow.source import Source

LEFT_OUT = ("REWARD", "ADVANTAGE", "ACTOR", "CRITIC", "REFERENCE")
"""Roles whose nodes stay behind."""
DECIDED = ("episode", "algorithm")
"""Blocks that the including file has for all."""


@dataclass(slots=True)
class Inner:
    """What one sub-workflow brings."""

    source: Source
    kept: dict[int, Any]
    """Its nodes by their place in its file."""
    loops: dict[str, Any]
    envs: dict[str, Any]
    agents: list[Any]

    @property
    def ids(self) -> list[str]:
        return [node["node_id"] for node in self.kept.values() if named(node)]

    def agent_of(self, node: Any) -> str | None:
        """The name by which that file calls the node's agent."""
        if not rolls_out(node):
            return None
        if "agent" in node:
            return node["agent"] if isinstance(node["agent"], str) else None
        group = node.get("agent_group", 0 if len(self.agents) == 1 else None)
        known = isinstance(group, int) and 0 <= group < len(self.agents) and isinstance(self.agents[group], dict)
        name = self.agents[group].get("name") if known else None
        return name if isinstance(name, str) else None


def overruled(inner: Inner, outer: Source, ours: dict[str, str]) -> Iterator[Problem]:
    """Blocks of a sub-workflow that the including file decides otherwise; `ours`: their agent -> its agent."""
    theirs, file = inner.source.data, Path(outer.file).name
    for key in DECIDED:
        if key in theirs and theirs[key] != outer.data.get(key):
            yield inner.source.problem((key,), f"`{file}` decides this; nothing reads it here", key=True)
    agents = outer.data.get("agents")
    known = [agent for agent in agents if isinstance(agent, dict)] if isinstance(agents, list) else []
    for index, agent in enumerate(inner.agents):
        name = agent.get("name") if isinstance(agent, dict) else None
        if not isinstance(name, str) or name not in ours:
            continue
        mine = next((other for other in known if other.get("name") == ours[name]), {})
        for key in sorted(agent.keys() & Agent.model_fields.keys() - {"name", "policy"}):
            if agent[key] != mine.get(key):
                message = f"agent `{ours[name]}` of `{file}` takes its place; nothing reads this here"
                yield inner.source.problem(("agents", index, key), message, key=True)


def rolls_out(node: Any) -> bool:
    return isinstance(node, dict) and str(node.get("node_role", "")).upper() == "ROLLOUT"


def left_out(node: Any) -> bool:
    return isinstance(node, dict) and str(node.get("node_role", "")).upper() in LEFT_OUT


def named(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("node_id"), str)
