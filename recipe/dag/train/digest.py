"""Digests of files, models and samples.

Invariant: equal content has an equal digest, whatever its path. Files larger than FULL bytes are sampled, so a model of
many gigabytes costs a few megabytes to read; that suffices because training changes all weights.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

FULL = 32 * 2**20
"""Files up to this many bytes are read completely."""
BLOCKS, BLOCK = 32, 2**18
"""Number and size in bytes of the blocks read from a larger file: evenly spaced, with the first (a safetensors header)
and the last among them."""
MODEL_FILES = (
    "config.json adapter_config.json generation_config.json tokenizer* special_tokens_map.json added_tokens.json "
    "chat_template* vocab* merges.txt *.model *.py *.safetensors *.bin *.pt *.pth *.gguf"
).split()


def file_digest(path: Path) -> str:
    """Return the file's digest, 16 hexadecimal digits. Raises OSError."""
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


def file_checksum(path: Path) -> str:
    """Return the CRC-32 of the whole file, 8 hexadecimal digits: it finds damage at the lowest cost, about 2 GB per
    second and core. Raises OSError."""
    checksum = 0
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(2**22), b""):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"


def model_digest(path: str) -> str:
    """Return the digest of a model folder's configuration, tokenizer and weights, or for a hub name the commit in the
    local cache ("" if it is not cached)."""
    folder = Path(path)
    if not folder.is_dir():
        return _cached_commit(path)
    names = sorted(
        file.name
        for file in folder.iterdir()
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in MODEL_FILES)
    )
    return items_digest([name, file_digest(folder / name)] for name in names)


def items_digest(items: Iterable[Any]) -> str:
    """Return the digest of items in JSON, in their order: that of samples does not depend on the format of a file."""
    state = hashlib.blake2b(digest_size=8)
    for item in items:
        state.update(json.dumps(item, sort_keys=True, default=str).encode() + b"\n")
    return state.hexdigest()


def _cached_commit(name: str) -> str:
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a valid model name; the error is reported when the model is loaded
        return ""
    return Path(cached).parent.name if isinstance(cached, str) else ""
