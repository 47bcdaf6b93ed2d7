"""A workflow's overrides of verl's configuration, dotted or nested.

Invariant: a key that verl does not know is a UserError that names where it was written; what verl leaves empty (such as
`model.override_config`) takes any key.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.dag.errors import UserError


def apply_overrides(
    config: DictConfig, defaults: DictConfig, branch: str, given: dict[str, Any], *, where: str
) -> None:
    """Put `given` into `config.<branch>` in place; `defaults` says what verl leaves empty."""
    for key, value in flatten(given).items():
        try:
            parent = OmegaConf.select(defaults, f"{branch}.{key}".rpartition(".")[0])
            OmegaConf.update(config, f"{branch}.{key}", value, merge=True, force_add=parent == {})
        except OmegaConfBaseException as error:
            raise UserError(f"{where}.{key}: {str(error).splitlines()[0]}") from error


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys to dotted ones; empty dictionaries are values."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
