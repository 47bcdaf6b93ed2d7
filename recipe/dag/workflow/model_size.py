"""How many parameters a model has, and of which shapes, from its config.json alone.

Invariant: no weights are read, nothing is downloaded, and a model of a shape that is not understood has no number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.dag.errors import UserError
from recipe.dag.workflow.interpolation import resolve_env


@dataclass(frozen=True, slots=True)
class ModelSize:
    parameters: int
    value_parameters: int
    """The same body under a value head."""
    hidden: int
    layers: int
    vocabulary: int
    key_value_width: int
    """Key-value heads x their width: what a token keeps in the cache, per layer, once for keys and once for values."""
    mlp_width: int
    """Of the MLP, or of the experts that a token visits together."""
    layer_parameters: int
    """Of one layer, all its experts included."""

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embeddings, a head of its own, the last norm."""
        return self.parameters - self.layers * self.layer_parameters

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes that a token takes in a server's KV cache (bf16)."""
        return 2 * 2 * self.layers * self.key_value_width


class UnknownSize(Exception):
    """Why there is no number."""


def size_of(path: str, environ: Mapping[str, str] | None = None) -> ModelSize:
    """`path`: a folder or hub name, `${oc.env:NAME}` included. Raises UnknownSize."""
    try:
        place = resolve_env(path, environ=environ)
    except UserError as error:
        raise UnknownSize(str(error)) from error
    file = _config_file(place, os.environ if environ is None else environ)
    if file is None:
        raise UnknownSize(f"no config.json of {place} on this machine")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return _count(config.get("text_config", config))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise UnknownSize(f"{file} describes no decoder that is known here") from error


def _config_file(place: str, environ: Mapping[str, str]) -> Path | None:
    folder = Path(place).expanduser()
    if (folder / "config.json").is_file():
        return folder / "config.json"
    home = Path(environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(environ.get("HF_HUB_CACHE") or home / "hub")
    found = (cache / f"models--{place.replace('/', '--')}").glob("snapshots/*/config.json")
    return max(found, key=lambda file: file.stat().st_mtime, default=None)


def _count(config: dict[str, Any]) -> ModelSize:
    """A decoder with gated MLPs (Llama, Mistral, Qwen2, Qwen3, their mixtures of experts)."""
    hidden, layers, vocabulary = (config[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    kind = config.get("model_type", "")
    attention = 2 * hidden * heads * width + 2 * hidden * groups * width
    if config.get("attention_bias", kind == "qwen2"):
        attention += (heads + 2 * groups) * width
    if kind.startswith("qwen3"):
        attention += 2 * width
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        inner = config.get("moe_intermediate_size") or config["intermediate_size"]
        mlp = experts * 3 * hidden * inner + hidden * experts
        mlp_width = inner * int(config.get("num_experts_per_tok") or 1)
    else:
        mlp_width = config["intermediate_size"]
        mlp = 3 * hidden * mlp_width
    layer = attention + mlp + 2 * hidden
    body = vocabulary * hidden + layers * layer + hidden
    head = 0 if config.get("tie_word_embeddings", False) else vocabulary * hidden
    return ModelSize(
        parameters=body + head,
        value_parameters=body + hidden + 1,
        hidden=hidden,
        layers=layers,
        vocabulary=vocabulary,
        key_value_width=groups * width,
        mlp_width=mlp_width,
        layer_parameters=layer,
    )
