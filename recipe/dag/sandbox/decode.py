"""A program's output as text.

Invariant: the rule is SandboxFusion's. Output is text only when all of it is UTF-8; otherwise one line says why not.
"""

from __future__ import annotations

import codecs


def decode(data: bytes, *, cut: bool = False) -> str:
    """cut: more followed and was dropped, so a last character may be incomplete; it is left out."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=not cut)
    except UnicodeDecodeError as error:
        return f"[DecodeError] {error}"
