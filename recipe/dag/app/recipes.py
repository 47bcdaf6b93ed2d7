"""`verl-dag run`: the scripts of the recipes, run in the current folder.

Invariant: a script finds the project's folders as in a checkout, also from an installed package, and writes to
`outputs/` in the current folder. Besides that, only links are written, in `.verl-dag/`. In the checkout itself a script
runs as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from recipe.dag.core.errors import UserError, writing
from recipe.dag.core.paths import shipped
from recipe.dag.core.suggestion import did_you_mean

T = TypeVar("T")
TINY = "run_tiny_cpu.sh"
READ, WRITTEN = ("recipe", "workflows", "envs", "preprocess"), ("outputs", "data")
"""The folders that scripts name."""


def scripts() -> dict[str, dict[str, Path]]:
    """Return recipe -> name -> script, without those that need `examples/` if this is not a checkout."""
    recipes: dict[str, dict[str, Path]] = {}
    for path in sorted(shipped("recipe").glob("*/*.sh")):
        if _has_examples() or "examples/" not in path.read_text():
            recipes.setdefault(path.parent.name, {})[path.name] = path
    return recipes


def listing(recipe: str | None = None) -> list[str]:
    """Return a line for each script, of one recipe or of all: its name, and the first line of its header."""
    chosen = scripts()
    chosen = chosen if recipe is None else {recipe: _chosen(recipe, chosen, "recipe")}
    return [
        f"{name}/{script}: {path.read_text().splitlines()[1].removeprefix('# ')}"
        for name, own in chosen.items()
        for script, path in own.items()
    ]


def start(recipe: str, script: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by a recipe's script, with this Python first on PATH. Raises UserError."""
    own = _chosen(recipe, scripts(), "recipe")
    path = _chosen(script if script.endswith(".sh") else f"{script}.sh", own, f"script of {recipe}")
    here = Path.cwd()
    if here != shipped("recipe").parent:
        path = _linked(here) / "recipe" / recipe / path.name
    python = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": os.pathsep.join([python, os.environ.get("PATH", os.defpath)])}
    sys.stdout.flush()
    os.execvpe("bash", ["bash", str(path), *arguments], environment)


def _linked(folder: Path) -> Path:
    """Return a folder in `folder` that looks like a checkout to a script."""
    checkout = folder / ".verl-dag"
    targets = {name: shipped(name) for name in READ} | {name: folder / name for name in WRITTEN}
    if _has_examples():
        targets["examples"] = _examples()
    with writing(checkout, "; run it in another folder"):
        checkout.mkdir(exist_ok=True)
        (folder / "outputs").mkdir(exist_ok=True)
        for name, target in targets.items():
            link = checkout / name
            if not link.is_symlink() or link.readlink() != target:
                link.unlink(missing_ok=True)
                link.symlink_to(target)
    return checkout


def _examples() -> Path:
    return shipped("recipe").parent / "examples"


def _has_examples() -> bool:
    return (_examples() / "small_model.py").is_file()


def _chosen(name: str, among: Mapping[str, T], kind: str) -> T:
    if name not in among:
        raise UserError(f"no {kind} `{name}`{did_you_mean(name, among)}; verl-dag run lists them")
    return among[name]
