"""siiRL's workflow files, read as they are: a file without `agents` and `policies` is turned into one that has them.

Invariant: what comes out is a file of this language, each part of which knows where it stands in the original. What
siiRL declared is honoured, or named in a warning.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.workflow.problem import closest
from recipe.dag.workflow.short_form import LONG
from recipe.dag.workflow.siirl.graph import check_graph, relink
from recipe.dag.workflow.siirl.nodes import Nodes, read_nodes
from recipe.dag.workflow.siirl.policies import make_policies
from recipe.dag.workflow.siirl.settings import set_algorithm, set_rewards
from recipe.dag.workflow.source import Origin, Source, nowhere

KEPT = ("dag_id", "description", "global_config", "envs", "episode", "loops", "algorithm")


def is_foreign(source: Source) -> bool:
    """A file of siiRL's: nodes, but neither agents nor policies, and none of the keys that only this language has."""
    nodes = source.data.get("nodes")
    if not isinstance(nodes, list) or not nodes or {"agents", "policies"} & source.data.keys():
        return False
    own = {"agent", "workflow", "policy", *LONG}
    return not any(isinstance(node, dict) and own & node.keys() for node in nodes)


def translate(source: Source) -> Source:
    """The file in this language; mistakes go to its problems."""
    result = Source(source.file, problems=source.problems, warnings=source.warnings)
    result.origins[()] = Origin(source, ())
    data: dict[str, Any] = {key: source.data[key] for key in KEPT if source.data.get(key) is not None}
    result.data = data
    for key in source.data:
        if key not in (*KEPT, "nodes") and not key.startswith("x-"):
            near = closest(key, KEPT)
            hint = f"; did you mean `{near}`?" if near else " (anchors in it may be used)"
            result.warnings.append(source.problem((key,), f"unknown key, nothing reads it{hint}", key=True))
    for key in ("episode", "algorithm"):
        if isinstance(data.get(key), dict):
            data[key] = dict(data[key])
    nodes = read_nodes(source, result)
    if not check_graph(source, result, nodes) or not nodes.sound:
        result.unread.add("")
    _write_nodes(source, result, nodes)
    make_policies(source, result, nodes)
    set_rewards(source, result, nodes)
    set_algorithm(source, result, nodes)
    for key in ("episode", "algorithm"):
        if data.get(key) == {}:
            del data[key]
    return result


def _write_nodes(source: Source, result: Source, nodes: Nodes) -> None:
    """Those that run in the episode or score it. What siiRL's node had and this one has not counts as not written."""
    written: list[Any] = []
    for index, node in nodes.kept.items():
        place = ("nodes", len(written))
        result.origins[place] = Origin(source, ("nodes", index))
        original = source.data["nodes"][index]
        for key in original.keys() - node.keys() if isinstance(node, dict) else ():
            result.origins[(*place, key)] = nowhere(source, ("nodes", index))
        if isinstance(node, dict) and isinstance(node.get("dependencies"), list):
            node["dependencies"], places = relink(nodes, index)
            for position, found in enumerate(places):
                result.origins[(*place, "dependencies", position)] = Origin(source, found)
        options, before = (d.get("agent_options") if isinstance(d, dict) else None for d in (node, original))
        if isinstance(options, dict) and isinstance(before, dict):
            for key in before.keys() - options.keys():
                result.origins[(*place, "agent_options", key)] = nowhere(source, ("nodes", index, "agent_options"))
        nodes.places[index] = len(written)
        written.append(node)
    result.data["nodes"] = written
