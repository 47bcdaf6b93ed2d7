"""Paths in a workflow file, rewritten for another file.

Invariant: the new text, resolved from `target`, names the same file as the old text, resolved from `origin`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from recipe.dag.core.errors import UserError
from recipe.dag.core.frozen import M, with_code
from recipe.dag.core.paths import is_module, resolve_path, split_ref
from recipe.dag.workflow.node import Node


def template_file(node: Node, base: str | Path) -> Path | None:
    """Return the file that the option `template` of the node's prompt names; None if there is none. `base`: the
    workflow file or its folder."""
    template = node.prompt_options.get("template")
    try:
        return resolve_path(template, base) if isinstance(template, str) else None
    except (UserError, OSError):  # another option of this name, or reported by the agent; a text may be too long
        return None


def relocated_path(
    path: str, resolve: Callable[[str, str | Path], Path], origin: str | Path, target: str | Path
) -> str:
    """Return a path in the workflow file `origin` as the file `target` must write it. `resolve`: `resolve_path` or
    `resolve_folder`."""
    found = resolve(path, origin)
    with suppress(UserError):
        if resolve(path, target) == found:
            return path
    return os.path.relpath(found, Path(target).resolve().parent)


def relocated_ref(ref: str, origin: str | Path, target: str | Path) -> str:
    """Do the same for `file.py:Name`, or a file alone."""
    file, name = split_ref(ref)
    file = relocated_path(file, resolve_path, origin, target)
    return f"{file}:{name}" if name else file


def relocated(model: M, origin: str | Path, target: str | Path) -> M:
    """Return a part of the workflow file `origin` with its code as the workflow file `target` must write it."""
    if Path(origin).resolve() == Path(target).resolve():
        return model
    return with_code(model, lambda ref: ref if is_module(split_ref(ref)[0]) else relocated_ref(ref, origin, target))


def relocated_node(node: Node, origin: str | Path, target: str | Path) -> Node:
    """Do the same for a node, with the file of its prompt's template."""
    if template_file(node, origin) is not None:
        text = relocated_ref(node.prompt_options["template"], origin, target)
        node = node.model_copy(update={"prompt_options": {**node.prompt_options, "template": text}})
    return relocated(node, origin, target)
