"""Paths in a workflow file, rewritten for another file.

Invariant: the new text, resolved from `target`, names the same file as the old text, resolved from `origin`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.core.paths import is_module, names_env, names_function, resolve_folder, resolve_path, split_ref
from recipe.dag.workflow.agent_schema import Policy
from recipe.dag.workflow.schema import Node


def template_file(node: Node, base: str | Path) -> Path | None:
    """Return the file that the option `template` of the node's prompt names; None if there is none. `base`: the
    workflow file or its folder."""
    template = node.agent_options.pre_process_kwargs.get("template")
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


def relocated_node(node: Node, origin: str | Path, target: str | Path) -> Node:
    """Return a node of the workflow file `origin` with its paths as the workflow file `target` must write them."""
    if Path(origin).resolve() == Path(target).resolve():
        return node
    options, update = node.agent_options, {}
    if options.process_path is not None:
        update["process_path"] = relocated_ref(options.process_path, origin, target)
    if template_file(node, origin) is not None:
        text = _relocated(options.pre_process_kwargs["template"], origin, target)
        update["pre_process_kwargs"] = {**options.pre_process_kwargs, "template": text}
    if options.env_path:
        paths = (path if names_env(path) else relocated_ref(path, origin, target) for path in options.env_path)
        update["env_path"] = tuple(paths)
    ref = node.executable_ref and relocated_ref(node.executable_ref, origin, target)
    changed: dict[str, Any] = {"agent_options": options.model_copy(update=update)} if update else {}
    if node.candidates is not None and names_function(node.candidates.by):
        by = relocated_ref(node.candidates.by, origin, target)
        changed["candidates"] = node.candidates.model_copy(update={"by": by})
    for key, value in node.executable_kwargs.items():
        if names_function(value):
            moved = relocated_ref(value, origin, target)
            changed["executable_kwargs"] = changed.get("executable_kwargs", node.executable_kwargs) | {key: moved}
    return node.model_copy(update={**changed, "executable_ref": ref})


def relocated_policy(policy: Policy, origin: str | Path, target: str | Path) -> Policy:
    """Return a policy of the workflow file `origin` with its paths as the workflow file `target` must write them."""
    if policy.api is None or policy.api.script is None:
        return policy
    script = relocated_ref(policy.api.script, origin, target)
    return policy.model_copy(update={"api": policy.api.model_copy(update={"script": script})})
