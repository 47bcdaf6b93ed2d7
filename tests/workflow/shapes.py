"""config.json files of published models, for tests of what they take."""

from __future__ import annotations

import json
from pathlib import Path

from recipe.dag.workflow.model_size import ModelSize, size_of

_HEADS = {"0.5b": (896, 4864, 24, 14, 2), "1.5b": (1536, 8960, 28, 12, 2), "3b": (2048, 11008, 36, 16, 2)}
_HEADS |= {"7b": (3584, 18944, 28, 28, 4), "0.2b": (576, 1536, 30, 9, 3)}
QWEN = {
    name: {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": 151936,
        "tie_word_embeddings": name != "7b",
    }
    for name, (hidden, inner, layers, heads, groups) in _HEADS.items()
}
"""Qwen2.5's, by their published size; 0.2b has SmolLM2-135M's layers and Qwen's vocabulary."""


def write_config(folder: Path, config: dict) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def qwen(name: str, folder: Path) -> ModelSize:
    return size_of(write_config(folder / name, QWEN[name]))
