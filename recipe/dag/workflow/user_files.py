"""The files of code and templates that a workflow names, with the files of the same project that they import.

Invariant: nothing is imported or run. Names of files are relative to the project's root, so they do not depend on the
location of the project. The engine's files are not included.
"""

from __future__ import annotations

import ast
from pathlib import Path

from recipe.dag.core.errors import UserError
from recipe.dag.core.frozen import with_code
from recipe.dag.core.paths import find_source, is_module, project_root, split_ref
from recipe.dag.workflow.relocate_paths import template_file
from recipe.dag.workflow.schema import Workflow

ENGINE = Path(__file__).resolve().parents[1]
PUBLIC = ENGINE.parents[1] / "verl_dag"
"""The package of the engine's names; what it links to is not in it."""


def user_files(workflow: Workflow) -> dict[str, Path]:
    """Return portable name -> path of the files of hooks, envs, rewards, compute functions and tools of `workflow`, of
    the files that they import, and of prompt templates."""
    pending, files = [path for ref in _refs(workflow) if (path := _source(ref, workflow.path))], {}
    pending += [path for node in workflow.nodes if (path := template_file(node, workflow.path)) is not None]
    while pending:
        path = pending.pop()
        if path in files.values() or ENGINE in path.parents or path.parent == PUBLIC:
            continue
        name = portable_name(path)
        files[str(path) if name in files else name] = path
        pending += _imported(path)
    return dict(sorted(files.items()))


def portable_name(path: Path) -> str:
    """Return `path` relative to its project's root, or the file's name if it is not part of a project."""
    root = project_root(path.parent)
    return path.relative_to(root).as_posix() if root is not None else path.name


def portable_ref(ref: str, base: str | Path) -> str:
    """Return `file.py:Name` with the file's portable name. Modules and names of envs are returned as they are."""
    file, name = split_ref(ref)
    path = None if is_module(file) else _source(ref, base)
    if path is None:
        return ref
    return f"{portable_name(path)}:{name}" if name else portable_name(path)


def _refs(workflow: Workflow) -> list[str]:
    refs: list[str] = []

    def note(ref: str) -> str:
        refs.append(ref)
        return ref

    with_code(workflow.model_copy(update={"tools": {}}), note)  # of the declared tools, those that agents have count
    return refs


def _source(ref: str, base: str | Path) -> Path | None:
    try:
        return find_source(ref, base)
    except UserError:  # the name of an env
        return None


def _imported(path: Path) -> list[Path]:
    """Return the files that `path` imports, resolved from its folder and from its project's root."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # reported where the file is loaded
        return []
    roots = [folder for folder in (path.parent, project_root(path.parent)) if folder is not None]
    files = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            files += [_module(roots, alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            folders = [path.parents[node.level - 1]] if node.level else roots
            parts = node.module.split(".") if node.module else []
            files.append(_module(folders, parts))
            files += [_module(folders, [*parts, alias.name]) for alias in node.names]
    return [file for file in files if file is not None and "site-packages" not in file.parts]


def _module(roots: list[Path], parts: list[str]) -> Path | None:
    for root in roots if parts else ():
        path = root.joinpath(*parts)
        for candidate in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate.resolve()
    return None
