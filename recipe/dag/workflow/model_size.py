"""The parameter count and the dimensions of a model, from its config.json alone.

Invariant: no weights are read, nothing is downloaded, and a model of an unknown architecture raises UnknownSize.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.workflow.interpolation import resolve_env

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, slots=True)
class ModelSize:
    parameters: int
    value_parameters: int
    """Parameters of the same body with a value head."""
    hidden: int
    layers: int
    vocabulary: int
    key_value_width: int
    """Key-value heads x width of a head: values per token and layer in the cache, for keys and again for values."""
    query_width: int
    """Heads x width of a head."""
    mlp_width: int
    """Width of the MLP, or the summed width of the experts that a token visits."""
    layer_parameters: int
    """Parameters of one layer, including all its experts."""
    routed: int = 0
    """Experts that a token visits; 0 for a model without experts."""
    head_norms: bool = False
    """Queries and keys of each head are normalized."""

    def adapter_parameters(self, rank: int, targets: Container[str] | None = None) -> int:
        """Return the parameters of an adapter on the linear layers with these names; None: on all."""
        query, key_value = (self.hidden, self.query_width), (self.hidden, self.key_value_width)
        mlp = (self.hidden, self.mlp_width)
        widths = {"q_proj": query, "k_proj": key_value, "v_proj": key_value, "o_proj": query}
        widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), mlp)
        return (
            self.layers * rank * sum(sum(pair) for name, pair in widths.items() if targets is None or name in targets)
        )

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes that a token takes in a server's KV cache (bf16)."""
        return 2 * 2 * self.layers * self.key_value_width


class UnknownSize(Exception):
    """The size of a model is unknown; the text is the reason."""


def context_of(path: str, environ: Mapping[str, str] | None = None) -> int | None:
    """Return the most tokens that the model at `path` was made for; None if that is unknown."""
    try:
        config = _read(path, environ)
        return int(config["max_position_embeddings"])
    except (UnknownSize, KeyError, TypeError, ValueError):
        return None


def size_of(path: str, environ: Mapping[str, str] | None = None) -> ModelSize:
    """Return the size of the model at `path`, a folder or hub name that may contain `${oc.env:NAME}`. Raises
    UnknownSize."""
    config = _read(path, environ)
    try:
        return _count(config)
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise UnknownSize(f"the config.json of {path} does not describe a supported decoder") from error


def _read(path: str, environ: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the model's config.json, or the part of it about the text model. Raises UnknownSize."""
    try:
        name = resolve_env(path, environ=environ)
    except UserError as error:
        raise UnknownSize(str(error)) from error
    file = _config_file(name, os.environ if environ is None else environ)
    if file is None:
        fetch = f"; fetch that one file: hf download {name} config.json" if _HUB_NAME.fullmatch(name) else ""
        raise UnknownSize(f"no config.json of {name} on this machine{fetch}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return config.get("text_config", config)
    except (OSError, ValueError, AttributeError) as error:
        raise UnknownSize(f"{file} does not describe a supported decoder") from error


def _config_file(name: str, environ: Mapping[str, str]) -> Path | None:
    """Return the newest config.json of a model: in the folder of that name, or in the hub's cache."""
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder / "config.json"
    home = Path(environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(environ.get("HF_HUB_CACHE") or home / "hub")
    files = (cache / f"models--{name.replace('/', '--')}").glob("snapshots/*/config.json")
    return max(files, key=lambda file: file.stat().st_mtime, default=None)


def _count(config: dict[str, Any]) -> ModelSize:
    """Count the parameters of a decoder with gated MLPs (Llama, Mistral, Qwen2, Qwen3, their mixtures of experts)."""
    hidden, layers, vocabulary = (config[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    kind = config.get("model_type", "")
    attention = 2 * hidden * heads * width + 2 * hidden * groups * width
    if config.get("attention_bias", kind == "qwen2"):
        attention += (heads + 2 * groups) * width
    head_norms = kind.startswith("qwen3")
    if head_norms:
        attention += 2 * width
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        routed = int(config.get("num_experts_per_tok") or 1)
        inner = config.get("moe_intermediate_size") or config["intermediate_size"]
        mlp = experts * 3 * hidden * inner + hidden * experts
        mlp_width = inner * routed
    else:
        routed, mlp_width = 0, config["intermediate_size"]
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
        query_width=heads * width,
        mlp_width=mlp_width,
        layer_parameters=layer,
        routed=routed,
        head_norms=head_norms,
    )
