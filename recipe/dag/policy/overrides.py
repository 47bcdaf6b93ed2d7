"""A workflow's overrides of verl's configuration, dotted or nested.

Invariant: a key that verl does not know is reported at its place in the workflow before anything starts; mappings that
are empty in verl's configuration (such as `model.override_config`) accept any key. verl itself is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.dag.core.errors import UserError
from recipe.dag.core.flatten import flatten
from recipe.dag.core.problem import Problem
from recipe.dag.core.suggestion import hint_at
from recipe.dag.workflow.overrides import Override
from recipe.dag.workflow.parse_model import show_value


def apply_overrides(
    config: DictConfig, defaults: DictConfig, branch: str, overrides: dict[str, Any], *, where: str
) -> None:
    """Set `overrides` in `config.<branch>`, in place. A mapping that is empty in `defaults` accepts any key. Raises
    UserError for other unknown keys."""
    for key, value, _ in flatten(overrides):
        try:
            parent = OmegaConf.select(defaults, f"{branch}.{key}".rpartition(".")[0])
            OmegaConf.update(config, f"{branch}.{key}", value, merge=True, force_add=parent == {})
        except OmegaConfBaseException as error:
            raise UserError(f"{where}.{key}: {str(error).splitlines()[0]}") from error


def misfits(run: DictConfig, overrides: Iterable[Override]) -> Iterator[Problem]:
    """Yield a problem for each override whose key is not in the run's configuration, or whose type does not match."""
    defaults = {branch: OmegaConf.to_container(run[branch]) for branch in ("actor_rollout_ref", "critic")}
    for override in overrides:
        if (message := _misfit(defaults[override.branch], override)) is not None:
            yield override.problem(message)


def _misfit(default: Any, override: Override) -> str | None:
    """Return why `override` does not fit verl's values `default` of its branch; None if it does."""
    at = override.branch
    for part in override.key.split("."):
        if default == {} or _is_open(default):
            return None
        if not isinstance(default, dict) or part not in default:
            return f"verl's `{at}` has no `{part}`{hint_at(part, default) if isinstance(default, dict) else ''}"
        default, at = default[part], f"{at}.{part}"
    value = override.value
    if isinstance(default, dict) and default and not isinstance(value, dict):
        return f"verl's `{at}` is a mapping; write `{override.key}: {{key: value}}`, got {show_value(value)}"
    # before numbers: Python's bool is an int
    if isinstance(default, bool):
        return None if isinstance(value, bool) else f"expected true or false, got {show_value(value)}"
    if isinstance(default, int | float) and isinstance(value, bool | str | list | dict):
        return f"expected a number, got {show_value(value)}"
    return None


def _is_open(default: Any) -> bool:
    """Check for an interpolation, whose value is not known before the run starts."""
    return isinstance(default, str) and default.startswith("${")
