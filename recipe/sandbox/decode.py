"""Decodes a program's output.

Invariant: as in SandboxFusion, output that is not valid UTF-8 is replaced by one line that says why.
"""

from __future__ import annotations

import codecs


def decode(data: bytes, *, cut: bool = False) -> str:
    """Return `data` as text. cut: what followed was dropped, so an incomplete last character is omitted."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=not cut)
    except UnicodeDecodeError as error:
        return f"[DecodeError] {error}"
