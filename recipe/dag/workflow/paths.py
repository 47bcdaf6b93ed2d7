"""Where the files are that a workflow names.

Invariant: a path means the same from whatever folder a command is run: first the workflow file's folder, then the
project's root (the nearest folder above it with `recipe/`, `.git` or `pyproject.toml`), and the current folder last.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from recipe.dag.errors import UserError


def split_ref(ref: str) -> tuple[str, str | None]:
    """`file.py:Name` -> (`file.py`, `Name`); `file.py` -> (`file.py`, None)."""
    place, colon, name = ref.rpartition(":")
    if colon and name.replace(".", "").isidentifier():
        return place, name
    return ref, None


def is_module(place: str) -> bool:
    """`pkg.mod` rather than a file."""
    return not place.endswith(".py") and all(part.isidentifier() for part in place.split("."))


def names_env(entry: str) -> bool:
    """A name under `envs` rather than `file.py:Class`."""
    return not any(sign in entry for sign in ":./")


def project_root(folder: Path) -> Path | None:
    marks = ("recipe", ".git", "pyproject.toml")
    return next((f for f in (folder, *folder.parents) if any((f / mark).exists() for mark in marks)), None)


def search_folders(base: str | Path) -> list[Path]:
    """`base`: the workflow file or its folder."""
    base = Path(base).absolute()
    folder = base if base.is_dir() else base.parent
    folders = [folder, project_root(folder), Path.cwd()]
    return list(dict.fromkeys(f for f in folders if f is not None))


def resolve_path(ref: str, base: str | Path) -> Path:
    """The file that `ref` (with or without `:Name`) means, absolute. Raises UserError where there is none."""
    place, _ = split_ref(ref)
    folders = search_folders(base)
    for folder in folders:
        if (folder / place).is_file():
            return (folder / place).resolve()
    raise UserError(f"no such file `{place}`; looked in {', '.join(map(str, folders))}")


def find_beside(folder: Path, module: str) -> Path | None:
    """The file `module`.py in `folder`, or the folder of that name, absolute; None where there is none, and for modules
    of the standard library."""
    if module in sys.stdlib_module_names or not module.isidentifier():
        return None
    package, file = folder / module, folder / f"{module}.py"
    if (package / "__init__.py").is_file():
        return package.resolve()
    if file.is_file():
        return file.resolve()
    return package.resolve() if package.is_dir() else None


def find_source(ref: str, base: str | Path) -> Path:
    """Like resolve_path, and finds `pkg.mod` without importing anything."""
    place, _ = split_ref(ref)
    if not is_module(place):
        return resolve_path(ref, base)
    top, *inner = place.split(".")
    roots = [folder / top for folder in (*search_folders(base), *map(Path, sys.path))]
    spec = importlib.util.find_spec(top)
    roots += [Path(location) for location in (spec.submodule_search_locations or [] if spec else [])]
    for root in roots:
        path = root.joinpath(*inner)
        for candidate in (path.with_name(path.name + ".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate.resolve()
    raise UserError(f"no module `{place}`")
