"""Translation of siiRL's workflow files, which have no `agents` and `policies`, into this project's.

Invariant: each part of the result knows its position in siiRL's file. Every setting of that file has its effect or is
named in a warning.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.compat.siirl.graph import check_graph, relink
from recipe.dag.compat.siirl.nodes import Nodes, read_nodes
from recipe.dag.compat.siirl.policies import make_policies
from recipe.dag.compat.siirl.settings import set_algorithm, set_rewards
from recipe.dag.core.suggestion import hint_at
from recipe.dag.workflow.source import Origin, Source, nowhere

KEPT = ("dag_id", "description", "global_config", "envs", "episode", "loops", "algorithm")


def translate(source: Source) -> Source:
    """Return the file with `agents` and `policies`, and nodes in the long form. Mistakes are added to its problems."""
    result = Source(source.file, problems=source.problems, warnings=source.warnings)
    result.origins[()] = Origin(source, ())
    data: dict[str, Any] = {key: source.data[key] for key in KEPT if source.data.get(key) is not None}
    result.data = data
    for key in source.data:
        if key not in (*KEPT, "nodes") and not key.startswith("x-"):
            # actor1_config holds an anchor, and is no global_config
            hint = hint_at(key, KEPT, cutoff=0.8) or " (anchors in it may be used)"
            result.warnings.append(source.problem((key,), f"unknown key, which has no effect{hint}", key=True))
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
    """Add the nodes of the episode and its rewards. Keys of siiRL's node that were removed count as not written."""
    written: list[Any] = []
    for index, node in nodes.kept.items():
        path = ("nodes", len(written))
        result.origins[path] = Origin(source, ("nodes", index))
        original = source.data["nodes"][index]
        for key in original.keys() - node.keys() if isinstance(node, dict) else ():
            result.origins[(*path, key)] = nowhere(source, ("nodes", index))
        if isinstance(node, dict) and isinstance(node.get("dependencies"), list):
            node["dependencies"], old_paths = relink(nodes, index)
            for position, old_path in enumerate(old_paths):
                result.origins[(*path, "dependencies", position)] = Origin(source, old_path)
        options, old_options = (d.get("agent_options") if isinstance(d, dict) else None for d in (node, original))
        if isinstance(options, dict) and isinstance(old_options, dict):
            for key in old_options.keys() - options.keys():
                result.origins[(*path, "agent_options", key)] = nowhere(source, ("nodes", index, "agent_options"))
        nodes.places[index] = len(written)
        written.append(node)
    result.data["nodes"] = written
