"""The tokenizers of the policies, read once in each process: one of 262,000 tokens takes seconds."""

from __future__ import annotations

from functools import cache
from typing import Any

from recipe.dag.settings.absolute import absolute_if_local


def shared_tokenizer(source: str, *, trust_remote_code: bool) -> Any:
    """Return the tokenizer in a folder or of a hub name as verl makes it, with a token for padding; the same object for
    every caller, however it writes the folder's path."""
    return _read(absolute_if_local(source) or source, trust_remote_code)


@cache
def _read(source: str, trust_remote_code: bool) -> Any:
    from verl.utils import hf_tokenizer

    return hf_tokenizer(source, trust_remote_code=trust_remote_code)
