"""What of a model's text is thought, code, or said.

Invariant: pure functions of their strings. What stands inside <think>, closed or not, nested or not, is thought: no
tool call, no program and no answer is ever read out of it.
"""

from __future__ import annotations

import re
import textwrap

OPEN_TAG = "<think>"
_TAGS = re.compile(r"<(/?)think>")
# A fence at the start of a line, indented or not. One without its closing fence reaches to the end of the text.
_PYTHON = re.compile(
    r"^[ \t]*```[ \t]*(?:python[\d.]*|py3?)\b[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE
)
TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""A call whose closing tag is missing is read to the end of the text."""


def after_thinking(text: str, *, opened: bool = False) -> str:
    """Return the text without its <think> spans, nested ones included; a span that never ends takes the rest with it.
    `opened`: the prompt has opened a span. A closing tag without an opening one ends a span that began with the text.
    """
    depth, start, said = int(opened), 0, []
    for tag in _TAGS.finditer(text):
        closing = bool(tag[1])
        if not closing:
            if depth == 0:
                said.append(text[start : tag.start()])
            depth += 1
        elif depth <= 1:
            if depth == 0:
                said.clear()
            depth, start = 0, tag.end()
        else:
            depth -= 1
    return "".join(said) + ("" if depth else text[start:])


def python_blocks(text: str) -> list[str]:
    """Return the code of each fenced Python block, without common indentation."""
    return [textwrap.dedent(body) for body in _PYTHON.findall(text)]


def prose(text: str) -> str:
    """Return what was said outside of thoughts, tool calls and Python blocks."""
    return _PYTHON.sub("\n", TOOL_CALL.sub("\n", after_thinking(text)))
