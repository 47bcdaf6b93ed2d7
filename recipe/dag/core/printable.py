"""Makes a text of a model, a server or a file harmless to a terminal and legal in XML.

Invariant: pure; letters of every script, line feeds and tabs stay.
"""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, which start the escape sequences
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # show a text in another order than it has
    "\ud800-\udfff\ufffe\uffff]"  # not characters
)


def printable(text: str) -> str:
    """Return the text with REPLACEMENT CHARACTERs for what may not be printed."""
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))
