"""Separates thoughts, code and tool calls in a model's text.

Invariant: pure. Text inside <think>, closed or not, nested or not, is a thought, and no tool call, program or answer is
ever taken from one.
"""

from __future__ import annotations

import re
import textwrap

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
_TAGS = re.compile(r"<(/?)think>")
# A fence starts a line, indented or not. A block without a closing fence extends to the end of the text.
_PYTHON = re.compile(
    r"^[ \t]*```[ \t]*(?:python[\d.]*|py3?)\b[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE
)
TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""A call without a closing tag extends to the end of the text."""


def after_thinking(text: str, *, opened: bool = False) -> str:
    """Return the text without its <think> spans, nested ones included; a span that never ends extends to the end.
    `opened`: the prompt opened a span. A closing tag without an opening one ends a span that began with the text.
    """
    depth, start, kept = int(opened), 0, []
    for tag in _TAGS.finditer(text):
        closing = bool(tag[1])
        if not closing:
            if depth == 0:
                kept.append(text[start : tag.start()])
            depth += 1
        elif depth <= 1:
            if depth == 0:
                kept.clear()  # the text so far was a thought, although nothing opened it
            depth, start = 0, tag.end()
        else:
            depth -= 1
    return "".join(kept) + ("" if depth else text[start:])


def ends_in_thought(text: str, *, opened: bool = False) -> bool:
    """Return whether a <think> span is open at the end of the text. `opened`: the prompt opened one."""
    depth = int(opened)
    for tag in _TAGS.finditer(text):
        depth = max(0, depth - 1) if tag[1] else depth + 1
    return depth > 0


def python_blocks(text: str) -> list[str]:
    """Return the code of each fenced Python block, without common indentation."""
    return [textwrap.dedent(body) for body in _PYTHON.findall(text)]


def prose(text: str) -> str:
    """Return the text outside thoughts, tool calls and Python blocks."""
    return _PYTHON.sub("\n", TOOL_CALL.sub("\n", after_thinking(text)))
