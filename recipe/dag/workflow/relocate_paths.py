"""Paths in a workflow file, rewritten for another file.

Invariant: the new text, resolved from `target`, names the same file as the old text, resolved from `origin`.
"""

from __future__ import annotations

import os
from pathlib import Path

from recipe.dag.core.errors import UserError
from recipe.dag.core.frozen import M, with_code
from recipe.dag.core.paths import is_module, resolve_folder, resolve_path, split_ref
from recipe.dag.workflow.node import Node


def template_file(node: Node, base: str | Path) -> Path | None:
    """Return the file that the option `template` of the node's prompt names; None if there is none. `base`: the
    workflow file or its folder."""
    template = node.prompt_options.get("template")
    try:
        return resolve_path(template, base) if isinstance(template, str) else None
    except (UserError, OSError):  # another option of this name, or reported by the agent; a text may be too long
        return None


def relocated_ref(ref: str, origin: str | Path, target: str | Path) -> str:
    """Return `file.py:Name` or `pkg.mod:Name` in the workflow file `origin` as the file `target` must write it."""
    file, name = split_ref(ref)
    if Path(origin).resolve() == Path(target).resolve() or is_module(file):
        return ref
    return _relocated(ref, origin, target)


def _relocated(ref: str, origin: str | Path, target: str | Path) -> str:
    name, path = split_ref(ref)[1], resolve_path(ref, origin)
    try:
        if resolve_path(ref, target) == path:
            return ref
    except UserError:
        pass
    relative = os.path.relpath(path, Path(target).resolve().parent)
    return f"{relative}:{name}" if name else relative


def relocated_folder(folder: str, origin: str | Path, target: str | Path) -> str:
    """Do the same for a folder."""
    path = resolve_folder(folder, origin)
    try:
        if resolve_folder(folder, target) == path:
            return folder
    except UserError:
        pass
    return os.path.relpath(path, Path(target).resolve().parent)


def relocated(model: M, origin: str | Path, target: str | Path) -> M:
    """Return a part of the workflow file `origin` with its code as the workflow file `target` must write it."""
    return with_code(model, lambda ref: relocated_ref(ref, origin, target))


def relocated_node(node: Node, origin: str | Path, target: str | Path) -> Node:
    """Do the same for a node, with the file of its prompt's template."""
    if Path(origin).resolve() == Path(target).resolve():
        return node
    if template_file(node, origin) is not None:
        text = _relocated(node.prompt_options["template"], origin, target)
        node = node.model_copy(update={"prompt_options": {**node.prompt_options, "template": text}})
    return relocated(node, origin, target)
