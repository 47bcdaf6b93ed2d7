"""The shape of an adapter, as a workflow or the adapter_config.json of a PEFT folder says it.

Invariant: a shape is all that the adapter computes besides its weights. What PEFT knows beyond it (rslora, DoRA, ranks
that differ among layers, biases) is refused, because servers ignore it silently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.workflow.agent_schema import Critic, Lora
from recipe.dag.workflow.interpolation import resolve_env

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HEAD = "value_head.safetensors"
"""The value head of a critic, beside them: `weight` [1, hidden] and `bias` [1]."""
ALL_LINEAR = "all-linear"
STEP = 16
"""How many columns a GPU multiplies at once."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_rslora": (None, False),
    "use_dora": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (None, False),
    "layers_to_transform": (None, []),
    "exclude_modules": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
}
"""Options of PEFT that change what an adapter computes -> the values at which they do not."""


@dataclass(frozen=True, slots=True)
class AdapterShape:
    rank: int
    alpha: float
    targets: tuple[str, ...]
    """`(ALL_LINEAR,)`, or the last names of the layers."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


def columns_of(rank: int) -> int:
    """Return how many columns servers have for an adapter: those after its rank are 0."""
    return -(-rank // STEP) * STEP


def shape_of(lora: Lora, where: str = "") -> AdapterShape:
    """Return the shape of a workflow's adapter. `where`: the key of `lora.path`, for errors. Raises UserError."""
    if lora.path is not None:
        return read_shape(resolve_env(lora.path, where), where)
    return AdapterShape(lora.rank, lora.scaled_alpha, lora.targets)


def critic_shape(policy: AdapterShape, critic: Critic) -> AdapterShape:
    """Return the shape of an adapter policy's own critic."""
    rank = critic.rank or policy.rank
    return replace(policy, rank=rank, alpha=policy.scale * rank)


def read_shape(folder: str | Path, where: str = "") -> AdapterShape:
    """Return the shape of the adapter in a PEFT folder. Raises UserError if there is none, or one with other options.

    where: the key or option that names the folder, for errors
    """
    file = Path(folder).expanduser() / CONFIG
    named = f"{where}: {folder}" if where else str(folder)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        targets = config["target_modules"]
        targets = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
        shape = AdapterShape(int(config["r"]), float(config["lora_alpha"]), targets)
    except FileNotFoundError as error:
        raise UserError(f"{named} is not a folder of PEFT ({CONFIG} is missing)") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{named}: {CONFIG} does not describe a LoRA ({type(error).__name__}: {error})") from error
    if config.get("peft_type") != "LORA":
        raise UserError(f"{named}: peft_type is {config.get('peft_type')}, and only LORA is read")
    for option, neutral in _NEUTRAL.items():
        if config.get(option) not in neutral:
            raise UserError(f"{named}: {option}={config[option]} is not supported; train the adapter without it")
    return shape
