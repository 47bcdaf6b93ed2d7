"""The tokenizers of the policies, read once in each process: one of 262,000 tokens takes seconds."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def shared_tokenizer(source: str, *, trust_remote_code: bool) -> Any:
    """Return a model's tokenizer as verl makes it, with a token for padding; the same object for every caller."""
    from verl.utils import hf_tokenizer

    return hf_tokenizer(source, trust_remote_code=trust_remote_code)
