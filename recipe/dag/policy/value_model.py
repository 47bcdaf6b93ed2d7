"""verl's value engine without its dependency on flash-attn.

Invariant: verl's `load_valuehead_model` always requires flash_attention_2; this engine loads the same transformers
class with the configured attention and a value head of zeros, so that every initial value is 0. Nothing else differs
from verl's engine.
"""

from __future__ import annotations

import torch
import verl.utils.model as stock
from verl.utils.device import get_device_name, get_vendor
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from recipe.dag.policy.engine import FullOffload, GatheredWeights, PackedInputs, QuantizedMoments

HEADS = ("score", "classifier")
"""Names of the last layer in the token classifiers of transformers."""


def load_value_model(local_path: str, torch_dtype: torch.dtype, model_config, trust_remote_code: bool):
    """Load a token classifier with a zero head; raises ValueError if transformers has none for this architecture."""
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation=model_config._attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    head = next(getattr(model, name) for name in HEADS if hasattr(model, name))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    return model


class ValueEngine(QuantizedMoments, FullOffload, GatheredWeights, PackedInputs, FSDPEngineWithValueHead):
    """verl's value engine, which builds its module with `load_value_model`."""

    def _build_module(self):
        # verl looks the loader up in its module while it builds; a process builds one model at a time
        original, stock.load_valuehead_model = stock.load_valuehead_model, load_value_model
        try:
            return super()._build_module()
        finally:
            stock.load_valuehead_model = original


def register() -> None:
    """Make verl's TrainingWorker build ValueEngine in this process: (device, vendor) keys take precedence in verl."""
    device = get_device_name()
    registered = EngineRegistry._engines.get("value_model", {}).get("fsdp2", {})
    if ValueEngine not in registered.values():
        EngineRegistry.register("value_model", ["fsdp2"], device, get_vendor())(ValueEngine)
