"""Composes the run's configuration from a configuration file and typed keys.

Invariant: in a composed configuration every key that was set has an effect, and values have the right kinds; otherwise
there is a UserError with a line for each key, before anything is started. verl is located but not imported: importing
takes seconds and must not happen before the platform is chosen.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.dag.compat.marti import configuration_hint
from recipe.dag.core.errors import UserError, raise_all
from recipe.dag.core.flatten import flatten
from recipe.dag.core.paths import shipped
from recipe.dag.settings.schema import Schema, Tree, plain, tree_of, values_of
from recipe.dag.settings.typed import Typed, parse

CONFIG_FOLDER = Path(__file__).resolve().parents[1] / "config"


class Checks(Protocol):
    """Yield a message for what cannot be used of a composed file and typed settings, before and after these are
    applied. `values` and `typed` are by dotted key."""

    def check_keys(self, tree: Tree, settings: Sequence[Typed]) -> Iterable[str]: ...

    def check_values(
        self, config: DictConfig, values: Mapping[str, Any], typed: Mapping[str, Typed]
    ) -> Iterable[str]: ...


def compose_config(name: str, overrides: Sequence[str], folder: Path | None = None) -> DictConfig:
    """Compose `name`.yaml of `folder` over `dag.yaml` and verl's defaults, then apply `overrides`. Raises UserError for
    an unknown file, and for keys and values that would have no effect."""
    return compose_checked(name, overrides, folder, run_schema(), hint=configuration_hint(name))


def compose_checked(
    name: str, overrides: Sequence[str], folder: Path | None, checks: Checks, *, hint: str | None = None
) -> DictConfig:
    """Compose `name`.yaml of `folder` and apply `overrides`. `hint`: what to do if the file does not exist. Raises
    UserError with a line for each message of `checks`, or for each key without a value."""
    folder = _folder_of(name, (folder or CONFIG_FOLDER).resolve())
    if not (folder / f"{name}.yaml").is_file():
        hint = hint or "see --config-path and --config-name"
        raise UserError(f"configuration: {folder / name}.yaml does not exist; {hint}")
    arguments = parse(overrides, [CONFIG_FOLDER, folder])
    file = compose_file(name, arguments.profiles, folder)
    settings = [leaf for typed in arguments.settings for leaf in leaves_of(typed)]
    raise_all(checks.check_keys(file.tree, settings))
    config = file.copy()
    try:
        for typed in settings:
            OmegaConf.update(config, typed.key, typed.value, merge=True, force_add=True)
        values = values_of(tree_of(config))
        wrong = list(checks.check_values(config, values, {typed.key: typed for typed in settings}))
    except OmegaConfBaseException as error:
        raise UserError(f"configuration: {_first_lines(error)}") from error
    raise_all(wrong)
    missing = sorted(key for key in values if values[key] == "???" and not key.startswith(("critic.", "reward")))
    if missing:
        raise UserError(f"configuration: no value for {', '.join(missing)}; pass it as {missing[0]}=...")
    return config


def typed_settings(overrides: Sequence[str], folder: Path | None = None) -> dict[str, Typed]:
    """Return the settings in `overrides` by dotted key; a mapping is split into its leaves."""
    arguments = parse(overrides, [CONFIG_FOLDER, (folder or CONFIG_FOLDER).resolve()])
    return {leaf.key: leaf for typed in arguments.settings for leaf in leaves_of(typed)}


def _folder_of(name: str, folder: Path) -> Path:
    """Return the folder of a configuration file: of a name that the engine lacks, the recipe's that alone has it."""
    of_recipes = list(shipped("recipe").glob(f"*/config/{name}.yaml"))
    return of_recipes[0].parent if folder == CONFIG_FOLDER and len(of_recipes) == 1 else folder


@functools.cache
def default_config() -> DictConfig:
    """Return dag.yaml over verl's defaults. It is cached, so callers must not modify it."""
    return compose_file("dag", (), CONFIG_FOLDER).copy()


@functools.cache
def run_schema() -> Schema:
    return Schema(default_config(), cast(DictConfig, OmegaConf.load(CONFIG_FOLDER / "dag.yaml")))


class Composed(NamedTuple):
    pickled: bytes
    """A DictConfig: `copy.deepcopy` takes four times as long as to load it."""
    tree: Tree

    def copy(self) -> DictConfig:
        return pickle.loads(self.pickled)


def compose_file(name: str, profiles: Sequence[str], folder: Path) -> Composed:
    """Compose a configuration file of `folder`: once, until a file beside it is written, because hydra takes 0.5 s for
    verl's configuration. Raises UserError."""
    return _composed(name, tuple(profiles), folder, _stamps(folder))


def _stamps(folder: Path) -> tuple:
    """Return what changes when a configuration file of the folder does."""
    stats = ((path, path.stat()) for path in sorted([*folder.glob("*.yaml"), *folder.glob("*/*.yaml")]))
    return tuple((str(path), stat.st_mtime_ns, stat.st_size, stat.st_ino) for path, stat in stats)


def has_verl() -> bool:
    return importlib.util.find_spec("verl") is not None


def verl_config_folder() -> Path:
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise UserError("verl is not installed in this Python; activate the environment, or make one (README.md)")
    return Path(spec.origin).parent / "trainer" / "config"


@functools.lru_cache(maxsize=16)
def _composed(name: str, profiles: tuple[str, ...], folder: Path, stamps: tuple) -> Composed:
    OmegaConf.register_new_resolver("product", lambda *numbers: math.prod(map(int, numbers)), replace=True)
    search = f"hydra.searchpath=[file://{CONFIG_FOLDER},file://{verl_config_folder()}]"
    try:
        with initialize_config_dir(str(folder), version_base=None):
            config = compose(name, overrides=[search, *profiles])
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # hydra raises ValueError for config groups
        raise UserError(f"configuration: {_first_lines(error)}") from error
    return Composed(pickle.dumps(config), tree_of(config))


def leaves_of(typed: Typed) -> Iterator[Typed]:
    """Yield the settings of a mapping's leaves, or the setting itself; an empty mapping is a value."""
    if not isinstance(typed.value, dict):
        yield typed
        return
    for key, value, _ in flatten({typed.key: typed.value}):
        yield Typed(key, plain(value), typed.argument)


def _first_lines(error: Exception) -> str:
    cause = error.__cause__ if error.__cause__ is not None else error
    lines = [line.strip() for line in f"{error}\n{cause}".splitlines() if line.strip()]
    return " ".join(dict.fromkeys(lines[:3]))
