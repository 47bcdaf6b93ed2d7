"""Finds the files that a workflow names.

Invariant: a path is searched in the workflow file's folder, then in the project's root (the nearest folder above it
with `recipe/`, `.git` or `pyproject.toml`), then in the current folder, so it rarely depends on the latter, and last
among the files that are shipped with the engine, so that a copy of a shipped workflow works in any folder.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TypeGuard

from recipe.dag.core.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
"""The folder that contains `recipe/`: the checkout, or site-packages."""
_SHIPPED = {"recipe": ROOT, **dict.fromkeys(("envs", "preprocess", "workflows"), ROOT / "verl_dag")}
"""The folders of this project that an installation has, and what holds them there: `verl_dag/` has links to those that
a checkout has in its root."""


def shipped(path: str) -> Path:
    """Return the absolute path of a file or folder that this project ships, such as `workflows/workflow_grpo.yaml`."""
    return (_SHIPPED[Path(path).parts[0]] / path).resolve()


def split_ref(ref: str) -> tuple[str, str | None]:
    """Split `file.py:Name` into (`file.py`, `Name`), and `file.py` into (`file.py`, None)."""
    path, colon, name = ref.rpartition(":")
    if colon and name.replace(".", "").isidentifier():
        return path, name
    return ref, None


def is_module(path: str) -> bool:
    """Return whether this is `pkg.mod` rather than a file."""
    return not path.endswith(".py") and all(part.isidentifier() for part in path.split("."))


def names_env(entry: str) -> bool:
    """Return whether this is a name under `envs` rather than `file.py:Class`."""
    return not any(sign in entry for sign in ":./")


def names_function(value: object) -> TypeGuard[str]:
    """Return whether the value of an option is `file.py:function`."""
    if not isinstance(value, str):
        return False
    path, name = split_ref(value)
    return name is not None and path.endswith(".py") and " " not in path


def project_root(folder: Path) -> Path | None:
    """Return the nearest folder, from `folder` upwards, that looks like a project's root."""
    marks = ("recipe", ".git", "pyproject.toml")
    return next((f for f in (folder, *folder.parents) if any((f / mark).exists() for mark in marks)), None)


def search_folders(base: str | Path) -> list[Path]:
    """Return the folders in which a path is searched. `base`: the workflow file or its folder."""
    base = Path(base).absolute()
    folder = base if base.is_dir() else base.parent
    folders = [folder, project_root(folder), Path.cwd()]
    return list(dict.fromkeys(f for f in folders if f is not None))


def resolve_path(ref: str, base: str | Path) -> Path:
    """Return the absolute path of the file in `ref` (with or without `:Name`). Raises UserError if there is none."""
    path, _ = split_ref(ref)
    folders = search_folders(base)
    for folder in folders:
        if (folder / path).is_file():
            return (folder / path).resolve()
    if Path(path).parts[:1] and Path(path).parts[0] in _SHIPPED and shipped(path).is_file():
        return shipped(path)
    raise UserError(f"no such file `{path}`; looked in {', '.join(map(str, folders))}")


def resolve_folder(folder: str, base: str | Path) -> Path:
    """Return the absolute path of a folder. Raises UserError if there is none."""
    folders = search_folders(base)
    for candidate in folders:
        if (candidate / folder).is_dir():
            return (candidate / folder).resolve()
    raise UserError(f"no such folder `{folder}`; looked in {', '.join(map(str, folders))}")


def find_beside(folder: Path, module: str) -> Path | None:
    """Return the absolute path of `module`.py in `folder`, or of the folder with that name; None if neither exists, or
    for a module of the standard library."""
    if module in sys.stdlib_module_names or not module.isidentifier():
        return None
    package, file = folder / module, folder / f"{module}.py"
    if (package / "__init__.py").is_file():
        return package.resolve()
    if file.is_file():
        return file.resolve()
    return package.resolve() if package.is_dir() else None


def find_source(ref: str, base: str | Path) -> Path:
    """Do the same as `resolve_path`, and also find `pkg.mod`, without importing anything."""
    module, _ = split_ref(ref)
    if not is_module(module):
        return resolve_path(ref, base)
    top, *inner = module.split(".")
    roots = [folder / top for folder in (*search_folders(base), *map(Path, sys.path))]
    spec = importlib.util.find_spec(top)
    roots += [Path(location) for location in (spec.submodule_search_locations or [] if spec else [])]
    for root in roots:
        path = root.joinpath(*inner)
        for candidate in (path.with_name(path.name + ".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate.resolve()
    raise UserError(f"no module `{module}`")
