"""Which package may import which: the table of docs/architecture.md, held against every import of recipe/dag, those of
the type checker included, and the one module that imports recipe.sandbox."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "recipe" / "dag"
SANDBOX = ROOT / "recipe" / "sandbox"
SEAM = ENGINE / "tools" / "sandbox.py"
"""The module through which everything else reaches recipe.sandbox."""
LAYERS = (
    {"core"},
    {"types"},
    {"credit", "endpoint"},
    {"algorithms", "tools"},
    {"workflow"},
    {"compat"},
    {"loading", "remote"},
    {"episode"},
    {"reward", "report", "settings", "coach"},
    {"platform"},
    {"policy"},
    {"train"},
    {"app"},
    {"main", "cli"},
)
"""From the bottom: a package or module imports those below it, and of its own layer itself alone."""
HEAVY = {"verl", "ray", "sglang"}
HEAVY_PACKAGES = {"policy", "platform", "train", "app", "main"}


def part_of(module: str) -> str | None:
    """The package, or the module at the top, that an imported name of the engine belongs to."""
    names = module.split(".")
    return names[2] if names[:2] == ["recipe", "dag"] and len(names) > 2 else None


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Yield the imported modules and, as `module.name`, the imported names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ENGINE.rglob("*.py")):
        part = path.relative_to(ENGINE).parts[0].removesuffix(".py")
        if part != "__init__" and "new_task" not in path.parts:
            yield part, path


def test_every_package_has_a_layer():
    known = set().union(*LAYERS)
    assert {part for part, _ in modules()} == known


@pytest.mark.parametrize("part", sorted(set().union(*LAYERS)))
def test_no_import_runs_up(part):
    level = {name: index for index, layer in enumerate(LAYERS) for name in layer}
    upwards = [
        f"{path.relative_to(ROOT)} imports {module}"
        for owner, path in modules()
        if owner == part
        for module in imports(path)
        if (other := part_of(module)) in level and other != part and level[other] >= level[part]
    ]
    assert not upwards, "\n".join(upwards)


def test_verl_ray_and_sglang_are_imported_in_four_places_only():
    found = [
        f"{path.relative_to(ROOT)} imports {module}"
        for part, path in modules()
        if part not in HEAVY_PACKAGES
        for module in imports(path)
        if module.split(".")[0] in HEAVY
    ]
    assert not found, "\n".join(found)


def test_the_sandbox_imports_nothing_of_this_project():
    found = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sorted(SANDBOX.rglob("*.py"))
        for module in imports(path)
        if module.split(".")[0] in ("recipe", "verl_dag") and not f"{module}.".startswith("recipe.sandbox.")
    ]
    assert not found, "\n".join(found)


def test_one_module_imports_the_sandbox():
    files = (path for folder in ("recipe", "envs", "preprocess") for path in (ROOT / folder).rglob("*.py"))
    outside = (path for path in files if SANDBOX not in path.parents)
    found = {path for path in outside for module in imports(path) if f"{module}.".startswith("recipe.sandbox.")}
    assert found == {SEAM}


def test_no_module_imports_itself_by_way_of_others():
    paths = {name_of(path): path for _, path in modules()}
    graph = {
        name: {module if module in paths else module.rpartition(".")[0] for module in imports(path)} & paths.keys()
        for name, path in paths.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_a_recipe_owns_its_data_and_the_hub_s_data_sets_know_no_recipe():
    """Only the engine is shared: preprocess/ converts what the hub has, for any workflow."""
    files = [*(ROOT / "preprocess").glob("*.py"), *(ROOT / "recipe").rglob("*.py")]
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files
        if ENGINE not in path.parents
        for module in imports(path)
        if (
            module.startswith(("preprocess", "verl_dag.preprocess"))
            if path.is_relative_to(ROOT / "recipe")
            else module.startswith("recipe.") and not module.startswith("recipe.dag.")
        )
    ]
    assert not wrong, "\n".join(wrong)
