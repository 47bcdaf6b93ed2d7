"""A workflow's overrides of verl's configuration, dotted or nested.

Invariant: a key that verl does not know is a UserError that names where it was written; what verl leaves empty (such as
`model.override_config`) takes any key.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.dag.errors import UserError
from recipe.dag.workflow.dotted import flat


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
