"""verl's value engine without its one demand that not every machine can meet: flash-attn.

Invariant: verl's `load_valuehead_model` names flash_attention_2 whatever the configuration says; this engine loads the
same transformers class with the configured attention, under a value head of zeros, so that every first value is 0.
Nothing else differs from verl's engine.
"""

from __future__ import annotations

import torch
import verl.utils.model as stock
from verl.utils.device import get_device_name, get_vendor
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from recipe.dag.policy.engine import FullOffload, PackedInputs

HEADS = ("score", "classifier")
"""What transformers calls the last layer of its token classifiers."""


def load_value_model(local_path: str, torch_dtype: torch.dtype, model_config, trust_remote_code: bool):
    """A token classifier with one label; raises ValueError where transformers has none for this architecture."""
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


class ValueEngine(FullOffload, PackedInputs, FSDPEngineWithValueHead):
    def _build_module(self):
        # verl looks the loader up when it builds the module; this process builds one module at a time
        original, stock.load_valuehead_model = stock.load_valuehead_model, load_value_model
        try:
            return super()._build_module()
        finally:
            stock.load_valuehead_model = original


def register() -> None:
    """Make verl's TrainingWorker build this engine in this process. A (device, vendor) key wins over verl's own."""
    device = get_device_name()
    taken = EngineRegistry._engines.get("value_model", {}).get("fsdp2", {})
    if ValueEngine not in taken.values():
        EngineRegistry.register("value_model", ["fsdp2"], device, get_vendor())(ValueEngine)
