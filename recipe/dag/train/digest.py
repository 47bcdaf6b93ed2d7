"""Short names of content: of files, models and samples.

Invariant: equal content has an equal digest wherever it lies. Files above FULL bytes are sampled, so that a model of
many gigabytes costs a few megabytes to read; training changes all of its weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

FULL = 32 * 2**20
"""Bytes up to which a file is read whole."""
BLOCKS, BLOCK = 32, 2**18
"""So many blocks of so many bytes of a larger one: evenly spaced, its first (a safetensors header) and last too."""
MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "vocab*", "merges.txt", "*.model", "*.py", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf"),
)


def file_digest(path: Path) -> str:
    """16 hexadecimal digits. Raises OSError."""
    size = path.stat().st_size
    state = hashlib.blake2b(str(size).encode(), digest_size=8)
    with path.open("rb") as file:
        if size <= FULL:
            for chunk in iter(lambda: file.read(2**20), b""):
                state.update(chunk)
        else:
            for index in range(BLOCKS):
                file.seek(index * (size - BLOCK) // (BLOCKS - 1))
                state.update(file.read(BLOCK))
    return state.hexdigest()


def model_digest(path: str) -> str:
    """Of a model folder's configuration, tokenizer and weights; of a hub name, the commit that the cache holds, ""
    where it holds none."""
    folder = Path(path)
    if not folder.is_dir():
        return _cached_commit(path)
    names = sorted(
        file.name
        for file in folder.iterdir()
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in MODEL_FILES)
    )
    return _digest([name, file_digest(folder / name)] for name in names)


def samples_digest(samples: Iterable[dict[str, Any]]) -> str:
    """Of problems and answers, in their order; the file format they came in does not count."""
    return _digest(samples)


def _digest(items: Iterable[Any]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for item in items:
        state.update(json.dumps(item, sort_keys=True, default=str).encode() + b"\n")
    return state.hexdigest()


def _cached_commit(name: str) -> str:
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name of a model at all; reported where it is loaded
        return ""
    return Path(cached).parent.name if isinstance(cached, str) else ""
