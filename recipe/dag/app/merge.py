"""Adding an adapter to its base, as a model that any program loads.

Invariant: the base and the adapter stay as they are, and a folder with content is never changed.
"""

from __future__ import annotations

import json
from pathlib import Path

from recipe.dag.core.errors import UserError
from recipe.dag.workflow.adapter_shape import CONFIG, read_shape


def merge_adapter(adapter: Path, base: str | None, output: Path) -> str:
    """Write the model that `base` with the PEFT folder `adapter` is, with the base's tokenizer, and return the base.

    base: a folder or a hub name; None: the one that the adapter names

    Raises UserError.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from recipe.dag.platform.adapter_weights import merge
    from recipe.dag.train.models import load_model

    read_shape(adapter)
    named = base or json.loads((adapter / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not named:
        raise UserError(f"{adapter}: {CONFIG} does not name the adapter's base; pass --base MODEL")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} already exists; choose another --output")
    path, _ = load_model(named, "--base" if base else str(adapter))
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    merge(model, adapter)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(path).save_pretrained(output)
    return named
