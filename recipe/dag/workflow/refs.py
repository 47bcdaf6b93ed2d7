"""`!Ref global_config.a.b`: the value that stands there, put where the tag is.

Invariant: afterwards no `Ref` is left in the data. Legal inside a node's `config` only, as in siiRL.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.workflow.source import Ref, Source


def resolve_refs(source: Source) -> None:
    """Mistakes go to `source.problems`; what a wrong one stands for is None."""
    known = source.data.get("global_config")

    def visit(value: Any, path: tuple) -> Any:
        if isinstance(value, dict):
            return {key: visit(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [visit(item, (*path, index)) for index, item in enumerate(value)]
        if not isinstance(value, Ref):
            return value
        if not (path[0] == "nodes" and len(path) > 3 and path[2] == "config"):
            source.problems.append(source.problem(path, "`!Ref` may stand only inside a node's `config`"))
        found = {"global_config": known}
        for part in value.target.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if found is None or isinstance(found, Ref) or not value.target.startswith("global_config."):
            message = f"`!Ref {value.target}` names nothing; write `!Ref global_config.name` of a value that is set"
            source.problems.append(source.problem(path, message))
            return None
        return found

    source.data = visit(source.data, ())
