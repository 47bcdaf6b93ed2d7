"""Paths that a file names, as another file has to write them.

Invariant: the new text means, looked up from `target`, the file that the old one means from `origin`.
"""

from __future__ import annotations

import os
from pathlib import Path

from recipe.dag.errors import UserError
from recipe.dag.workflow.paths import is_module, names_env, resolve_path, split_ref
from recipe.dag.workflow.schema import Node


def rebased(ref: str, origin: str | Path, target: str | Path) -> str:
    """`file.py:Name` or `pkg.mod:Name`; both bases are workflow files."""
    place, name = split_ref(ref)
    if Path(origin).resolve() == Path(target).resolve() or is_module(place):
        return ref
    meant = resolve_path(ref, origin)
    try:
        if resolve_path(ref, target) == meant:
            return ref
    except UserError:
        pass
    moved = os.path.relpath(meant, Path(target).resolve().parent)
    return f"{moved}:{name}" if name else moved


def rebased_node(node: Node, origin: str | Path, target: str | Path) -> Node:
    if Path(origin).resolve() == Path(target).resolve():
        return node
    options, update = node.agent_options, {}
    if options.process_path is not None:
        update["process_path"] = rebased(options.process_path, origin, target)
    if options.env_path:
        paths = (path if names_env(path) else rebased(path, origin, target) for path in options.env_path)
        update["env_path"] = tuple(paths)
    ref = node.executable_ref and rebased(node.executable_ref, origin, target)
    changed = {"agent_options": options.model_copy(update=update)} if update else {}
    return node.model_copy(update={**changed, "executable_ref": ref})
