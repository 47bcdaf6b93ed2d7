"""Takes the force out of control tokens in a text that a model is to read, and not to obey.

Invariant: pure; a text stays as it is except for a ZERO WIDTH JOINER after the first character of each control token.
A tokenizer finds such tokens in the text, whatever pieces a model wrote them in, so it is the text that is searched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

JOINER = "\u200d"
_KNOWN = re.compile(
    r"<(?=[|｜])|<(?=/?s>)|<(?=</?SYS>>)|<(?=(?:start|end)_of_turn>|(?:bos|eos|pad|unk)>)"
    r"|\[(?=(?:gMASK|/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT))\])"
)
"""The first character of a control token of the common chat models, whose tokenizer need not be known."""
_TAG = re.compile(r"[^\w\s]\S*[^\w\s]")


def inert(text: str) -> str:
    """Return the text without the control tokens of the common chat models: `<|...|>`, `</s>`, `[INST]` and the
    like."""
    return _KNOWN.sub(_broken, text)


def inert_for(tokenizer: Any) -> Callable[[str], str]:
    """Return `inert` that also breaks the tokenizer's special tokens, and those of its added tokens that look like a
    tag: neither begin nor end with a letter, digit or space. `tokenizer`: None, or one of transformers."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {token.content for token in added if token.special or _TAG.fullmatch(token.content)}
    names |= {str(name) for name in getattr(tokenizer, "all_special_tokens", ())}
    own = sorted(name for name in names if len(name.strip()) > 1 and JOINER not in name)
    if not own:
        return inert
    # what follows is looked at and not consumed, so that tokens which overlap are all found
    pattern = re.compile("|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in own))
    return lambda text: pattern.sub(_broken, inert(text))


def _broken(match: re.Match[str]) -> str:
    return match[0] + JOINER
