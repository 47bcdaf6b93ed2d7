"""A workflow's overrides of verl's configuration, dotted or nested.

Invariant: a key that verl does not know is told where it was written, before anything is started; what verl leaves
empty (such as `model.override_config`) takes any key. verl's configuration is read, verl is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.dag.errors import UserError
from recipe.dag.workflow.dotted import flat
from recipe.dag.workflow.overrides import Override
from recipe.dag.workflow.pieces import shown
from recipe.dag.workflow.problem import Problem, closest


def apply_overrides(
    config: DictConfig, defaults: DictConfig, branch: str, given: dict[str, Any], *, where: str
) -> None:
    """Put `given` into `config.<branch>` in place; `defaults` says what verl leaves empty."""
    for key, value, _ in flat(given):
        try:
            parent = OmegaConf.select(defaults, f"{branch}.{key}".rpartition(".")[0])
            OmegaConf.update(config, f"{branch}.{key}", value, merge=True, force_add=parent == {})
        except OmegaConfBaseException as error:
            raise UserError(f"{where}.{key}: {str(error).splitlines()[0]}") from error


def misfits(run: DictConfig, overrides: Iterable[Override]) -> Iterator[Problem]:
    """Overrides of keys that the run's configuration does not have, and of another kind than what stands there."""
    known = {branch: OmegaConf.to_container(run[branch]) for branch in ("actor_rollout_ref", "critic")}
    for override in overrides:
        if (message := _misfit(known[override.branch], override)) is not None:
            yield override.problem(message)


def _misfit(known: Any, override: Override) -> str | None:
    at = override.branch
    for part in override.key.split("."):
        if known == {} or _is_open(known):
            return None
        if not isinstance(known, dict) or part not in known:
            near = closest(part, known) if isinstance(known, dict) else None
            return f"verl's `{at}` has no `{part}`" + (f"; did you mean `{near}`?" if near else "")
        known, at = known[part], f"{at}.{part}"
    value = override.value
    if isinstance(known, dict) and known and not isinstance(value, dict):
        return f"verl's `{at}` has keys of its own; write `{override.key}: {{key: value}}`, got {shown(value)}"
    if isinstance(known, bool) and not isinstance(value, bool):
        return f"expected true or false, got {shown(value)}"
    if isinstance(known, int | float) and not isinstance(known, bool) and isinstance(value, bool | str | list | dict):
        return f"expected a number, got {shown(value)}"
    return None


def _is_open(known: Any) -> bool:
    """What stands there is known when the run starts, not before."""
    return isinstance(known, str) and known.startswith("${")
